"""The errors of leaves that can be neither inputs nor constants of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def bad_state_leaf(path: str, leaf: Any) -> TypeError:
    """A leaf of the state that cannot be updated."""
    text = repr(leaf) if type(leaf).__module__ in ("builtins", "torch") else _kind(leaf)
    return TypeError(
        f"trace: state leaf {path} is {text}, which is neither a tensor nor a number.\n"
        f"{_advice(leaf, 'Leave it out of the state, or make it a tensor.')}"
    )


def not_comparable(leaf: Any, is_state: bool) -> TypeError:
    """An argument that can be neither an input nor a constant of a program."""
    return TypeError(
        f"trace: {'the state' if is_state else 'an argument'} holds {_kind(leaf)}, which is neither a tensor, "
        f"a number, nor a constant to be compared.\n"
        f"{_advice(leaf, 'Make it a tensor: torch.as_tensor(...).')}"
    )


def not_strided(x: torch.Tensor, is_state: bool) -> TypeError:
    """A sparse or nested tensor, which is not stored as one block of elements."""
    kind = "nested" if x.is_nested else "sparse"
    return TypeError(
        f"trace: {'the state' if is_state else 'an argument'} holds a {kind} tensor ({x.dtype}, {x.layout}), and a "
        f"program takes dense ones.\n"
        f"Pass what it is made of as tensors, such as its indices and its values, and compute with these in the step: "
        f"index_add for the product of a sparse matrix, a mask for rows of different lengths."
    )


def _kind(leaf: Any) -> str:
    return f"a {type(leaf).__module__}.{type(leaf).__qualname__}"


def _advice(leaf: Any, otherwise: str) -> str:
    """The remedy for an object that PyTorch knows neither as a leaf nor as a container."""
    name = type(leaf).__name__
    if isinstance(leaf, Iterator):
        return "Call next(...) outside of the step, and pass the value in."
    if isinstance(leaf, nn.Module | torch.optim.Optimizer):
        return (
            "Lift the loop that uses it: step, state = zt.lift(loop_step, module, optimizer). Or pass the tensors of a "
            "module, dict(module.named_parameters()), and call it by torch.func.functional_call."
        )
    if dataclasses.is_dataclass(leaf):
        return f"Register its class, so that its tensors are found: torch.export.register_dataclass({name})."
    if hasattr(leaf, "__dict__"):
        return (
            f"Use a dict, a tuple or a registered dataclass for {name}, so that its tensors are found: "
            f"torch.export.register_dataclass(cls)."
        )
    return otherwise
