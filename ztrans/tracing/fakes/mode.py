"""Fakes: the mode under which a step is traced. Its operations compute the types of their results, and no elements.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ...ir.collectives.user_collectives import functional_name
from ...ir.relations import instances
from .templates import Template, key_of, template_of

DEVICE = torch.ops.prim.device.default  # the operation behind `x.device`, which is called most often of all
_CTC_LOSS = torch.ops.aten._ctc_loss.default


class Fakes(FakeTensorMode):
    """A mode of fake tensors that creates the results of most calls from templates (see `templates`).

    PyTorch has a cache for this too, but nearly half of a trace would be spent in looking up its entries.

    Fused optimizers, which overwrite their arguments and return nothing, are skipped. PyTorch would run these on real
    tensors, as large as the model, to learn the types of their results.
    """

    supports_higher_order_operators = True
    templates: ClassVar[dict[tuple, Template | None]] = {}  # by operation and types of arguments

    def __init__(self) -> None:
        # The tracing rule of while_loop asks for the environment; all shapes of a program are numbers.
        shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        super().__init__(allow_non_fake_inputs=True, shape_env=shapes, static_shapes=True)
        self.cache_enabled = False  # that of PyTorch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as that of `Watch`

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is DEVICE:
            return device_of(*args)
        if func is _CTC_LOSS:
            return _ctc_losses(*args)
        if isinstance(func, HigherOrderOperator) and func not in registered_hop_fake_fns:
            # The operator looks for the class of its mode, and does not know a subclass.
            return func.python_key_table[FakeTensorMode](self, *args, **kwargs)
        if isinstance(func, OpOverload) and not func._schema.returns and func._schema.name.startswith("aten::_fused_"):
            return None
        key = key_of(self, func, args, kwargs)
        if key is None:
            with _unknown(instances(args, FakeTensor) if functional_name(func) else ()):
                return self.dispatch(func, types, args, kwargs)
        if key not in self.templates:
            result = self.dispatch(func, types, args, kwargs)
            self.templates[key] = template_of(self, args, kwargs, result)
            return result
        template = self.templates[key]
        return template(self, args) if template else self.dispatch(func, types, args, kwargs)


@contextlib.contextmanager
def _unknown(tensors: Iterable[FakeTensor]) -> Iterator[None]:
    """Hide the values of tensors that are constants, such as `torch.tensor(1.0)`.

    PyTorch runs an operation of constants on their values. A collective would wait for ranks that may not trace now.
    """
    values = [(x, x.constant) for x in tensors]
    try:
        for x, _ in values:
            x.constant = None
        yield
    finally:
        for x, value in values:
            x.constant = value


def device_of(x: Any) -> torch.device:
    """The device of a fake tensor, as `FakeTensorMode` answers."""
    if isinstance(x, FakeTensor):
        return torch.device("meta") if x.fake_mode.in_kernel_invocation else x.fake_device
    return DEVICE(x)


def _ctc_losses(log_probs: torch.Tensor, _: Any, __: Any, lengths: Sequence[int], *___: Any) -> tuple:
    """The types of the results of `ctc_loss` whose lengths are lists of numbers, for which PyTorch has no rule."""
    steps, rows = log_probs.shape[:2]
    return log_probs.new_empty(rows), log_probs.new_empty(rows, steps, 2 * max(lengths) + 1)
