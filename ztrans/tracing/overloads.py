"""Find the functional form of an in-place operation.

Overloads are matched by the names and types of their arguments, because their own names follow no rule: the functional
form of `pow_.Scalar` is `pow.Tensor_Scalar`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from ..ir.op_facts import is_written, overloads


def outs(op: Any) -> list[str]:
    """The names of the `out=` arguments of an operation."""
    return [a.name for a in op._schema.arguments if a.kwarg_only and is_written(a)]


@functools.cache
def functional(op: Any) -> Any:
    """The functional form of an operation: `add_.Tensor` and `add.out` -> `add.Tensor`; None if there is none."""
    namespace, name = op._schema.name.split("::")
    short = name.removesuffix("_")
    library = getattr(torch.ops, namespace)
    parameters = _names_and_types(a for a in op._schema.arguments if a.name not in outs(op))
    for packet_name in (short, f"{short}_functional"):
        for form in overloads(getattr(library, packet_name, None)):
            form_parameters = form._schema.arguments
            has_effect = any(map(is_written, form_parameters))
            if not has_effect and _names_and_types(form_parameters) == parameters:
                return form
    return None


def _names_and_types(parameters: Iterable[Any]) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in parameters]


def with_defaults(op: Any, form: Any, values: list, kwargs: dict) -> list:
    """`values`, and the defaults of `op` that its functional form lacks, such as p of `bernoulli_`."""
    count = len(values)
    all_values = list(values)
    for a, form_parameter in zip(op._schema.arguments[count:], form._schema.arguments[count:]):
        is_left_out = not a.kwarg_only and a.name not in kwargs
        if is_left_out and not form_parameter.has_default_value():
            all_values.append(a.default_value)
    return all_values
