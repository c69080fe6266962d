"""A dispatch mode that records where each operation of a trace comes from.

make_fx records the operations of a step as nodes of an FX graph. This mode runs before it. For each operation it stores
in the metadata of the node the user's line, whether autograd runs the operation, whether autograd records it, and the
checkpoint around it. A backward operation has the line of the forward operation with the sequence number of the running
autograd node.

The mode also refuses operations that a program cannot hold, with the user's line. It never changes the result of an
operation. An operation that reads elements has a result if their values are known (see `known_values`).

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

from ..ir.nested import tensors_in
from ..ir.op_facts import draws, is_written
from ..ir.source import Source, user_source, where
from . import c10d, errors
from .checkpoints import CheckpointMark, forget_policy, mark_of_operation
from .known_values import KnownInputs, result_of_known
from .regions import Fact

# The operation of `x.device`.
DEVICE = torch.ops.prim.device.default
# Operations that read elements. A traced tensor has none.
_READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
)
_WHILE_LOOPS = (
    torch.ops.higher_order.while_loop,
    torch.ops.higher_order.while_loop_stack_output,
)
# `torch.tensor(...)` in a step.
_LITERALS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
# The key of the origin in a node's metadata, under FX's key "custom".
_ORIGIN = "ztrans"


class Origin(NamedTuple):
    """Where an operation comes from: the user's line, the facts for its region, the checkpoint around it."""

    source: Source | None
    fact: Fact
    checkpoint: CheckpointMark | None = None


def origin_of(node: fx.Node) -> Origin | None:
    """The origin of the operation that a node records; None for a node that does not come from a step's operation."""
    return node.meta.get("custom", {}).get(_ORIGIN)


@contextlib.contextmanager
def nodes_with_origin(origin: Origin) -> Iterator[None]:
    """Give this origin to the nodes that make_fx adds inside the context.

    Only the key "custom" of the metadata is restored afterwards: checkpoints and FX may write other keys inside.
    """
    meta = fx_traceback.current_meta
    outer = meta.get("custom")
    meta["custom"] = {_ORIGIN: origin}
    try:
        yield
    finally:
        if outer is None:
            meta.pop("custom", None)
        else:
            meta["custom"] = outer


class Annotate(TorchDispatchMode):
    """Records the origin of each operation of `step`, and refuses operations that a program cannot hold.

    Args:
        step: the name of the step, for errors.
        fakes: the mode of the trace's fake tensors.
        known: the inputs whose values the step may read.
    """

    supports_higher_order_operators = True

    def __init__(self, step: str, fakes: FakeTensorMode, known: KnownInputs) -> None:
        super().__init__()
        self.step = step
        self.fakes = fakes
        self.known = known
        # The user's lines by the sequence numbers of autograd's nodes.
        self._lines: dict[int, Source | None] = {}
        self._last_number = torch.autograd._get_sequence_nr() - 1

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # A higher-order operator traces its functions without this mode.
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Skipping would guard every call against torch.compile, which takes longer than the call.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # PyTorch asks for the device of every gradient. The tensor knows it: skip the modes below.
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        # Without a proxy mode make_fx records no node.
        if func is DEVICE or get_proxy_mode() is None:
            return func(*args, **kwargs)
        origin = self._origin()
        # If the forward line of a backward operation is unknown, errors name the line that runs backward.
        line = origin.source or user_source()
        tensors = tensors_in((args, kwargs))
        if isinstance(func, HigherOrderOperator):
            self._check_higher_order(func, args, line)
            self._check_tensors(func, tensors, line)
        else:
            self._check_tensors(func, tensors, line)
            if func in _READS:
                result = result_of_known(func, args, kwargs, self.known, line)
                if result is not None:
                    return result
            # An operation of a DTensor is checked when it runs on local tensors.
            if not any(map(is_traceable_wrapper_subclass_type, types)):
                self._check(func, args, kwargs, line, origin.fact.backward)
        with self._errors_of(func, line), nodes_with_origin(origin):
            try:
                result = func(*args, **kwargs)
            finally:
                forget_policy()
        if func in _LITERALS:
            _forget_value(result)
        return result

    def _origin(self) -> Origin:
        """The origin of the operation that is being called."""
        running = torch._C._current_autograd_node()
        source = user_source() if running is None else self._lines.get(running._sequence_nr())
        # Autograd numbers its nodes, and makes the nodes of an operation before the operation is dispatched here.
        latest = torch.autograd._get_sequence_nr() - 1
        for number in range(self._last_number + 1, latest + 1):
            self._lines[number] = source
        recorded = latest > self._last_number
        self._last_number = max(self._last_number, latest)
        fact = Fact(backward=running is not None, recorded=recorded)
        return Origin(source, fact, mark_of_operation())

    def _check_tensors(self, func: Any, tensors: Sequence[Any], line: Source | None) -> None:
        """Raises: ValueError for a tensor that does not belong to the trace."""
        for x in _without_wrappers(tensors):
            if not isinstance(x, FakeTensor):
                if func not in _LITERALS:
                    raise errors.outside_tensor(x, line, self.step)
            elif x.fake_mode is not self.fakes:
                raise errors.reads_earlier_trace(x, line, self.step)

    def _check_higher_order(
        self, func: HigherOrderOperator, args: tuple, line: Source | None
    ) -> None:
        """Raises: ValueError for a call of a higher-order operator that a program cannot hold."""
        if func in _WHILE_LOOPS:
            raise errors.while_loop(line, self.step)
        if func is torch.ops.higher_order.flex_attention:
            mask_tensors = tensors_in(args[4])
            if any(getattr(x, "fake_mode", None) is not self.fakes for x in mask_tensors):
                raise errors.mask_from_before(line, self.step)

    def _check(
        self, func: Any, args: tuple, kwargs: dict, line: Source | None, backward: bool
    ) -> None:
        """Raises: ValueError for an operation that a program cannot hold."""
        if func in _READS:
            raise errors.reads_value(func, line, self.step)
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Generator):
                raise errors.own_generator(func, line, self.step)
        if backward and draws(func, args, kwargs):
            raise errors.draws_again(func, line, self.step)
        if _has_only_an_effect(func):
            errors.warn_of_trace(
                f"trace: {self.step} calls {func}, which returns nothing. A program leaves it out.\n  at {where(line)}",
                line,
            )

    @contextlib.contextmanager
    def _errors_of(self, op: Any, line: Source | None) -> Iterator[None]:
        """Turn the errors of an operation on fake tensors into errors with the user's line."""
        try:
            yield
        except c10d.NoForm as error:
            raise errors.unsupported_collective(op, str(error), line, self.step) from None
        except fake_tensor.DynamicOutputShapeException:
            raise errors.reads_value(op, line, self.step, needs_shape=True) from None
        except fake_tensor.DataDependentOutputException:
            raise errors.reads_value(op, line, self.step) from None
        except (NotImplementedError, fake_tensor.UnsupportedOperatorException) as error:
            raise errors.cannot_be_traced(op, error, line, self.step) from error


def _forget_value(literal: torch.Tensor) -> None:
    """Hide the value of a literal from make_fx, which would run operations of literals on their values.

    A collective among them would wait for ranks that may not trace now.
    """
    mode: Any = get_proxy_mode()
    get_proxy_slot(literal, mode.tracer).constant = None
    literal.constant = None  # type: ignore[attr-defined]


def _without_wrappers(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors; a wrapper, such as a DTensor, is replaced by the tensors that it holds."""
    for x in tensors:
        if is_traceable_wrapper_subclass(x):
            names, _ = x.__tensor_flatten__()
            inner = (getattr(x, name) for name in names)
            yield from _without_wrappers(y for y in inner if isinstance(y, torch.Tensor))
        else:
            yield x


@functools.cache
def _has_only_an_effect(op: Any) -> bool:
    """Whether an operation returns nothing and changes no argument, such as an assertion or a user's logging."""
    schema = op._schema
    is_pytorchs = op.namespace in ("c10d", "profiler")
    return not schema.returns and not is_pytorchs and not any(map(is_written, schema.arguments))
