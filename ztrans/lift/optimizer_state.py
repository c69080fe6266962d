"""The state of an optimizer before its first step.

Most optimizers create their state in their first step, but a lifted step needs it before. So the optimizer takes a
first step on copies. For the classes of torch.optim the state before that step follows from the names of the entries.
For any other optimizer, the value that it stores first under each key is taken as the state before that step. This is
verified: a step from that state must do what the first step does.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

# Entries that classes of torch.optim create in their first step, with their values before that step.
_ZEROS = (
    *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
    *("square_avg", "grad_avg", "acc_delta"),
)
_FRESH = {**dict.fromkeys(_ZEROS, 0.0), "mu_product": 1.0}

State = dict[str, Any]


def make(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Give the optimizer the state that it has before its first step. Its parameters are not changed.

    `names` has the names of the parameters by their ids, for messages.

    Raises: ValueError if the state before the first step cannot be determined.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "lift: SparseAdam takes sparse gradients, and all gradients of a program are dense.\n"
            "Use torch.optim.Adam. The lookups may keep sparse=True; it has no effect in a program."
        )
    params = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    if not all(map(optimizer.state.get, params)):
        fresh = _by_name(optimizer, params) if _has_known_names(optimizer) else None
        states = _tried(optimizer, params, names) if fresh is None else fresh
        optimizer.state.update(
            {p: state for p, state in zip(params, states) if not optimizer.state.get(p)}
        )


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of torch.optim."""
    return type(optimizer) is getattr(torch.optim, type(optimizer).__name__, None)


def _has_known_names(optimizer: Optimizer) -> bool:
    """Whether the first values follow from the names in the optimizer's state. Dampened momentum is an exception."""
    dampened = any(
        group.get("momentum") and group.get("dampening") for group in optimizer.param_groups
    )
    return is_torchs(optimizer) and not dampened


def _by_name(optimizer: Optimizer, params: list[torch.Tensor]) -> Iterator[State] | None:
    """The states before the first step, or None if not all names of their entries are known.

    The names need no values. So a step with gradients of zeros is tried on the meta device first, where it takes no
    memory.
    """
    trial: list[tuple[torch.Tensor, State]] = []
    if not optimizer.state and not any(isinstance(p, DTensor) for p in params):
        with contextlib.suppress(Exception):  # an optimizer that reads values, or a fused one
            trial = _trial(optimizer, params, device="meta")
    with contextlib.suppress(Exception):  # `_tried` says why
        trial = trial or _trial(optimizer, params)
    created = [{k: v for k, v in state.items() if v is not None} for _, state in trial]
    if not trial or any(key not in _FRESH for state in created for key in state):
        return None
    filled = lambda p, state: {key: _filled(value, _FRESH[key], p) for key, value in state.items()}
    return map(filled, params, created)


def _filled(value: torch.Tensor, number: float, p: torch.Tensor) -> torch.Tensor:
    return torch.full_like(value, number, device=p.device if value.is_meta else value.device)


def copied(value: Any) -> Any:
    """A tree with copies of its tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), value)


class _First(UserDict):
    """The state of one parameter, which remembers the value that was stored first under each key."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.first: State = {}
        super().__init__(state)

    def __setitem__(self, key: str, value: Any) -> None:
        if value is not None:
            self.first.setdefault(key, copied(value))
        super().__setitem__(key, value)


class _FirstOfAll(defaultdict):
    """The state of an optimizer: a `_First` for each parameter."""

    def __setitem__(self, p: torch.Tensor, state: Mapping[str, Any]) -> None:
        super().__setitem__(p, state if isinstance(state, _First) else _First(state))


def _trial(
    optimizer: Optimizer,
    params: list[torch.Tensor],
    seed: int | None = None,
    begin: list[State] | None = None,
    device: str | None = None,
) -> list[tuple[torch.Tensor, Any]]:
    """Each parameter and its state after a step on copies, with gradients drawn from `seed`, or else of zeros.

    The copies are on `device`, by default where the parameters are. Parameters without a state start with that of
    `begin`, or without one if `begin` is None. Where gradients are drawn, each state is a `_First`.
    """
    copies = [p.detach().to(device or p.device, copy=True).requires_grad_() for p in params]
    trial = _copy_of(optimizer, {id(p): c for p, c in zip(params, copies)})
    held = trial.state
    trial.state = defaultdict(dict) if seed is None else _FirstOfAll(_First)
    for k, c in enumerate(copies):
        if held.get(c):
            trial.state[c] = held[c]
        elif begin is not None:
            trial.state[c] = {key: copied(value) for key, value in begin[k].items()}
    with torch.random.fork_rng({p.device.index for p in params if p.is_cuda}):
        torch.manual_seed(seed or 0)
        for c in copies:
            c.grad = _drawn(c, seed)
        step: Any = type(trial).step
        (step.__wrapped__ if hasattr(step, "hooked") else step)(
            trial
        )  # without the hooks of all optimizers
    return [(c.detach(), trial.state[c]) for c in copies]


def _copy_of(optimizer: Optimizer, copies: Mapping[int, torch.Tensor]) -> Optimizer:
    """A copy of an optimizer for the copies of its parameters, by the ids of these."""
    hooks = (
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
    )  # which may change what the loop trains
    own = {key: value for key, value in vars(optimizer).items() if key not in hooks}
    attributes = copy.deepcopy(own, dict(copies)) | {key: OrderedDict() for key in hooks}
    attributes.pop("step", None)  # with a scheduler, a wrapper that steps the optimizer itself
    trial = object.__new__(type(optimizer))
    vars(trial).update(attributes)
    return trial


def _drawn(like: torch.Tensor, seed: int | None) -> torch.Tensor:
    """Random numbers, the same on every device; zeros without a seed."""
    if seed is None:
        return torch.zeros_like(like)
    drawn = torch.randn(like.shape, dtype=like.dtype if like.is_complex() else torch.float32)
    return drawn.to(like.device, like.dtype)


def _tried(
    optimizer: Optimizer, params: list[torch.Tensor], names: Mapping[int, str]
) -> list[State]:
    """The states before the first step, determined and verified by steps on copies."""
    if any(p.is_meta for p in params):
        raise _unknown(
            optimizer, "its parameters are on the meta device, where no step can be tried"
        )
    try:
        first_step, second_draw = (_trial(optimizer, params, seed) for seed in (0, 1))
        begin = [_before(a.first, b.first) for (_, a), (_, b) in zip(first_step, second_draw)]
        from_begin = _trial(optimizer, params, 0, begin)
    except Exception as error:
        raise _unknown(optimizer, f"a step on copies of its parameters failed: {error}") from error
    for p, tried, first, second in zip(params, begin, first_step, from_begin):
        if not _same(first, second):
            keys = ", ".join(map(repr, tried)) or "nothing"
            raise _unknown(
                optimizer,
                f"it keeps {keys} for {names[id(p)]}, and a step from the values tried is not its first step",
            )
    return begin


def _before(stored: State, stored_for_other_gradients: State) -> State:
    """The state before the first step, from the values that two trials with different gradients stored first.

    A value that differs between the two depends on the gradient, so it was already updated, from zeros.
    """
    zeros = lambda value: pytree.tree_map_only(torch.Tensor, torch.zeros_like, value)
    return {
        k: v if _same(v, stored_for_other_gradients.get(k)) else zeros(v) for k, v in stored.items()
    }


def _same(a: Any, b: Any) -> bool:
    """Whether two states or values are equal up to rounding."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and _close(a, b)
    return type(a) is type(b) and repr(a) == repr(b)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    tolerance = 8 * torch.finfo(a.dtype).eps
    wide = torch.complex128 if a.is_complex() else torch.float64
    return torch.allclose(a.to(wide), b.to(wide), rtol=tolerance, atol=tolerance, equal_nan=True)


def _unknown(optimizer: Optimizer, why: str) -> ValueError:
    return ValueError(
        f"lift: {type(optimizer).__name__} makes its state in its first step, and lift does not know what it is "
        f"before that: {why}.\n"
        f"Take the first step before lift, on every rank, and start all ranks from rank 0's state: "
        f"step.shard(state, source=0)."
    )
