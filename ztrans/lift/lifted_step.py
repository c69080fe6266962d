"""The lifted step: an ordinary training loop as a pure step of its state.

While the loop step is traced, tensors of the state replace the module's parameters and buffers and the optimizer's
state. Their values after the loop step are the new state.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree

from ..calling.call import ExtraInputs
from ..calling.signature import is_number
from ..ir.ambient import having
from ..ir.source import is_user_code
from ..tracing.errors import ReadsValueError, TraceError
from .gradients import KeptGradients, with_gradients
from .hyperparameters import Group, Hyperparameters, groups_of, unchanged
from .lifted_state import State, check_known, check_lifted, check_optimizers, state_of
from .scalars import Numbers
from .scaler import constants_of, scaling
from .schedulers import Schedulers
from .stand_ins import StandIns
from .swapped import swapped, widened

P = ParamSpec("P")
T = TypeVar("T")


class LiftedStep(ExtraInputs, Generic[P, T]):
    """A loop step as a pure step: `step(state, *batch) -> (state, output)`."""

    def __init__(
        self,
        loop_step: Callable[P, T],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        carry_grads: bool,
        scaler: GradScaler | None,
        names: dict[int, str],
        state: State,
    ) -> None:
        self._loop_step = loop_step
        self._model = model
        self._optimizers = optimizers
        self._carry_grads = carry_grads
        self._scaler = scaler
        self._names = names
        # Whether each leaf is a number, such as a count of steps.
        self._is_count = pytree.tree_map(is_number, state["optimizer"])
        self._hyperparameters = Hyperparameters(optimizers)
        self._schedulers = Schedulers()
        self._had = {name for name, p in model.named_parameters() if p.grad is not None}
        # Another loop may have made a gradient that this one carries.
        self._loops = with_gradients(model) if carry_grads else []
        self._loops.append(self._had)
        self.__name__ = self.__qualname__ = getattr(loop_step, "__name__", "step")
        self.__module__ = getattr(loop_step, "__module__", __name__)
        self.__doc__ = loop_step.__doc__
        self.__wrapped__ = loop_step
        self.__signature__ = _signature_of(loop_step)

    def __call__(self, state: State, /, *batch: P.args, **named: P.kwargs) -> tuple[State, T]:
        return self.call_with(self.extra_inputs(), state, *batch, **named)

    def call_with(
        self, extra: list[Group], state: State, /, *batch: P.args, **named: P.kwargs
    ) -> tuple[State, T]:
        """Run the loop step from `state`, with these inputs of the parameter groups."""
        groups = extra
        optimizers = self._optimizers
        counts = [(x, None) for x in _counts(state["optimizer"], self._is_count)]
        numbers = [*counts, *self._hyperparameters.numbers(groups)]
        with (
            swapped(self._model, optimizers, self._names, state, groups) as params,
            unchanged(optimizers, groups),
        ):
            known = self._had | self._had_by_others()
            gradients = KeptGradients(params, state.get("grads"), known)
            stand_ins, arithmetic = (
                StandIns(params, self._names),
                Numbers(numbers, widened(optimizers)),
            )
            stepped = _stepped(optimizers, gradients, arithmetic)
            scaled = (
                {k: x.clone() for k, x in state["scaler"].items()} if "scaler" in state else None
            )
            reading = self._schedulers.reading(groups[len(groups_of(optimizers)) :])
            with gradients, stand_ins, stepped, scaling(self._scaler, scaled), reading:
                output = self._loop_step(*batch, **named)
            stand_ins.check()
            carried = gradients.end()
            self._had.update(known - self._had_by_others())
            new = _new_state(self._model, params, optimizers, state)
        new |= ({"grads": carried} if carried is not None else {}) | (
            {"scaler": scaled} if scaled else {}
        )
        return new, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    def extra_inputs(self) -> list[Group]:
        """The inputs of a program that the optimizers and the schedulers hold."""
        return self._hyperparameters.inputs() + self._schedulers.inputs()

    def constants(self) -> Hashable:
        """The constants of a program that the parameters and the optimizers hold."""
        hyperparameters = self._hyperparameters.constants()
        return (
            _modes(self._model),
            hyperparameters,
            len(self._had_by_others()),
            constants_of(self._scaler),
        )

    def missing_state(self, state: Any) -> State:
        """What a state lacks for the parameters that have been unfrozen, or given to an optimizer, since `lift`."""
        check_lifted(state, self.__name__)
        check_optimizers(self._model, self._optimizers)
        present = state_of(self._model, self._optimizers, self._names, self._carry_grads)
        self._is_count.update(pytree.tree_map(is_number, present["optimizer"]))
        return _lacking(state, present)

    def _had_by_others(self) -> set[str]:
        return set[str]().union(*(names for names in self._loops if names is not self._had))


def _signature_of(loop_step: Callable) -> inspect.Signature:
    """The signature of a lifted step: the state, and the arguments of the loop step."""
    arguments = inspect.signature(loop_step).parameters
    name = "state" if "state" not in arguments else "lifted_state"
    state = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    return inspect.Signature([state, *arguments.values()])


def _counts(optimized: Mapping[str, Any], counted: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The counts in the state of optimizers; `counted` says by parameter which leaves are counts."""
    for name, leaves in optimized.items():
        is_count = pytree.tree_leaves(counted.get(name, ()))
        yield from (x for x, counts in zip(pytree.tree_leaves(leaves), is_count) if counts)


def _new_state(
    model: nn.Module,
    params: Mapping[str, torch.Tensor],
    optimizers: Sequence[Optimizer],
    state: State,
) -> State:
    """The state after a loop step, from the tensors that the module and the optimizers have now."""
    held = {p: s for o in optimizers for p, s in o.state.items()}
    # The state of a parameter that no optimizer has any more stays as it is.
    after = {name: held.get(p, state["optimizer"].get(name, {})) for name, p in params.items()}
    check_known(after, state["optimizer"])
    own = {name: p.detach() for name, p in params.items()}
    buffers = {name: b.detach() for name, b in model.named_buffers()}
    optimized = (
        {name: _as_before(after[name], x) for name, x in state["optimizer"].items()}
        if optimizers
        else {}
    )
    return {
        **state,
        "params": own,
        "buffers": buffers,
        **({"optimizer": optimized} if optimizers else {}),
    }


def _lacking(state: State, present: State) -> State:
    """The leaves of optimizers and gradients that a loop has at present, and `state` has not."""
    entries = [entry for entry in ("optimizer", "grads") if entry in state and entry in present]
    lacking = {
        entry: {k: v for k, v in present[entry].items() if k not in state[entry]}
        for entry in entries
    }
    return {entry: leaves for entry, leaves in lacking.items() if leaves}


def _modes(model: nn.Module) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Whether each module is in training mode, and each parameter is trained.

    Every call asks this, so it takes less time than `model.parameters()` does.
    """
    modules: list[nn.Module] = [model]
    parameters: list[Any] = []
    for module in modules:  # which grows meanwhile
        if module is not None:
            attributes = vars(module)
            modules += attributes["_modules"].values()
            parameters += attributes["_parameters"].values()
    training = tuple([module.training for module in modules if module is not None])
    return training, tuple([p.requires_grad for p in parameters if p is not None])


def _as_before(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The new state of a parameter in the precision of the old one."""

    def narrowed(new: Any, old: Any) -> Any:
        floats = all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in (new, old))
        return new.to(old.dtype) if floats else new

    return {k: pytree.tree_map(narrowed, after[k], v) for k, v in before.items() if k in after}


def _evaluated(
    optimizer: Optimizer, closure: Callable | None = None, **_: Any
) -> tuple[tuple, dict] | None:
    """Run the closure of a step, and return the arguments of the step with the loss in its place.

    PyTorch's optimizers run it first. The user's may run it later, as one that looks for sharpness does.
    """
    if closure is None or is_user_code(type(optimizer)):
        return None
    with torch.enable_grad():
        loss = closure()
    return (optimizer, lambda: loss), {}


@contextlib.contextmanager
def _stepped(
    optimizers: Sequence[Optimizer], gradients: KeptGradients, numbers: Numbers
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
        inside.enter_context(numbers)
        numbers.begin_step(reading=not any(group.get("capturable") for group in o.param_groups))
        compiling = torch.compiler._is_compiling_flag and not numbers.reading
        inside.enter_context(having(torch.compiler, _is_compiling_flag=compiling))
        return given

    end = register_optimizer_step_post_hook(lambda *_: inside.close())
    with register_optimizer_step_pre_hook(begin), end, inside:
        try:
            yield
        except ReadsValueError as error:
            if not present:
                raise
            raise _chooses(present[0], error) from error
    for k, o in enumerate(optimizers):
        if o not in stepped and gradients.carried is None:
            which = (
                "optimizer.step()"
                if len(optimizers) == 1
                else f"step() of optimizer {k}, {type(o).__name__}"
            )
            raise TraceError(
                f"lift: the loop step did not call {which} while it was traced, so its program would never do so.\n"
                f"To accumulate gradients, step after each batch and apply zt.accumulate(n) to the lifted step, or "
                f"take all micro-batches in one call, and step after them. To step in some calls only, as a bool says "
                f"that you pass, carry the gradients: lift(loop_step, model, optimizer, carry_grads=True)."
            )


def _chooses(optimizer: Optimizer, error: ReadsValueError) -> TraceError:
    """An optimizer whose step reads values, as those do that compare norms by `if`, `max` or `min`."""
    where_it_reads = "\n".join(str(error).splitlines()[:2])
    return TraceError(
        f"{where_it_reads}\n"
        f"{type(optimizer).__name__}.step() reads it and chooses its update by it. Use an optimizer that does not, "
        f"such as AdamW; or write the update in the loop step, with torch.where, torch.maximum and torch.minimum."
    )
