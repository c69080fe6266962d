"""The errors of tracing. Each names what the step does, the user's line, and what to do instead."""

from __future__ import annotations

from typing import Any

import torch

from ..ir.graph import is_random
from ..ir.source import Source, where


def refuse_closure(func: Any, arg: torch.Tensor, source: Source | None, step: str) -> None:
    """Raises: ValueError for a tensor that existed before the step and is not one of its arguments."""
    if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default):
        return  # torch.tensor(...) written inside the step: a literal
    raise ValueError(
        f"trace: {step} reads a tensor {list(arg.shape)} ({arg.dtype}) that is neither its state nor its batch.\n"
        f"  at {where(source)}\n"
        f"Pass it in: as state if it lives from step to step (parameters, buffers, masks), else with the batch.\n"
        f"In a loop that is lifted, take parameters from the module, inside the loop step: model.parameters()."
    )


def no_state(path: str, leaf: Any) -> TypeError:
    """A leaf of the state that cannot be updated."""
    return TypeError(
        f"trace: state leaf {path} is {leaf!r}, which is neither a tensor nor a number.\n"
        f"Keep it outside of the state, or make it a tensor."
    )


def no_argument(leaf: Any) -> TypeError:
    """An argument that can be neither an input nor a constant of a program."""
    return TypeError(
        f"trace: an argument holds a {type(leaf).__module__}.{type(leaf).__qualname__}, which is neither a tensor, "
        f"a number, nor a constant to be compared.\n"
        f"Make it a tensor: torch.as_tensor(...)."
    )


def reads_value(op: Any, shape: bool, source: Source | None, step: str) -> ValueError:
    """The step reads a value of a tensor, or uses a shape that depends on values."""
    read = "takes a shape from a tensor's values" if shape else "reads a tensor's value"
    return ValueError(
        f"trace: {step} {read} while it is traced ({op}).\n"
        f"  at {where(source)}\n"
        f"A traced step runs on tensors without values: replace .item(), bool() and `if` on tensors by "
        f"torch.where, and boolean indexing by masks."
    )


def seeds(used: str, source: Source | None, step: str) -> ValueError:
    """The step uses a random generator of its own, or seeds PyTorch's."""
    return ValueError(
        f"trace: {step} uses {used}, which is no input of the program and would be used once, while it is traced.\n"
        f"  at {where(source)}\n"
        f"Draw from the default generator and seed it outside of the step, with another seed on each rank."
    )


def no_collective(op: Any, why: str, source: Source | None, step: str) -> ValueError:
    """The step calls a function of torch.distributed that a program cannot hold."""
    return ValueError(
        f"trace: {step} calls torch.distributed's {op._schema.name.split('::')[1].strip('_')}, which a program, the "
        f"same on all ranks, cannot hold: {why}.\n"
        f"  at {where(source)}\n"
        f"Use all_reduce, all_gather, reduce_scatter, broadcast or all_to_all, or do it between steps."
    )


def cannot_be_traced(op: Any, error: Exception, source: Source | None, step: str) -> ValueError:
    """An operation that has no fake implementation."""
    return ValueError(
        f"trace: {step} uses {op}, which does not run on tensors without values: {str(error).splitlines()[0]}\n"
        f"  at {where(source)}\n"
        f"Do it outside of the step, or give the operation a fake implementation: torch.library.register_fake."
    )


def changes_python(name: str, source: Source | None, step: str) -> ValueError:
    """The step changes a Python value that it also reads, or a container that grows with every step."""
    return ValueError(
        f"trace: {step} changes {name} while it is traced, and its program will not do so again.\n"
        f"  at {where(source)}\n"
        f"Keep what lives from step to step in the state, as a tensor or a number; return what you want to see as "
        f"output; count and collect outside of the step."
    )


def leaks_tensor(holder: str, source: Source | None, step: str) -> str:
    """A warning: an object outside of the step holds a tensor of the trace, which has no values."""
    return (
        f"trace: {step} leaves a tensor in {holder} while it is traced. Its program does not do so: after a step, "
        f"{holder} is what it was before.\n"
        f"  at {where(source)}\n"
        f"Return it as output to read it after the step."
    )


def reads_earlier_trace(arg: torch.Tensor, source: Source | None, step: str) -> ValueError:
    """The step reads a tensor that an earlier trace left in an attribute or a cache."""
    return ValueError(
        f"trace: {step} reads a tensor {list(arg.shape)} that an earlier trace left, and that has no values.\n"
        f"  at {where(source)}\n"
        f"Compute it in every step, without a cache or an attribute that keeps it; or make it before the first step "
        f"and pass it in as state."
    )


def draws_in_python(source: Source | None, step: str) -> ValueError:
    """The step draws a number from Python's or NumPy's generators."""
    return ValueError(
        f"trace: {step} draws a random number of Python's or NumPy's, which would be drawn once, while it is traced.\n"
        f"  at {where(source)}\n"
        f"Draw with torch inside the step, torch.rand(()), or outside of it, and pass the number in."
    )


def draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operation draws random numbers. Attention without dropout does not, and no derivative does."""
    if not is_random(func) or func._schema.name.endswith("_backward"):
        return False
    given = {a.name: a.default_value for a in func._schema.arguments} | kwargs
    given.update(zip(given, args))
    return given.get("dropout_p", given.get("dropout")) != 0.0


def draws_again(func: Any, source: Source | None, step: str) -> ValueError:
    """Backward draws random numbers, as a checkpoint does that recomputes dropout."""
    return ValueError(
        f"trace: {step} draws random numbers in its backward pass ({func}).\n"
        f"  at {where(source)}\n"
        f"A checkpoint that is computed again would draw other numbers than the first time: leave dropout out of it."
    )
