"""Calls: the arguments of a step in the order of its parameters, however the caller passed them."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..ir.micro_batches import check_rows, first_part
from .trees import leaf_names, none_as_empty, opened, parameters

_EXTRA = "param_groups"  # how programs and messages name the extra inputs


class ExtraInputs(abc.ABC):
    """A step function that adds an argument of its own to each call, such as the learning rates of its optimizers.

    That argument is the last one of a `BoundCall`, and comes first in `call_with`.
    """

    @abc.abstractmethod
    def extra_inputs(self) -> Any:
        """The argument for the next call: a tree of tensors and numbers that are the same on all ranks."""

    @abc.abstractmethod
    def constants(self) -> Hashable:
        """What a program of this function is specialised on, besides arguments and captured values."""

    @abc.abstractmethod
    def missing_state(self, state: Any) -> dict[str, Any]:
        """The leaves that a state lacks, such as those of parameters that were unfrozen, by entry of the state."""

    @abc.abstractmethod
    def call_with(self, extra: Any, state: Any, /, *batch: Any, **named: Any) -> tuple[Any, Any]:
        """Run the step with this extra argument."""


class BoundCall(NamedTuple):
    """One call of a step function: its arguments in the order of the parameters.

    The last `len(names)` values of `batch` are passed by name. They belong to keyword-only parameters, and to
    parameters after one that the caller left out. A parameter that the caller left out is not an argument: the step
    reads its default as it reads a global. `extra` has the extra argument of an `ExtraInputs`, and is empty for other
    functions.
    """

    state: Any
    batch: tuple
    names: tuple[str, ...] = ()
    extra: tuple = ()

    @staticmethod
    def of(fn: Callable, args: tuple, kwargs: Mapping[str, Any]) -> BoundCall:
        """The call `fn(*args, **kwargs)`. Calls that mean the same are equal.

        Raises: TypeError, as Python does, if `fn` does not take such arguments.

        >>> def step(state, x, scale=1.0): ...
        >>> BoundCall.of(step, ("s",), {"x": 2})
        BoundCall(state='s', batch=(2,), names=(), extra=())
        >>> BoundCall.of(step, ("s", 2), {"rate": 3})
        Traceback (most recent call last):
            ...
        TypeError: step() got an unexpected keyword argument 'rate'
        """
        if kwargs or not args:
            name = getattr(fn, "__name__", type(fn).__name__)
            try:
                bound = inspect.signature(fn).bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}() {error}") from None
            args, kwargs = bound.args, dict(sorted(bound.kwargs.items()))
            if not args:
                raise TypeError(f"{name}() takes a state as its first argument.")
        extra = (fn.extra_inputs(),) if isinstance(fn, ExtraInputs) else ()
        return BoundCall(args[0], tuple(map(opened, (*args[1:], *kwargs.values()))), tuple(kwargs), extra)

    def run(self, fn: Callable) -> Any:
        """Call `fn` with these arguments."""
        positional = len(self.batch) - len(self.names)
        named = dict(zip(self.names, self.batch[positional:]))
        if isinstance(fn, ExtraInputs):
            return fn.call_with(*self.extra, self.state, *self.batch[:positional], **named)
        return fn(self.state, *self.batch[:positional], **named)

    def tree(self) -> tuple:
        """All arguments as a tree, which `of_tree` reads. The state comes first, and the extra argument last."""
        return none_as_empty(self.state), *self.batch, *self.extra

    def of_tree(self, tree: tuple) -> BoundCall:
        """This call with the arguments of another tree of the same structure."""
        count = len(self.batch)
        return self._replace(state=tree[0], batch=tree[1 : 1 + count], extra=tree[1 + count :])

    def leaf_names(self, fn: Callable) -> tuple[list[str], list[str]]:
        """For each leaf a short name and its path in messages (see `trees.leaf_names`)."""
        positional = parameters(fn, 1 + len(self.batch) - len(self.names))
        names = [*positional, *self.names]
        extra = _EXTRA
        while extra in names:
            extra += "_"
        return leaf_names([*names, *[extra] * len(self.extra)], (self.state, *self.batch, *self.extra))

    def micro_batch(self, fn: Callable, micro: int) -> BoundCall:
        """The call with the first of `micro` equal parts of the batch. Numbers and scalars belong to every part.

        Raises: ValueError that names a leaf of the batch that cannot be cut.
        """
        leaves, tree = pytree.tree_flatten(self.batch)
        paths = self._replace(extra=()).leaf_names(fn)[1]
        of_batch = paths[len(paths) - len(leaves) :]
        cut = []
        tensors = []
        for path, x in zip(of_batch, leaves):
            if isinstance(x, torch.Tensor):
                tensors.append((path, x))
                x = first_part(x, micro, path)
            cut.append(x)
        check_rows(tensors)
        return self._replace(batch=tuple(map(opened, pytree.tree_unflatten(cut, tree))))
