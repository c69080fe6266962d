"""lift: an ordinary training loop's step, with its nn.Module and torch.optim, as a pure step and its state.

The loop body is not changed. While it is traced, the module's parameters and buffers and the
optimizer's state are swapped for the tensors of the state; what it did to them is the new state.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from .first_state import make

State = dict[str, Any]


def lift(loop_step: Callable, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> tuple[Callable, State]:
    """`loop_step(*batch)`, which does zero_grad, loss, backward and optimizer.step, as `(step, state)`.

    `step(state, *batch) -> (state, output)` is a pure train step for any transform; `state` holds
    today's parameters, buffers, optimizer state and learning rates by name. Learning rates are
    inputs (`state["lr"][group]`, the groups of all optimizers one after another); other hyperparameters,
    `train()` and `eval()`, and which parameters are trained, are constants of a program: a step that is simply
    called is traced anew when they have changed. Several modules are one `nn.ModuleDict`.

    Raises: TypeError for a model that is no module; ValueError for optimizers that need a closure, hold parameters
    that are not the module's or another's, or make state that `lift` does not know before its first step; and when
    it is traced, for a loop step that steps another optimizer, or not all of these.

    >>> model = nn.Linear(2, 1)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def loop_step(x):
    ...     sgd.zero_grad()
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     sgd.step()
    ...     return loss
    >>> step, state = lift(loop_step, model, sgd)
    >>> sorted(state), sorted(state["params"])
    (['buffers', 'lr', 'optimizer', 'params'], ['bias', 'weight'])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"lift: the model is a {type(model).__name__}; several modules are one, nn.ModuleList([...]).")
    optimizers = _several(optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    seen = set[int]()
    for p in (p for group in _groups(optimizers) for p in group["params"]):
        if id(p) not in names:
            raise ValueError(
                f"lift: the optimizer holds a parameter {list(p.shape)} that is not the model's.\n"
                f"Build the optimizer from model.parameters(), after moving or changing the model."
            )
        if id(p) in seen:
            raise ValueError(f"lift: {names[id(p)]} is held by two optimizers; every parameter may have one.")
        seen.add(id(p))
    if any(isinstance(o, torch.optim.LBFGS) for o in optimizers):
        raise ValueError(
            "lift: LBFGS runs the loss several times in a closure; use an optimizer whose step() takes none."
        )
    for o in optimizers:
        make(o, names)
    today = _state(model, optimizers, names)
    _check_apart(today)

    def step(state: State, *batch: Any) -> tuple[State, Any]:
        with _swapped(model, optimizers, names, state) as (params, buffers):
            versions = [getattr(lr, "_version", 0) for lr in state["lr"]]
            settings = _settings(optimizers)
            with _stepped(optimizers):
                output = loop_step(*batch)
            held = {p: s for o in optimizers for p, s in o.state.items()}
            kept = {name: held.get(p, {}) for name, p in params.items()}
            _check_rates(optimizers, state["lr"], versions)
            _check_settings(settings, _settings(optimizers))
            _check_kept(kept, state["optimizer"])
            new = {
                "params": {name: p.detach() for name, p in params.items()},
                "buffers": {name: b.detach() for name, b in buffers().items()},
                "optimizer": {
                    name: {k: v for k, v in kept[name].items() if k in known}
                    for name, known in state["optimizer"].items()
                },
                "lr": state["lr"],
            }
        detach = lambda x: x.detach() if isinstance(x, torch.Tensor) else x
        return new, torch.utils._pytree.tree_map(detach, output)

    def settings() -> tuple:
        """What a program is made for besides its arguments."""
        modes = tuple(m.training for m in model.modules()), tuple(p.requires_grad for p in model.parameters())
        return *modes, repr(_settings(optimizers))

    step.settings = settings  # type: ignore[attr-defined]
    step.__name__ = step.__qualname__ = getattr(loop_step, "__name__", "step")
    given = inspect.signature(loop_step).parameters.values()
    step.__signature__ = inspect.Signature([inspect.Parameter("state", inspect.Parameter.POSITIONAL_ONLY), *given])
    return step, today


def _check_apart(state: State) -> None:
    """Tensors that a step changes and that lie in one another's memory would part, and each go its own way."""
    trained = {**state["params"], **{f"{k} of {n}": v for n, s in state["optimizer"].items() for k, v in s.items()}}
    spans = []
    for name, x in {**state["buffers"], **trained}.items():
        if isinstance(x, torch.Tensor) and x.numel() and x.device.type != "meta" and x.layout is torch.strided:
            last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
            spans.append((str(x.device), x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size(), name))
    spans.sort()
    for (device, _, end, one), (where, start, _, other) in itertools.pairwise(spans):
        if device == where and start < end and (one in trained or other in trained):
            raise ValueError(
                f"lift: {one} and {other} lie in the same memory, and in a state each would have its own.\n"
                f"Tie parameters as one, first.weight = second.weight, or give one a copy: .clone()."
            )


def _several(optimizer: Optimizer | Sequence[Optimizer]) -> tuple[Optimizer, ...]:
    return (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)


def _groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    return [group for o in optimizers for group in o.param_groups]


@contextlib.contextmanager
def _stepped(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """See to it that the loop steps these optimizers, and no other: that would hold parameters without gradients."""
    seen = []

    def watch(stepped: Optimizer, *_: Any) -> None:
        if stepped not in optimizers:
            raise ValueError(
                f"lift: the loop step calls step() of another optimizer, {type(stepped).__name__}, which would train "
                f"nothing.\nGive lift all of them: lift(loop_step, model, [first, second])."
            )
        seen.append(stepped)

    handle = register_optimizer_step_pre_hook(watch)
    try:
        yield
    finally:
        handle.remove()
    for k, o in enumerate(optimizers):
        if o not in seen:
            which = "optimizer.step()" if len(optimizers) == 1 else f"step() of optimizer {k}, {type(o).__name__}"
            raise ValueError(
                f"lift: the loop step did not call {which}, and what it does while it is traced it does for ever."
                f"\nTo accumulate gradients, take all micro-batches in one call, and step after them."
            )


def _check_kept(kept: Mapping[str, dict], known: Mapping[str, dict]) -> None:
    """State that an optimizer made just now would be lost after the step, and made anew in the next."""
    for name, state in kept.items():
        made = [k for k, v in state.items() if isinstance(v, (torch.Tensor, int, float))]
        new = [k for k in made if k not in known.get(name, {})]
        if new:
            raise ValueError(
                f"lift: the optimizer made {', '.join(new)} for {name}, which the lifted state does not hold.\n"
                f"A parameter that is trained from now on, or another setting of the optimizer: call lift again."
            )


def _check_rates(optimizers: Sequence[Optimizer], rates: list, versions: list[int]) -> None:
    """What a scheduler does inside the loop's body would be done once, while it is traced."""
    for group, lr, version in zip(_groups(optimizers), rates, versions):
        if group["lr"] is not lr or getattr(lr, "_version", 0) != version:
            raise ValueError(
                "lift: the loop step changes a learning rate, which would happen once, while it is traced.\n"
                "Step the scheduler after the lifted step, and pass its rates on: "
                'state["lr"] = [group["lr"] for group in optimizer.param_groups].'
            )


def _settings(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """The hyperparameters of every group, but for the learning rate."""
    groups = ({k: v for k, v in group.items() if k not in ("params", "lr")} for group in _groups(optimizers))
    return [{k: id(v) if isinstance(v, torch.Tensor) else v for k, v in group.items()} for group in groups]


def _check_settings(before: list[dict], after: list[dict]) -> None:
    """Numbers that an optimizer counts in its groups, or that the loop changes there."""
    changed = [k for old, new in zip(before, after) for k in new if k not in old or repr(old[k]) != repr(new[k])]
    if changed:
        raise ValueError(
            f"lift: the loop step, or its optimizer, changes {changed[0]!r} of a parameter group, which would happen "
            f"once, while it is traced.\nChange it between steps, which are then traced anew; what is counted in every "
            f"step must be in the optimizer's state of a parameter."
        )


def restore(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], state: State) -> None:
    """Write a lifted state (full tensors) back into the module and the optimizer, or optimizers, it came from."""
    optimizers = _several(optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(state["params"][name])
        for o in optimizers:
            for p in (p for group in o.param_groups for p in group["params"]):
                for key, value in state["optimizer"].get(names[id(p)], {}).items():
                    held = o.state[p].get(key)
                    o.state[p][key] = held.copy_(value) if isinstance(held, torch.Tensor) else _like(held, value)
        for name, b in model.named_buffers():
            b.copy_(state["buffers"][name])
    for group, lr in zip(_groups(optimizers), state["lr"]):
        group["lr"] = lr if isinstance(group["lr"], torch.Tensor) else float(lr)


def _like(held: Any, value: torch.Tensor) -> Any:
    return value if held is None else type(held)(value.item())


def _state(model: nn.Module, optimizers: Sequence[Optimizer], names: dict[int, str]) -> State:
    by_name = {names[id(p)]: s for o in optimizers for p, s in o.state.items() if s}
    return {
        "params": {k: p.detach() for k, p in model.named_parameters()},
        "buffers": {k: b.detach() for k, b in model.named_buffers()},
        "optimizer": {
            k: {key: v for key, v in by_name[k].items() if isinstance(v, (torch.Tensor, int, float))}
            for k in names.values()
            if k in by_name
        },
        "lr": [group["lr"] for group in _groups(optimizers)],
    }


@contextlib.contextmanager
def _swapped(model: nn.Module, optimizers: Sequence[Optimizer], names: dict[int, str], state: State) -> Iterator[tuple]:
    """The module and the optimizers on the state's tensors."""
    grads = {name: p.requires_grad for name, p in model.named_parameters()}
    params = {name: p.detach().requires_grad_(grads[name]) for name, p in state["params"].items()}
    for name, p in model.named_parameters():
        for hook in (p._backward_hooks or {}).values():
            params[name].register_hook(hook)
        for hook in (p._post_accumulate_grad_hooks or {}).values():
            params[name].register_post_accumulate_grad_hook(hook)
    tensors = {**params, **state["buffers"]}
    with (
        _without_gradients(model),
        stateless._reparametrize_module(model, tensors, tie_weights=True),
        contextlib.ExitStack() as stack,
    ):
        rates = iter(state["lr"])
        for o in optimizers:
            stack.enter_context(_held(o, params, names, [next(rates) for _ in o.param_groups], state["optimizer"]))
        yield params, lambda: dict(model.named_buffers())


@contextlib.contextmanager
def _held(
    optimizer: Optimizer, params: Mapping[str, torch.Tensor], names: dict[int, str], rates: list, state: Mapping
) -> Iterator[None]:
    """The optimizer on these parameters and rates, and on the state of those of them that are its own."""
    old_groups, old_state = optimizer.param_groups, optimizer.state
    own = [[names[id(p)] for p in group["params"]] for group in old_groups]
    groups = [{**g, "params": [params[name] for name in mine], "lr": lr} for g, mine, lr in zip(old_groups, own, rates)]
    for group in groups:  # arithmetic on tensors, one parameter at a time, as the program will be in any case
        if not group.get("fused"):
            group.update({k: v for k, v in (("foreach", False), ("capturable", True)) if k in group})
    optimizer.param_groups = groups
    optimizer.state = defaultdict(dict, {params[k]: dict(state[k]) for mine in own for k in mine if k in state})
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = old_groups, old_state


@contextlib.contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Who asks the module's own parameters for gradients, as from a list that was made before, is told while the
    loop is traced: the gradients would be None, and `clip_grad_norm_` would clip nothing without a word."""
    held = [(p, p.grad) for p in model.parameters() if p.requires_grad]
    try:
        with _disable_current_modes():  # real tensors, which a traced step may not read
            for p, _ in held:
                p.grad = torch.full((), float("nan"), dtype=p.dtype, device=p.device).expand(p.shape)
        yield
    finally:
        for p, grad in held:
            p.grad = grad
