"""The structure of an equation: what it computes, as a value that can be compared and hashed.

Two equations with equal structures that read equal values have equal results, bit for bit: `mul(x, 2)` and `mul(y, 2)`
are equal if `of_var` returns equal values for x and y. The names of results, the user's line and the region do not
count. Numbers are compared by type and by bits, because `1 == 1.0 == True` and `0.0 == -0.0` in Python, but not in a
tensor. Constant tensors are compared by all of their elements. Random draws of equal structure still differ.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .graph import Eqn, Var
from .higher_order import Function
from .triton_launch import Launch

OfVar = Callable[[Var], Hashable]  # the description of a variable that an equation reads


def structure(eqn: Eqn, of_var: OfVar) -> Hashable:
    """The structure of an equation whose arguments `of_var` describes.

    >>> x, y = (Var(name, torch.float32, (4,)) for name in "xy")
    >>> double, triple = (Eqn(torch.ops.aten.mul.Tensor, (v, n), (y,)) for v, n in ((x, 2), (y, 3)))
    >>> of_type = lambda v: v.type
    >>> structure(double, of_type) == structure(double.replace(args=(y, 2)), of_type)
    True
    >>> structure(double, of_type) == structure(triple, of_type)
    False
    """
    kwargs = tuple((name, argument(x, of_var)) for name, x in sorted(eqn.kwargs.items()))
    bound = tuple(out is not None for out in eqn.outs)
    return eqn.op, argument(eqn.args, of_var), kwargs, bound


def structures(
    eqns: Iterable[Eqn], inputs: Sequence[Var], outputs: Iterable[Any], of_input: OfVar
) -> Hashable:
    """The structure of several equations together, from `inputs` that `of_input` describes.

    Values are numbered in the order of their bindings and compared by these numbers, so names do not count.
    """
    number: dict[Var, int] = {}
    for v in inputs:
        number.setdefault(v, len(number))
    types = tuple(map(of_input, number))
    # An input that is passed twice has one number.
    input_numbers = tuple(number[v] for v in inputs)

    bodies = []
    for eqn in eqns:
        bodies.append(structure(eqn, number.__getitem__))
        for out in eqn.results:
            number[out] = len(number)
    return types, input_numbers, tuple(bodies), argument(tuple(outputs), number.__getitem__)


def argument(x: Any, of_var: OfVar) -> Hashable:
    """The structure of an argument, which is a variable, a literal, or a list or a dict of them."""
    if isinstance(x, Var):
        return Var, of_var(x)
    if isinstance(x, (list, tuple)):
        return tuple(argument(item, of_var) for item in x)
    if isinstance(x, Mapping):
        return dict, tuple((key, argument(item, of_var)) for key, item in x.items())
    if isinstance(x, (float, complex)):
        return type(x), struct.pack("dd", x.real, x.imag)
    if isinstance(x, torch.Tensor):
        return torch.Tensor, x.dtype, tuple(x.shape), x.stride(), str(x.device), elements(x)
    if isinstance(x, Function):
        graph = x.graph
        return x.returns, structures(graph.eqns, graph.inputs, graph.outputs, lambda v: v.type)
    if isinstance(x, Launch):
        return x.kernel, x.grid, x.tensors, x.changed, argument(x.numbers, of_var)
    # With its type, because 1 == 1.0 == True.
    return type(x), x


def elements(x: torch.Tensor) -> bytes:
    """The bytes of all elements of a tensor, in order."""
    flat = x.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()
