"""Watch: a dispatch mode that annotates every operation of a step while it is traced.

The annotation of an operation says its user line, whether autograd runs it, and whether autograd records it. The line
of a backward operation is that of the forward operation with the sequence number of the running autograd node. An
operation that a program cannot hold is an error here, with its line.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.source import Source, user_source, where
from . import errors
from .nested.checkpoints import forget_policy, mark_of_operation
from .overloads import is_written
from .parallel import c10d


class Watch(TorchDispatchMode):
    """Annotate every operation with its user line, whether autograd runs it, and whether autograd records it.

    `tensors` are weak references to the results of all operations, with their lines.
    """

    supports_higher_order_operators = True

    def __init__(self, step: str, mode: FakeTensorMode) -> None:
        super().__init__()
        self.step, self.mode = step, mode
        self.tensors: list[tuple[weakref.ref, Source | None]] = []
        self.lines: dict[int, Source | None] = {}
        self.last = torch.autograd._get_sequence_nr() - 1
        # Whether autograd records the operation on DTensors that is being expanded; None outside of such an operation.
        self.inside: bool | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # fake tensors ask it of each other
            return func(*args, **kwargs)
        if get_proxy_mode() is None:  # DTensor runs an operation on whole fake tensors to find the shape of its result
            return func(*args, **kwargs)
        if any(issubclass(t, DTensor) for t in types):
            return self._expanded(func, args, kwargs)
        node, source, recorded = self._origin()
        line = source or user_source(2)
        self._check(func, args, kwargs, line, node is not None)
        old = fx_traceback.current_meta.get("custom")
        fx_traceback.current_meta["custom"] = {
            "source": source,
            "backward": node is not None,
            "recorded": recorded or self.inside is True,
            "checkpoint": mark_of_operation(),
        }
        try:
            out = self._run(func, args, kwargs, line)
            self.remember(out, line)
            return out
        finally:
            forget_policy()
            if old is None:
                fx_traceback.current_meta.pop("custom", None)
            else:
                fx_traceback.current_meta["custom"] = old

    def _origin(self) -> tuple[Any, Source | None, bool]:
        """The autograd node that runs the operation, the user's line, and whether autograd records the operation."""
        node = torch._C._current_autograd_node()
        source = user_source(3) if node is None else self.lines.get(node._sequence_nr())
        latest = torch.autograd._get_sequence_nr() - 1
        for number in range(self.last + 1, latest + 1):
            self.lines[number] = source
        recorded, self.last = latest > self.last, max(self.last, latest)
        return node, source, recorded

    def _expanded(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation on DTensors, which DTensor expands into operations on local tensors and collectives."""
        if self.inside is not None:
            return NotImplemented  # lets DTensor run it
        _, _, self.inside = self._origin()
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            self.inside = None

    def remember(self, results: Any, line: Source | None) -> None:
        """Keep weak references to tensors of the trace, to recognise those that outlive it."""
        self.tensors += [(weakref.ref(x), line) for x in pytree.tree_leaves(results) if isinstance(x, FakeTensor)]

    def _check(self, func: Any, args: tuple, kwargs: dict, line: Source | None, backward: bool) -> None:
        """Raises: ValueError for an operation that a program cannot hold."""
        for arg in pytree.tree_leaves((args, kwargs)):
            if isinstance(arg, torch.Tensor) and not isinstance(arg, FakeTensor):
                errors.refuse_closure(func, arg, line, self.step)
            if isinstance(arg, FakeTensor) and arg.fake_mode is not self.mode:
                raise errors.reads_earlier_trace(arg, line, self.step)
            if isinstance(arg, torch.Generator):
                raise errors.seeds(f"a torch.Generator ({func})", line, self.step)
        if backward and isinstance(func, OpOverload) and errors.draws(func, args, kwargs):
            raise errors.draws_again(func, line, self.step)
        if isinstance(func, HigherOrderOperator):
            if func is torch.ops.higher_order.while_loop_stack_output:
                raise errors.differentiates_loop(line, self.step)
            return
        if c10d.is_point_to_point(func):
            raise errors.no_collective(func, "one rank sends and another receives", line, self.step)
        if _has_only_an_effect(func):
            errors.warn_of_trace(
                f"trace: {self.step} calls {func}, which returns nothing. A program leaves it out.\n  at {where(line)}",
                line,
            )

    def _run(self, func: Any, args: tuple, kwargs: dict, line: Source | None) -> Any:
        """Run an operation on fake tensors. An in-place collective runs as a functional one."""
        try:
            in_place = not isinstance(func, HigherOrderOperator) and c10d.is_in_place(func)
            return c10d.functionalized(func, args, kwargs) if in_place else func(*args, **kwargs)
        except c10d.NoForm as error:
            raise errors.no_collective(func, str(error), line, self.step) from None
        except fake_tensor.DynamicOutputShapeException:
            raise errors.reads_value(func, True, line, self.step) from None
        except fake_tensor.DataDependentOutputException:
            raise errors.reads_value(func, False, line, self.step) from None
        except (NotImplementedError, fake_tensor.UnsupportedOperatorException) as error:
            raise errors.cannot_be_traced(func, error, line, self.step) from error


@functools.cache
def _has_only_an_effect(op: Any) -> bool:
    """Whether an operation returns nothing and changes no argument, as an assertion does, or a user's logging."""
    schema = op._schema
    known = op.namespace in ("c10d", "profiler")
    return not schema.returns and not known and not any(map(is_written, schema.arguments))
