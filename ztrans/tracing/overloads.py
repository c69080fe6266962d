"""Overloads: the functional form of an in-place operation.

Overloads are matched by the names and types of their arguments, because the names of overloads follow no rule: the
functional form of `pow_.Scalar` is `pow.Tensor_Scalar`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..ir.op_facts import is_written, overloads


def named(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the schema."""
    return {a.name: x for a, x in zip(op._schema.arguments, args)} | kwargs


def outs(op: Any) -> list[str]:
    """The names of the arguments `out=` of an operation."""
    return [a.name for a in op._schema.arguments if a.kwarg_only and is_written(a)]


@functools.cache
def functional(op: Any) -> Any:
    """The functional form: `add_.Tensor` and `add.out` -> `add.Tensor`; None if there is none."""
    namespace, name = op._schema.name.split("::")
    short, library = name.removesuffix("_"), getattr(torch.ops, namespace)
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in outs(op)]
    for packet in (getattr(library, short, None), getattr(library, f"{short}_functional", None)):
        for form in overloads(packet):
            given = form._schema.arguments
            if [(a.name, str(a.type)) for a in given] == wanted and not any(map(is_written, given)):
                return form
    return None


def with_defaults(op: Any, form: Any, values: list, kwargs: dict) -> list:
    """`values`, and the defaults that `op` has and its functional form has not, such as p of `bernoulli_`."""
    rest = list(zip(op._schema.arguments, form._schema.arguments))[len(values) :]
    left_out = (
        a
        for a, t in rest
        if not a.kwarg_only and a.name not in kwargs and not t.has_default_value()
    )
    return [*values, *(a.default_value for a in left_out)]
