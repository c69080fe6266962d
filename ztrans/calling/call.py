"""A call of a step: its function, and its arguments in the order of the parameters.

A function may add an argument of its own to each call (see `ExtraInputs`).
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..ir.printer import counted
from .kept import WithKept
from .reads import Reads
from .trees import leaf_names, opened


class ExtraInputs(abc.ABC):
    """A step function that adds an argument of its own to each call, such as learning rates.

    Attributes:
        extra_name: the name of that argument in programs and messages.
    """

    extra_name: str

    @abc.abstractmethod
    def extra_inputs(self) -> Any:
        """The argument for the next call: tensors and numbers that are the same on all ranks."""

    @abc.abstractmethod
    def modules(self) -> Sequence[nn.Module]:
        """The modules whose attributes the step reads, even if its code does not reach them by name."""

    @abc.abstractmethod
    def before_run(self) -> None:
        """Called before each run of a program."""

    @abc.abstractmethod
    def after_shard(self) -> None:
        """Called after `Step.shard` has copied a state."""

    @abc.abstractmethod
    def constants(self) -> Mapping[str, Hashable]:
        """The values that a program of this function is specialised on, other than arguments and reads, by name."""

    @abc.abstractmethod
    def evaluation(self, fn: Callable) -> Callable:
        """A function of the batch as a step that returns the state unchanged."""

    @abc.abstractmethod
    def known_tensors(self, state: Any) -> Mapping[int, torch.Tensor]:
        """The values of leaves that a trace may read: by the `id` of a leaf of the state, a tensor with its value."""

    @abc.abstractmethod
    def check_changed(self, changed: Collection[str]) -> None:
        """Take note of the leaves of the state that a program of this function changes, and check that it may.

        Raises: ValueError if it may not change one of them.
        """

    @abc.abstractmethod
    def call_with(self, extra: Any, state: Any, /, *batch: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Run the step with this extra argument."""


class StepFunction:
    """A step function with its parameters, its reads, and its extra argument if it is an `ExtraInputs`."""

    def __init__(self, fn: Callable) -> None:
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.extra = fn if isinstance(fn, ExtraInputs) else None
        self.reads = Reads(fn, self.extra.modules() if self.extra is not None else ())
        self.signature = inspect.signature(fn)

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The arguments by the names of the parameters.

        Raises: TypeError, as Python does, if the function does not take such arguments.
        """
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}() {error}") from None

    def parameters(self, count: int) -> list[str]:
        """The names of the first `count` positional arguments, by the parameters."""
        names = []
        for p in self.signature.parameters.values():
            if p.kind not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
                names.append(p.name)
        # The arguments of `*args` have no names.
        names += [f"arg{i}" for i in range(len(names), count)]
        return names[:count]


class BoundCall(NamedTuple):
    """One call of a step function: its arguments in the order of the parameters.

    The last `len(keywords)` values of `batch` are passed by name: to keyword-only parameters, and to parameters
    after one that the caller left out. A parameter that the caller left out is not an argument: the step reads its
    default like a global. `extra` has the extra argument of an `ExtraInputs`, and is empty for other functions.
    """

    state: Any
    batch: tuple
    keywords: tuple[str, ...] = ()
    extra: tuple = ()

    @staticmethod
    def of(function: StepFunction, args: tuple, kwargs: Mapping[str, Any]) -> BoundCall:
        """The call `fn(*args, **kwargs)` of a step function. Arguments may be passed by position or by name.

        Raises: TypeError, as Python does, if the function does not take such arguments.

        >>> def step(state, x, scale=1.0): ...
        >>> function = StepFunction(step)
        >>> BoundCall.of(function, ("s",), {"x": 2})
        BoundCall(state='s', batch=(2,), keywords=(), extra=())
        >>> BoundCall.of(function, ("s", 2), {"rate": 3})
        Traceback (most recent call last):
            ...
        TypeError: step() got an unexpected keyword argument 'rate'
        """
        if kwargs or not args:
            bound = function.bind(args, kwargs)
            args = bound.args
            kwargs = dict(sorted(bound.kwargs.items()))
            if not args:
                raise TypeError(f"{function.name}() takes a state as its first argument.")
        extra = () if function.extra is None else (function.extra.extra_inputs(),)
        batch = tuple(map(opened, (*args[1:], *kwargs.values())))
        return BoundCall(args[0], batch, tuple(kwargs), extra)

    def run(self, fn: Callable) -> Any:
        """Call `fn` with these arguments. It does not see what transforms keep, which stays as it is."""
        if isinstance(self.state, WithKept):
            result = self._replace(state=self.state.state).run(fn)
            if isinstance(result, tuple) and len(result) == 2:
                return self.state._replace(state=result[0]), result[1]
            return result
        count = len(self.batch) - len(self.keywords)
        positional = self.batch[:count]
        kwargs = dict(zip(self.keywords, self.batch[count:]))
        if isinstance(fn, ExtraInputs):
            return fn.call_with(*self.extra, self.state, *positional, **kwargs)
        return fn(self.state, *positional, **kwargs)

    def tree(self) -> tuple:
        """All arguments as a tree: the state comes first, and the extra argument last."""
        return self.state, *self.batch, *self.extra

    def of_tree(self, tree: tuple) -> BoundCall:
        """This call with the arguments of another tree of the same structure."""
        count = len(self.batch)
        return self._replace(state=tree[0], batch=tree[1 : 1 + count], extra=tree[1 + count :])

    def parameters(self, function: StepFunction) -> list[str]:
        """The names of all arguments."""
        names = [*function.parameters(1 + len(self.batch) - len(self.keywords)), *self.keywords]
        if function.extra is not None:
            extra_name = function.extra.extra_name
            while extra_name in names:
                extra_name += "_"
            names.append(extra_name)
        return names

    def micro_batch(self, function: StepFunction, micro: int) -> BoundCall:
        """The call with the first of `micro` equal parts of the batch. Scalars belong to every part.

        Raises: ValueError that names a leaf of the batch that cannot be cut.
        """
        leaves, tree = pytree.tree_flatten(self.batch)
        names = self.parameters(function)[1 : 1 + len(self.batch)]
        paths = leaf_names(["", *names], ((), *self.batch))[1]
        parts = []
        tensors = []
        for path, x in zip(paths, leaves):
            if isinstance(x, torch.Tensor):
                tensors.append((path, x))
                x = _first_part(x, micro, path)
            parts.append(x)
        _check_rows(tensors)
        return self._replace(batch=tuple(map(opened, pytree.tree_unflatten(parts, tree))))


def _first_part(x: torch.Tensor, micro: int, path: str) -> torch.Tensor:
    """The first of `micro` equal parts of a leaf of the batch. A scalar is not cut.

    Raises: ValueError that names the leaf if it cannot be cut.
    """
    if not x.ndim:
        return x
    problem = ""
    if isinstance(x, DTensor):
        problem = "is a DTensor"
    elif x.shape[0] % micro:
        problem = f"has {counted(x.shape[0], 'row')}"
    if problem:
        raise ValueError(
            f"accumulate: {path} {problem}, which cannot be cut into {micro} equal parts.\n"
            f"Pad the batch or drop its last rows, or take a number of micro-batches that divides it."
        )
    return x[: x.shape[0] // micro]


def _check_rows(leaves: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Check that all leaves of a batch, with their paths, can have rows of the same samples.

    Raises: ValueError that names a leaf, such as a table, if its number of rows is not a multiple of the smallest one.
    """
    rows = {path: x.shape[0] for path, x in leaves if x.ndim and x.shape[0]}
    smallest = min(rows, key=lambda path: rows[path], default="")
    for path, count in rows.items():
        if count % rows[smallest]:
            raise ValueError(
                f"accumulate: {path} has {counted(count, 'row')} and {smallest} has {rows[smallest]}, and every leaf "
                f"of the batch is cut along dim 0.\n"
                f"If one of them belongs to all samples, as a table does, make it a leaf of the state. In a lifted "
                f"loop that is a buffer of the module: model.register_buffer(name, tensor)."
            )
