"""lift: turn the body of an ordinary training loop, with its nn.Module and torch.optim, into a pure step and its state.

The loop body is not changed. While it is traced, tensors of the state replace the module's parameters and buffers and
the optimizer's state. Their values after the loop body are the new state.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.amp import grad_scaler
from torch.nn.utils import stateless
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...ir.ambient import having
from ...ir.source import user_source, where
from ..trace import EXTRA, is_number
from .hyperparameters import Group, Hyperparameters, check_inputs, check_unchanged, constants_in, groups_of, versions
from .kept_gradients import KeptGradients, kept
from .lifted_state import State, check_apart, check_known, constants, several, state_of
from .optimizer_state import make
from .scalars import Numbers
from .stand_ins import StandIns

P = ParamSpec("P")
T = TypeVar("T")

# Optimizers that choose an update by a value that they read, unless they are capturable.
_CHOOSING = (torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop)
_COUNTS = ("step", "eta", "mu")  # in their state


def lift(
    loop_step: Callable[P, T],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    carry_grads: bool = False,
) -> tuple[Callable[Concatenate[State, P], tuple[State, T]], State]:
    """Turn `loop_step(*batch)`, which does zero_grad, loss, backward and optimizer.step, into `(step, state)`.

    `step(state, *batch) -> (state, output)` is a pure train step for any transform. It takes the batch arguments of
    `loop_step`, by position or by name.

    Args:
        loop_step: the body of the loop. It returns the output.
        model: the module that the loop trains. Combine several modules in one `nn.ModuleDict`.
        optimizer: the optimizer that the loop steps, or a sequence of all of them. Every call reads its parameter
            groups, so a scheduler may step after the lifted step. Learning rates, and numbers that change, are inputs
            of the program. Other hyperparameters, `train()` and `eval()`, and `requires_grad` are constants: if one
            has changed, the next call of a `Step` is traced anew.
        carry_grads: whether the gradients of earlier calls are part of the state, for a loop step that adds to them
            without a zero_grad.

    Returns: the step, and the present state: `params`, `buffers` and `optimizer` by name, and `grads` by name with
    `carry_grads`.

    Raises: TypeError for a model that is no module. ValueError for an optimizer that needs a closure, that has a
    parameter which the module does not have or which another optimizer has too, or whose state before its first step
    is unknown. When the step is traced, ValueError for a loop step that steps another optimizer, or not all of these;
    that uses gradients of an earlier call which are not carried; that uses parameters which were taken from the module
    before; or that uses a GradScaler.

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
    (['buffers', 'optimizer', 'params'], ['bias', 'weight'])
    """
    optimizers = several(optimizer)
    names = _check_held(model, optimizers)
    for o in optimizers:
        make(o, names)
    own = dict(model.named_parameters())
    today = state_of(model, optimizers, names)
    if carry_grads:
        today["grads"] = kept(own)
    check_apart(today)
    counted = [is_number(x) for x in pytree.tree_leaves(today["optimizer"])]
    hyperparameters = Hyperparameters(optimizers)
    had = {name for name, p in own.items() if p.grad is not None}

    def step(state: State, /, *batch: P.args, **named: P.kwargs) -> tuple[State, T]:
        groups = cast("list[Group]", named.pop(EXTRA, hyperparameters.inputs()))
        written, leaves = versions(groups), pytree.tree_leaves(state["optimizer"])
        numbers = [(x, None) for x, is_counted in zip(leaves, counted) if is_counted] + hyperparameters.numbers(groups)
        with _swapped(model, optimizers, names, state, groups) as (params, buffers):
            before = constants_in(optimizers, groups)
            gradients = KeptGradients(params, state.get("grads"), had)
            stand_ins, arithmetic = StandIns(params, names), Numbers(numbers, _widened(optimizers))
            stepped = _stepped(optimizers, {id(p): name for name, p in params.items()}, gradients, arithmetic)
            with gradients, stand_ins, stepped, _NoScaler():
                output = loop_step(*batch, **named)
            stand_ins.check()
            carried = gradients.end()
            held = {p: s for o in optimizers for p, s in o.state.items()}
            after = {name: held.get(p, {}) for name, p in params.items()}
            check_inputs(groups_of(optimizers), groups, written)
            check_unchanged(before, constants_in(optimizers, groups))
            check_known(after, state["optimizer"])
            new = {
                "params": {name: p.detach() for name, p in params.items()},
                "buffers": {name: b.detach() for name, b in buffers().items()},
                "optimizer": {name: _as_before(after[name], known) for name, known in state["optimizer"].items()},
            }
        if carried is not None:
            new["grads"] = carried
        return new, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    def settings() -> tuple:
        """The constants of a program that the parameters and the optimizers hold."""
        return _trained(model), hyperparameters.constants()

    own_state = inspect.Parameter("state", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.Signature([own_state, *inspect.signature(loop_step).parameters.values()])
    vars(step).update(settings=settings, extra=hyperparameters.inputs, __signature__=signature)
    step.__name__ = step.__qualname__ = getattr(loop_step, "__name__", "step")
    step.__doc__ = loop_step.__doc__
    return step, today


def _trained(model: nn.Module) -> tuple[bool, ...]:
    """Whether each parameter is trained. Every call asks this, so it takes less time than `model.parameters()` does."""
    modules = [model]
    for module in modules:  # which grows meanwhile
        modules += filter(None, module._modules.values())
    return tuple([p.requires_grad for module in modules for p in module._parameters.values() if p is not None])


def _check_held(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """The names of the module's parameters by their ids.

    Raises: TypeError for a model that is no module; ValueError for optimizers that `lift` cannot work with.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"lift: the model is a {type(model).__name__}, and no nn.Module.\n"
            f"Combine several modules in one: nn.ModuleList([...])."
        )
    names = {id(p): name for name, p in model.named_parameters()}
    seen = set[int]()
    for p in (p for group in groups_of(optimizers) for p in group["params"]):
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
    return names


@contextlib.contextmanager
def _swapped(
    model: nn.Module, optimizers: Sequence[Optimizer], names: dict[int, str], state: State, inputs: Sequence[Group]
) -> Iterator[tuple]:
    """While this is active, the module and the optimizers use the tensors of the state and these inputs of groups."""
    grads = {name: p.requires_grad for name, p in model.named_parameters()}
    params = {name: p.detach().requires_grad_(grads[name]) for name, p in state["params"].items()}
    for name, p in model.named_parameters():
        for hook in (p._backward_hooks or {}).values():
            params[name].register_hook(hook)
        for hook in (p._post_accumulate_grad_hooks or {}).values():
            params[name].register_post_accumulate_grad_hook(hook)
    tensors = {**params, **state["buffers"]}
    with (
        stateless._reparametrize_module(model, tensors, tie_weights=True),
        contextlib.ExitStack() as stack,
    ):
        rest = iter(inputs)
        for o in optimizers:
            stack.enter_context(_held(o, params, names, [next(rest) for _ in o.param_groups], state["optimizer"]))
        yield params, lambda: dict(model.named_buffers())


@contextlib.contextmanager
def _held(
    optimizer: Optimizer, params: Mapping[str, torch.Tensor], names: dict[int, str], inputs: list[Group], state: Mapping
) -> Iterator[None]:
    """While this is active, the optimizer uses these parameters, these inputs and its part of `state`."""
    old_groups, old_state = optimizer.param_groups, optimizer.state
    own = [[names[id(p)] for p in group["params"]] for group in old_groups]
    groups = [{**g, "params": [params[name] for name in mine], **new} for g, mine, new in zip(old_groups, own, inputs)]
    changes = {"foreach": False} | ({"capturable": True} if isinstance(optimizer, _CHOOSING) else {})
    for group in groups:  # one parameter at a time, as a program has one equation for each parameter in any case
        if not group.get("fused"):
            group.update({k: v for k, v in changes.items() if k in group})
    held = {names[id(p)]: constants(s) for p, s in old_state.items() if id(p) in names}
    new_state = {params[k]: {**held.get(k, {}), **state[k]} for mine in own for k in mine if k in state}
    with having(optimizer, param_groups=groups, state=defaultdict(dict, new_state)):
        yield


def _widened(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """The counts of optimizers in `_CHOOSING`, widened to fp64, as outside of a trace they are Python numbers."""
    counts: list[torch.Tensor] = []
    for state in (s for o in optimizers if isinstance(o, _CHOOSING) for s in o.state.values()):
        wide = {k: state[k].to(torch.float64, copy=True) for k in _COUNTS if k in state}
        state.update(wide)
        counts += wide.values()
    return counts


def _as_before(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The new state of a parameter in the precision of the old one."""

    def narrowed(new: Any, old: Any) -> Any:
        floats = all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in (new, old))
        return new.to(old.dtype) if floats else new

    return {k: pytree.tree_map(narrowed, after[k], v) for k, v in before.items() if k in after}


@contextlib.contextmanager
def _stepped(
    optimizers: Sequence[Optimizer], stand_ins: Mapping[int, str], gradients: KeptGradients, numbers: Numbers
) -> Iterator[None]:
    """Raise an error if the loop steps another optimizer, or does not step all of these.

    While one of them steps, also in a hook of backward, the mode `numbers` is active. Unless the optimizer is
    capturable, it reads numbers as it does outside of a trace.
    """
    stepped: list[Optimizer] = []
    flag, inside = torch.compiler._is_compiling_flag, contextlib.ExitStack()

    def begin(o: Optimizer, *_: Any) -> None:
        if o not in optimizers:
            raise ValueError(
                f"lift: the loop step calls step() of another optimizer, {type(o).__name__}, which would train "
                f"nothing.\nGive lift all of them: lift(loop_step, model, [first, second])."
            )
        stepped.append(o)
        gradients.before_step([stand_ins[id(p)] for group in o.param_groups for p in group["params"]])
        inside.enter_context(numbers)
        numbers.reading = not any(group.get("capturable") for group in o.param_groups)
        torch.compiler._is_compiling_flag = flag and not numbers.reading

    def end(*_: Any) -> None:
        inside.close()
        torch.compiler._is_compiling_flag = flag

    handles = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    try:
        yield
    finally:
        end()
        for handle in handles:
            handle.remove()
    for k, o in enumerate(optimizers):
        if o not in stepped:
            which = "optimizer.step()" if len(optimizers) == 1 else f"step() of optimizer {k}, {type(o).__name__}"
            raise ValueError(
                f"lift: the loop step did not call {which} while it was traced, so its program would never do so.\n"
                f"To accumulate gradients, step after each batch and apply zt.accumulate(n) to the lifted step, or "
                f"take all micro-batches in one call, and step after them."
            )


class _NoScaler(TorchFunctionMode):
    """Refuse a GradScaler at its first operation, before it has changed itself."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if sys._getframe(1).f_code.co_filename != grad_scaler.__file__:
            return func(*args, **(kwargs or {}))
        raise ValueError(
            f"lift: the loop step uses a GradScaler. Its scale is not part of the state, and it skips steps by a value "
            f"that it reads.\n"
            f"  at {where(user_source(2))}\n"
            f"Train in bfloat16, which needs no scaler; or write a pure step that keeps the scale in its state, and "
            f"skips by torch.where(finite, new, old)."
        )
