"""lift: turn the body of an ordinary training loop, with its nn.Module and torch.optim, into a pure step and its state.

The loop body is not changed. While it is traced, tensors of the state replace the module's parameters and buffers and
the optimizer's state. Their values after the loop body are the new state.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ...calling.call import ExtraInputs
from ...ir.ambient import having
from ..errors import TraceError
from ..parallel.dtensors import refuse_wrappers
from ..python_values.own import is_own
from ..trace import is_number
from .averaged_models import averaging
from .grad_scaler import constants_of, scale_of, scaling
from .hyperparameters import Group, Hyperparameters, groups_of, unchanged
from .kept_gradients import KeptGradients, with_gradients
from .lifted_state import State, check_apart, check_known, check_lifted, several, state_of
from .repeated_updates import RepeatedUpdates
from .scalars import Numbers
from .schedulers import Schedulers
from .stand_ins import StandIns
from .swapped import swapped, widened

P = ParamSpec("P")
T = TypeVar("T")


def lift(
    loop_step: Callable[P, T],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    carry_grads: bool = False,
    scaler: GradScaler | None = None,
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
            has changed, the next call of a `Step` is traced anew. A loop that evaluates needs none; its step takes the
            state of the step that trains the module, and returns it with its parameters unchanged.
        carry_grads: whether the gradients of earlier calls are part of the state, for a loop step that adds to them.
            It may step the optimizer in some calls only, as a bool says that it is given.
        scaler: the GradScaler of the loop, for training in fp16.

    Returns: the step, and the present state: `params`, `buffers` and `optimizer` by name, `grads` by name with
    `carry_grads`, and the scale of `scaler`.

    Raises: TypeError for a model that is no module. ValueError for an optimizer that needs a closure, that has a
    parameter which the module does not have or which another optimizer has too, or whose state before its first step
    is unknown. When the step is traced, ValueError for a loop step that steps another optimizer, or not all of these;
    that uses gradients of an earlier call which are not carried; that uses parameters which were taken from the module
    before; or that uses another GradScaler.

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
    own = dict(model.named_parameters())
    refuse_wrappers(own.items(), "lift")
    today = state_of(model, optimizers, names, carry_grads)
    if scaler is not None:
        today["scaler"] = scale_of(scaler, next(iter(own.values())).device)
    check_apart(today)
    counted = pytree.tree_map(is_number, today["optimizer"])  # whether each leaf is a number, such as a count of steps
    hyperparameters, schedulers, updates = Hyperparameters(optimizers), Schedulers(), RepeatedUpdates()
    had = {name for name, p in own.items() if p.grad is not None}
    loops = with_gradients(model) if carry_grads else []  # another loop may have made a gradient that this one carries
    loops.append(had)
    of_others = lambda: set[str]().union(*(names for names in loops if names is not had))

    def run(groups: list[Group], state: State, /, *batch: P.args, **named: P.kwargs) -> tuple[State, T]:
        numbers = [*((x, None) for x in _counts(state["optimizer"], counted)), *hyperparameters.numbers(groups)]
        begin = functools.partial(updates.begin, itertools.count(), hyperparameters.constants())
        with swapped(model, optimizers, names, state, groups) as params, unchanged(optimizers, groups):
            known = had | of_others()
            gradients = KeptGradients(params, state.get("grads"), known)
            stand_ins, arithmetic = StandIns(params, names), Numbers(numbers, widened(optimizers))
            stepped = _stepped(optimizers, gradients, arithmetic, begin)
            scaled = {k: x.clone() for k, x in state["scaler"].items()} if "scaler" in state else None
            reading = schedulers.reading(groups[len(groups_of(optimizers)) :])
            with gradients, stand_ins, stepped, scaling(scaler, scaled), averaging(model), reading:
                output = loop_step(*batch, **named)
            stand_ins.check()
            carried = gradients.end()
            had.update(known - of_others())
            new = _new_state(model, params, optimizers, state)
        new |= ({"grads": carried} if carried is not None else {}) | ({"scaler": scaled} if scaled else {})
        return new, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    def extra() -> list[Group]:
        """The inputs of a program that the optimizers and the schedulers hold."""
        return hyperparameters.inputs() + schedulers.inputs()

    def settings() -> tuple:
        """The constants of a program that the parameters and the optimizers hold."""
        return _trained(model), hyperparameters.constants(), len(of_others()), constants_of(scaler)

    def missing(state: State) -> State:
        """What a state lacks for the parameters that have been unfrozen, or given to an optimizer, since `lift`."""
        check_lifted(state, getattr(loop_step, "__name__", "step"))
        _check_held(model, optimizers)
        present = state_of(model, optimizers, names, carry_grads)
        counted.update(pytree.tree_map(is_number, present["optimizer"]))
        return _lacking(state, present)

    arguments = inspect.signature(loop_step).parameters
    name = "state" if "state" not in arguments else "lifted_state"
    own_state = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.Signature([own_state, *arguments.values()])
    step = LiftedStep(run, extra, settings, missing)
    name = getattr(loop_step, "__name__", "step")
    vars(step).update(__signature__=signature, __name__=name, __qualname__=name, __doc__=loop_step.__doc__)
    return step, today


class LiftedStep(ExtraInputs):
    """The step of a lifted loop."""

    def __init__(self, run: Callable, extra: Callable, settings: Callable, missing: Callable) -> None:
        self._run, self._extra, self._settings, self._missing = run, extra, settings, missing
        self.__wrapped__ = run

    def __call__(self, state: State, /, *batch: Any, **named: Any) -> tuple[State, Any]:
        return self._run(self._extra(), state, *batch, **named)

    def call_with(self, extra: Any, state: Any, /, *batch: Any, **named: Any) -> tuple[Any, Any]:
        return self._run(extra, state, *batch, **named)

    def extra_inputs(self) -> list[Group]:
        return self._extra()

    def constants(self) -> tuple:
        return self._settings()

    def missing_state(self, state: Any) -> State:
        return self._missing(state)


def _counts(optimized: Mapping[str, Any], counted: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The counts in the state of optimizers; `counted` says by parameter which leaves are counts."""
    for name, leaves in optimized.items():
        is_count = pytree.tree_leaves(counted.get(name, ()))
        yield from (x for x, counts in zip(pytree.tree_leaves(leaves), is_count) if counts)


def _new_state(
    model: nn.Module, params: Mapping[str, torch.Tensor], optimizers: Sequence[Optimizer], state: State
) -> State:
    """The state after a loop step, from the tensors that the module and the optimizers have now."""
    held = {p: s for o in optimizers for p, s in o.state.items()}
    # The state of a parameter that no optimizer has any more stays as it is.
    after = {name: held.get(p, state["optimizer"].get(name, {})) for name, p in params.items()}
    check_known(after, state["optimizer"])
    own = {name: p.detach() for name, p in params.items()}
    buffers = {name: b.detach() for name, b in model.named_buffers()}
    optimized = {name: _as_before(after[name], x) for name, x in state["optimizer"].items()} if optimizers else {}
    return {**state, "params": own, "buffers": buffers, **({"optimizer": optimized} if optimizers else {})}


def _lacking(state: State, present: State) -> State:
    """The leaves of optimizers and gradients that a loop has at present, and `state` has not."""
    entries = [entry for entry in ("optimizer", "grads") if entry in state and entry in present]
    lacking = {entry: {k: v for k, v in present[entry].items() if k not in state[entry]} for entry in entries}
    return {entry: leaves for entry, leaves in lacking.items() if leaves}


def _trained(model: nn.Module) -> tuple[bool, ...]:
    """Whether each parameter is trained. Every call asks this, so it takes less time than `model.parameters()` does."""
    modules, parameters = [model], list[Any]()
    for module in modules:  # which grows meanwhile
        if module is not None:
            own = vars(module)
            modules += own["_modules"].values()
            parameters += own["_parameters"].values()
    return tuple([p.requires_grad for p in parameters if p is not None])


def _check_held(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """The names of the module's parameters by their ids.

    Raises: TypeError for a model that is no module; ValueError for optimizers that `lift` cannot work with.
    """
    if not isinstance(model, nn.Module):
        of_optimizer, of_others = "Pass the module first", "Combine several modules in one, nn.ModuleList([...])"
        raise TypeError(
            f"lift: the model is a {type(model).__name__}, and no nn.Module.\n"
            f"{of_optimizer if isinstance(model, Optimizer) else of_others}: lift(loop_step, model, optimizer)."
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


def _as_before(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The new state of a parameter in the precision of the old one."""

    def narrowed(new: Any, old: Any) -> Any:
        floats = all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in (new, old))
        return new.to(old.dtype) if floats else new

    return {k: pytree.tree_map(narrowed, after[k], v) for k, v in before.items() if k in after}


def _evaluated(optimizer: Optimizer, closure: Callable | None = None, **_: Any) -> tuple[tuple, dict] | None:
    """Run the closure of a step, and return the arguments of the step with the loss in its place.

    PyTorch's optimizers run it first. The user's may run it later, as one that looks for sharpness does.
    """
    if closure is None or is_own(type(optimizer)):
        return None
    with torch.enable_grad():
        loss = closure()
    return (optimizer, lambda: loss), {}


@contextlib.contextmanager
def _stepped(
    optimizers: Sequence[Optimizer], gradients: KeptGradients, numbers: Numbers, begin_update: Callable
) -> Iterator[None]:
    """Raise an error if the loop steps another optimizer, or does not step all of these.

    While one of them steps, also in a hook of backward, the mode `numbers` is active. Unless the optimizer is
    capturable, it reads numbers as it does outside of a trace.
    """
    stepped: list[Optimizer] = []
    present: list[Optimizer] = []  # the one that steps, while it does so
    inside = contextlib.ExitStack()

    def begin(o: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if o not in optimizers:
            raise TraceError(
                f"lift: the loop step calls step() of another optimizer, {type(o).__name__}, which would train "
                f"nothing.\nGive lift all of them: lift(loop_step, model, [first, second])."
            )
        stepped.append(o)
        given = _evaluated(o, *args[1:], **kwargs)
        present.append(o)
        inside.callback(present.clear)
        gradients.before_step(p for group in o.param_groups for p in group["params"])
        inside.callback(begin_update(o, has_closure=len(args) + len(kwargs) > 1))
        inside.enter_context(numbers)
        numbers.begin_step(reading=not any(group.get("capturable") for group in o.param_groups))
        compiling = torch.compiler._is_compiling_flag and not numbers.reading
        inside.enter_context(having(torch.compiler, _is_compiling_flag=compiling))
        return given

    end = register_optimizer_step_post_hook(lambda *_: inside.close())
    with register_optimizer_step_pre_hook(begin), end, inside:
        try:
            yield
        except ValueError as error:
            if not present or "reads a tensor's value" not in str(error):
                raise
            raise _chooses(present[0], error) from error
    for k, o in enumerate(optimizers):
        if o not in stepped and gradients.carried is None:
            which = "optimizer.step()" if len(optimizers) == 1 else f"step() of optimizer {k}, {type(o).__name__}"
            raise TraceError(
                f"lift: the loop step did not call {which} while it was traced, so its program would never do so.\n"
                f"To accumulate gradients, step after each batch and apply zt.accumulate(n) to the lifted step, or "
                f"take all micro-batches in one call, and step after them. To step in some calls only, as a bool says "
                f"that you pass, carry the gradients: lift(loop_step, model, optimizer, carry_grads=True)."
            )


def _chooses(optimizer: Optimizer, error: ValueError) -> ValueError:
    """An optimizer whose step reads values, as those do that compare norms by `if`, `max` or `min`."""
    where_it_reads = "\n".join(str(error).splitlines()[:2])
    return ValueError(
        f"{where_it_reads}\n"
        f"{type(optimizer).__name__}.step() reads it and chooses its update by it. Use an optimizer that does not, "
        f"such as AdamW; or write the update in the loop step, with torch.where, torch.maximum and torch.minimum."
    )
