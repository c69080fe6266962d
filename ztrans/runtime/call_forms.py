"""Call forms: the function through which Python calls an operation of PyTorch in the least time.

`torch.ops.aten.mm.default(a, b)` passes its arguments through a stack that can hold any type. `torch.mm(a, b)` reads
them directly, and takes about a microsecond less. Many operations have no such function, and a function may choose
another overload for the same arguments: `torch.add(x, 1)` calls `add.Tensor`, not `add.Scalar`. So a function is used
only where it calls the same operation with the same arguments. This is tried once for each kind of arguments, and
stops before anything is computed.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.graph import Var
from ..ir.operations import called

_HOMES = (torch, functional, torch.Tensor)  # where PyTorch keeps functions that are written in C++
_KINDS = (types.BuiltinFunctionType, types.MethodDescriptorType)

Call = tuple[
    Any, Sequence[Any], Mapping[str, Any]
]  # an operation, its arguments and its keyword arguments


def call_form(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable:
    """The function that calls `op` in the least time, for arguments like these; `Var`s stand for tensors.

    An operation that a program calls in another way, since its arguments may have any strides, keeps that way.

    >>> x = Var("x", torch.float32, (2, 2))
    >>> call_form(torch.ops.aten.mm.default, (x, x), {}) is torch.mm
    True
    >>> call_form(torch.ops.aten.add.Scalar, (x, 1), {})
    <OpOverload(op='aten.add', overload='Scalar')>
    """
    function = called(op)
    if not isinstance(function, torch._ops.OpOverload):
        return function
    return _form(function, _kind(args), tuple((k, _kind(v)) for k, v in sorted(kwargs.items())))


@functools.cache
def _form(op: Any, args: Any, kwargs: tuple[tuple[str, Any], ...]) -> Callable:
    """As `call_form`, for kinds of arguments."""
    given, named = _stand_in(args), {k: _stand_in(v) for k, v in kwargs}
    wanted = _dispatched(op, given, named)
    functions = _functions(op._schema.name.removeprefix("aten::")) if wanted is not None else ()
    return next((f for f in functions if _same(wanted, _dispatched(f, given, named))), op)


def _functions(name: str) -> Iterator[Callable]:
    """The functions of an operation's name that are written in C++."""
    for home in _HOMES:
        function = getattr(home, name, None)
        if isinstance(function, _KINDS):
            yield function


def _kind(x: Any) -> Any:
    """What the choice of an overload depends on: a hashable description of an argument."""
    if isinstance(x, Var):
        return torch.Tensor, len(x.shape)
    if isinstance(x, torch.Tensor):
        return torch.Tensor, x.ndim
    if isinstance(x, (list, tuple)):
        return list, tuple(map(_kind, x))
    return type(x) if isinstance(x, bool | int | float | complex) else x


def _stand_in(kind: Any) -> Any:
    """An argument of a kind, without the elements of a tensor."""
    if isinstance(kind, type):
        return kind(1)
    if not isinstance(kind, tuple):
        return kind
    container, rest = kind
    if container is list:
        return [_stand_in(x) for x in rest]
    # PyTorch reads a scalar where an operation takes a number by value.
    return torch.empty((1,) * rest, device="meta") if rest else torch.zeros(())


class _Stop(Exception):
    """Raised where an operation is dispatched, before it computes."""


class _First(TorchDispatchMode):
    """Record the first operation that is dispatched, and stop there."""

    call: Call | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            func is torch.ops.aten._local_scalar_dense.default
        ):  # of an argument that the operation takes by value
            return func(*args)
        self.call = func, args, kwargs or {}
        raise _Stop


def _dispatched(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """The first operation that a function dispatches; None if it refuses the arguments, or dispatches none."""
    with torch.no_grad(), _First() as first, contextlib.suppress(_Stop, TypeError, RuntimeError):
        function(*args, **kwargs)
    return first.call


def _same(a: Call | None, b: Call | None) -> bool:
    """Whether two calls are equal: they have the same tensors, and equal values of one type."""
    (leaves, tree), (others, other_tree) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    equal = lambda x, y: (
        x is y or (type(x) is type(y) and not isinstance(x, torch.Tensor) and x == y)
    )
    return tree == other_tree and all(map(equal, leaves, others))
