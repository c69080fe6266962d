"""The train step of a random program: how often it takes gradients, and what it does with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .gradients import gradient
from .programs import Program, Tensors

# (program, trained, fixed, x, ids) -> gradients and the loss
Gradient = Callable[..., tuple[Tensors, torch.Tensor]]


def step_of(program: Program, gradient: Gradient = gradient) -> Callable:
    """The program's train step, `step(state, x, ids) -> (state, output)`."""

    def step(
        state: dict[str, Any], x: torch.Tensor, ids: torch.Tensor
    ) -> tuple[dict[str, Any], Tensors]:
        params, kept, output = state["params"], state["kept"], {}
        count = state["step"] + 1
        at = torch.as_tensor(count, dtype=torch.float64)
        if program.pattern == "ahead":
            first, _ = _summed(program, gradient, params, state["fixed"], x, ids)
            ahead = {k: p + 0.05 * first[k] / (1 + _norm(first)) for k, p in params.items()}
            grads, output["loss"] = _summed(program, gradient, ahead, state["fixed"], x, ids)
            new, kept = _updated(program, params, grads, kept, at)
        elif program.pattern == "alternating":
            names = sorted(params)
            new = params
            for half in (names[::2], names[1::2]):
                others = {k: p for k, p in new.items() if k not in half}
                mine = {k: new[k] for k in half}
                if not mine:
                    continue
                grads, output["loss"] = _summed(
                    program, gradient, mine, {**others, **state["fixed"]}, x, ids
                )
                changed, rest = _updated(program, mine, grads, kept, at)
                new, kept = {**new, **changed}, {**kept, **rest}
        else:
            grads, output["loss"] = _summed(program, gradient, params, state["fixed"], x, ids)
            if program.clipped:
                output["norm"] = _norm(grads)
                grads = {
                    k: g * torch.clamp(0.5 / (output["norm"] + 1e-6), max=1.0)
                    for k, g in grads.items()
                }
            new, kept = _updated(program, params, grads, kept, at)
        if program.in_place:
            new = {k: params[k].copy_(p) for k, p in new.items()}
        after = {**state, "params": new, "kept": kept, "step": count}
        if program.averaged:
            after["average"] = {k: torch.lerp(a, new[k], 0.1) for k, a in state["average"].items()}
        return after, output

    step.__name__ = step.__qualname__ = "step"
    return step


def _summed(
    program: Program, gradient: Gradient, trained: Tensors, fixed: Tensors, x, ids
) -> tuple[Tensors, Any]:
    """The gradients and the loss, averaged over the micro-batches."""
    grads, total = None, 0.0
    for part, numbers in zip(x.chunk(program.micro), ids.chunk(program.micro)):
        more, value = gradient(program, trained, fixed, part, numbers)
        grads = more if grads is None else {k: grads[k] + g for k, g in more.items()}
        total = total + value
    return {k: g / program.micro for k, g in grads.items()}, total / program.micro


def _norm(grads: Tensors) -> torch.Tensor:
    return torch.stack([torch.linalg.vector_norm(g) for g in grads.values()]).norm()


def _updated(
    program: Program, params: Tensors, grads: Tensors, kept: dict, at: torch.Tensor
) -> tuple[Tensors, dict]:
    new = {k: program.optimizer.apply(p, grads[k], kept[k], at) for k, p in params.items()}
    return {k: p for k, (p, _) in new.items()}, {k: rest for k, (_, rest) in new.items()}
