"""Watch: a dispatch mode that records every operation of a step while it is traced.

The record of an operation has its arguments and results, its user line, whether autograd runs it, and whether autograd
records it. The line of a backward operation is that of the forward operation with the sequence number of the running
autograd node. An operation that a program cannot hold is an error here, with its line.

The mode takes the place of PyTorch's own (`make_fx`). That one also makes a proxy, a node of an FX graph and a copy of
its annotations for each operation, which takes longer than everything else in a trace.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch._decomp
from torch._ops import HigherOrderOperator
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    autograd_would_have_decomposed,
    is_traceable_wrapper_subclass_type,
)

from ..ir.operations import is_written
from ..ir.relations import tensors_in
from ..ir.source import Source, user_source, where
from . import errors
from .fakes.constants import READS, read_constant
from .fakes.mode import DEVICE, device_of
from .nested.checkpoints import mark_of_operation, take_policy
from .nested.errors import differentiates_loop, mask_from_before
from .nested.recorded_calls import record_call
from .operation import Operation, Origin, Seen
from .parallel import c10d
from .regions import Fact

aten = torch.ops.aten
_PLAIN = (FakeTensor, torch.Tensor, torch.nn.Parameter)


class Watch(TorchDispatchMode):
    """Record the operations of a step.

    `known` has all tensors of the trace by their ids, with the lines that created them.
    """

    supports_higher_order_operators = True

    def __init__(self, step: str, mode: FakeTensorMode) -> None:
        super().__init__()
        # PyTorch calls a mode with this key after all modes of the step, and before that of the fake tensors.
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.step, self.mode = step, mode
        self.operations: list[Operation] = []
        # A selective checkpoint looks here for the operations that it has run.
        self.tracer = SimpleNamespace(graph=SimpleNamespace(nodes=self.operations))
        self.known: dict[int, tuple[torch.Tensor, Source | None]] = {}
        self.lines: dict[int, Source | None] = {}
        self.last = torch.autograd._get_sequence_nr() - 1
        # The origin of the operation that is being expanded into others; None outside of such an operation.
        self.inside: Origin | None = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would guard every call against torch.compile, which takes longer than the call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is DEVICE:
            return device_of(*args)
        if any(map(_wraps_tensors, types)):
            return NotImplemented if self.inside else self._expanded(self._origin(), func, args, kwargs)
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        tensors = tensors_in((args, kwargs))
        origin = self.inside or self._origin()
        line = origin.source or user_source(2)
        self._check_tensors(func, tensors, line)
        self._check(func, args, kwargs, line, origin.fact.backward)
        if not all(type(x) in _PLAIN or id(x) in self.known for x in tensors):
            return NotImplemented  # lets a subclass of tensors run it
        expansion = _expansion(func, tensors)
        if func in READS and (constant := self._constant(func, args)) is not None:
            return constant
        with _errors_of(func, line, self.step):
            if expansion is not None:
                return self._expanded(origin, expansion, args, kwargs)
            result = func(*args, **kwargs)
        # A literal is fresh at each call of the step, which may change it in place.
        fresh = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        self.operations.append(Operation(fresh, args, kwargs, result, Seen.of(result), origin, {**origin.policy}))
        self.know(result, line)
        return result

    def _constant(self, func: Any, args: tuple) -> Any:
        """What an operation reads from tensors that depend on no argument of the step, or None."""
        with _disable_current_modes():
            return read_constant(func, args, self.operations)

    def _higher_order(self, func: HigherOrderOperator, args: tuple, kwargs: dict) -> Any:
        """Record the call of a higher-order operator, and its functions, as a graph."""
        origin = self.inside or self._origin()
        line = origin.source or user_source(3)
        mask = tensors_in(args[4]) if func is torch.ops.higher_order.flex_attention else []
        if any(getattr(x, "fake_mode", None) is not self.mode for x in mask):
            raise mask_from_before(line, self.step)
        self._check_tensors(func, tensors_in((args, kwargs)), line)
        if func is torch.ops.higher_order.while_loop_stack_output:
            raise differentiates_loop(line, self.step)
        with _errors_of(func, line, self.step):
            module, given, returned = record_call(func, args, kwargs, origin.source)
        results = pytree.tree_leaves(returned)
        self.operations.append(Operation(module, given, {}, results, None, origin, {}))
        self.know(results, line)
        return returned

    def _origin(self) -> Origin:
        """Where the operation comes from that is being called."""
        node = torch._C._current_autograd_node()
        source = user_source(3) if node is None else self.lines.get(node._sequence_nr())
        latest = torch.autograd._get_sequence_nr() - 1
        for number in range(self.last + 1, latest + 1):
            self.lines[number] = source
        recorded, self.last = latest > self.last, max(self.last, latest)
        return Origin(source, Fact(node is not None, recorded), mark_of_operation(), take_policy())

    def _expanded(self, origin: Origin, run: Callable, args: tuple, kwargs: dict) -> Any:
        """Run an operation by others, which are recorded in its place, with its origin."""
        outer, self.inside = self.inside, origin
        try:
            with self:
                return run(*args, **kwargs)
        finally:
            self.inside = outer

    def know(self, results: Any, line: Source | None = None) -> None:
        """Let the tensors of `results` be tensors of the trace."""
        for x in tensors_in(results):
            self.known.setdefault(id(x), (x, line))

    def rename(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """Record that `x` is `value` from here on."""
        origin = Origin(user_source(3), Fact())
        self.operations.append(Operation(aten.set_.source_Tensor, (x, value), {}, x, Seen.of(x), origin, {}))

    def set_arguments(self, name: str, arguments: dict[str, Any]) -> None:
        """Change the record of the last operation whose name contains `name`: it was called with these arguments."""
        k, last = next(
            (k, o) for k, o in reversed([*enumerate(self.operations)]) if name in str(getattr(o.op, "_schema", ""))
        )
        self.operations[k] = replace(last, kwargs={**last.kwargs, **arguments})

    def references(self) -> list[tuple[weakref.ref, Source | None]]:
        """Weak references to all tensors of the trace, with their lines, to recognise those that outlive it."""
        return [(weakref.ref(x), line) for x, line in self.known.values()]

    def _check_tensors(self, func: Any, tensors: Sequence[Any], line: Source | None) -> None:
        """Raises: ValueError for a tensor that is none of the trace."""
        for x in tensors:
            if not isinstance(x, FakeTensor):
                errors.refuse_closure(func, x, line, self.step)
            elif x.fake_mode is not self.mode:
                raise errors.reads_earlier_trace(x, line, self.step)

    def _check(self, func: Any, args: tuple, kwargs: dict, line: Source | None, backward: bool) -> None:
        """Raises: ValueError for an operation that a program cannot hold."""
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Generator):
                raise errors.seeds(f"a torch.Generator ({func})", line, self.step)
            if isinstance(x, torch.UntypedStorage):
                raise errors.cannot_be_traced(func, TypeError("an argument is a storage"), line, self.step)
        if backward and errors.draws(func, args, kwargs):
            raise errors.draws_again(func, line, self.step)
        if _has_only_an_effect(func):
            errors.warn_of_trace(
                f"trace: {self.step} calls {func}, which returns nothing. A program leaves it out.\n  at {where(line)}",
                line,
            )


@contextlib.contextmanager
def _errors_of(op: Any, line: Source | None, step: str) -> Iterator[None]:
    """Turn the errors of an operation on fake tensors into errors with the user's line."""
    try:
        yield
    except c10d.NoForm as error:
        raise errors.no_collective(op, str(error), line, step) from None
    except fake_tensor.DynamicOutputShapeException:
        raise errors.reads_value(op, True, line, step) from None
    except fake_tensor.DataDependentOutputException:
        raise errors.reads_value(op, False, line, step) from None
    except (NotImplementedError, fake_tensor.UnsupportedOperatorException) as error:
        raise errors.cannot_be_traced(op, error, line, step) from error


def _expansion(op: Any, tensors: Sequence[torch.Tensor]) -> Callable | None:
    """The function that runs an operation by others, or None if the operation itself belongs to a program."""
    if c10d.has_no_place(op):
        return functools.partial(c10d.functionalized, op)
    if op._schema.name.startswith("aten::_foreach_"):  # PyTorch defines it by an operation on each member of the lists
        return functools.partial(op._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)
    if op in _declared():
        return _declared()[op]
    return op.decompose if _is_composite(op) and autograd_would_have_decomposed(op, tensors) else None


@functools.cache
def _declared() -> dict:
    """Decompositions of cuDNN's batch norm.

    Its schema does not declare that it writes the running statistics. The operations that it decomposes into do.
    """
    return torch._decomp.get_decompositions([aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward])


# Whether a class of tensors computes an operation by others, of the tensors that it holds, as DTensor does.
_wraps_tensors = functools.cache(is_traceable_wrapper_subclass_type)


@functools.cache
def _is_composite(op: Any) -> bool:
    """Whether PyTorch defines an operation by others, which autograd then sees in its place."""
    return op not in (aten.size.default, aten.stride.default, aten.storage_offset.default) and op._can_decompose()


@functools.cache
def _has_only_an_effect(op: Any) -> bool:
    """Whether an operation returns nothing and changes no argument, as an assertion does, or a user's logging."""
    schema = op._schema
    known = op.namespace in ("c10d", "profiler")
    return not schema.returns and not known and not any(map(is_written, schema.arguments))
