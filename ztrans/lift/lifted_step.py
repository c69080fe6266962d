"""Run the body of a loop on the tensors of a state, and refuse what cannot be lifted.

While the loop step is traced, tensors of the state replace the module's tensors and the optimizer's state. Their values
after the loop step are the new state.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
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
from ..calling.global_state import patched
from ..ir.source import Source
from ..tracing.errors import OutsideTensorError, ReadsValueError, TraceError
from .gradients import Gradients
from .hyperparameters import (
    ParamGroup,
    constants_of,
    groups_of,
    inputs_of,
    numbers_of_groups,
    schedulers_refused,
    unchanged,
)
from .lifted_state import State, check_lifted
from .module_tensors import buffers_of, explain_outside, substituted, tensors_of
from .moved_weights import has_moved, move_to_state
from .numbers import Numbers
from .optimizer_state import (
    Entries,
    check_known,
    check_optimizers,
    constant_entries,
    explain_loose,
    is_based_on_torch,
    may_fuse,
    numbers_of_states,
    params_of,
    states_by_name,
)
from .scaler import Scale, scaling, settings_of
from .shared_memory import check_apart_after_step, check_sharing_unchanged

P = ParamSpec("P")
T = TypeVar("T")

# The types of tensors that hold their own values, unlike fake tensors and DTensors.
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# The settings of PyTorch's optimizers in a trace. They read no values, and update one parameter at a time: a program
# has an equation for each parameter in any case.
_CAPTURABLE = {"foreach": False, "capturable": True}
# One kernel does the whole update, including the scalars that depend on the step count.
_FUSED = {"foreach": None, "fused": True}


class LiftedStep(ExtraInputs, Generic[P, T]):
    """A loop step as a pure step: `step(state, *batch) -> (state, output)`."""

    extra_name = "param_groups"

    def __init__(
        self,
        loop_step: Callable[P, T],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        carry_grads: bool,
        scaler: GradScaler | None,
        sharing: Sequence[tuple[str, str]],
        lifted_at: Source | None,
    ) -> None:
        functools.update_wrapper(self, loop_step)
        self.__name__ = getattr(loop_step, "__name__", "step")
        self._loop_step = loop_step
        self._model = model
        self._optimizers = optimizers
        self._states_of_optimizers = [optimizer.state for optimizer in optimizers]
        self._carry_grads = carry_grads
        self._scaler = scaler
        self._changes_params = bool(optimizers)
        # The pairs of buffers that share memory in the module.
        self._sharing = sharing
        # The user's line that calls `lift`.
        self._lifted_at = lifted_at
        self.__signature__ = _signature_of(loop_step)

    def __reduce__(self) -> str:
        """Raises: TypeError. The loop step names its model, so a copy would train the model of the original."""
        raise TypeError(
            f"{self.__name__}: a lifted step cannot be copied or pickled, because its function names the model and the "
            f"optimizer that were lifted.\n"
            f"Make a model and an optimizer there, and lift a loop step on them: zt.lift(loop_step, model, optimizer)."
        )

    def __call__(self, state: State, /, *batch: P.args, **kwargs: P.kwargs) -> tuple[State, T]:
        return self.call_with(self.extra_inputs(), state, *batch, **kwargs)

    def extra_inputs(self) -> list[ParamGroup]:
        """The values of the parameter groups that are inputs of a program.

        Raises: ValueError if a checkpoint has been loaded into an optimizer since `lift`.
        """
        for optimizer, state in zip(self._optimizers, self._states_of_optimizers):
            # `load_state_dict` replaces the dict; an optimizer writes into it.
            if optimizer.state is not state:
                raise _loaded(optimizer)
        return inputs_of(self._optimizers)

    def modules(self) -> tuple[nn.Module]:
        return (self._model,)

    def before_run(self) -> None:
        """Move the weights of the module to the state, if the step changes them."""
        if self._changes_params and not has_moved(self._model):
            move_to_state(self._model, self._optimizers)

    def after_shard(self) -> None:
        """Move the weights of the module to the state that `Step.shard` has copied."""
        move_to_state(self._model, self._optimizers)

    def constants(self) -> Mapping[str, Hashable]:
        """The settings of the optimizers and the scaler that are constants of a program."""
        return {
            "a setting of an optimizer": constants_of(self._optimizers),
            "a setting of the scaler": settings_of(self._scaler),
        }

    def evaluation(self, fn: Callable) -> Evaluation:
        """A function of the batch that uses the module, as a step that leaves its state unchanged."""
        return Evaluation(fn, self._model)

    def known_tensors(self, state: State) -> Mapping[int, torch.Tensor]:
        """The buffers and frozen parameters of the module that have values, by the `id` of their leaf in a state."""
        self._check(state)
        frozen = {name: p for name, p in self._model.named_parameters() if not p.requires_grad}
        tensor_by_leaf = {}
        for kind, tensors in (("params", frozen), ("buffers", buffers_of(self._model))):
            for name, x in tensors.items():
                has_value = type(x) in _PLAIN and not x.is_meta and not has_moved(x)
                if name in state[kind] and has_value:
                    tensor_by_leaf[id(state[kind][name])] = x
        return tensor_by_leaf

    def _check(self, state: Any) -> None:
        """Raises: TypeError if a state lacks what this step needs."""
        keys = ["params", "buffers"]
        if self._optimizers:
            keys.append("optimizer")
        check_lifted(state, self.__name__, keys)

    def check_changed(self, changed: Collection[str]) -> None:
        """Note whether programs change parameters.

        Raises: TraceError if a program changes one of two buffers that share memory in the module.
        """
        if any(name.startswith("params.") for name in changed):
            self._changes_params = True
        check_sharing_unchanged(self._sharing, changed)

    def call_with(
        self, extra: list[ParamGroup], state: State, /, *batch: P.args, **kwargs: P.kwargs
    ) -> tuple[State, T]:
        """Run the loop step from `state`, with these values of the parameter groups."""
        self._check(state)
        check_optimizers(self._model, self._optimizers)
        module_params = dict(self._model.named_parameters())
        module_tensors = tensors_of(self._model)
        buffers = {}
        for name, x in module_tensors.items():
            if name in state["buffers"]:
                buffers[id(x)] = state["buffers"][name]
        gradients = Gradients(
            module_params, state["params"], buffers, state.get("grads"), bool(self._optimizers)
        )
        names = {id(p): name for name, p in module_params.items()}
        group_numbers = numbers_of_groups(groups_of(self._optimizers), extra)
        state_numbers = numbers_of_states(self._optimizers, names, state.get("optimizer", {}))
        numbers = Numbers([*group_numbers, *state_numbers])
        # Copies, because a scaler writes its scale in place, and the caller's state must not change.
        scale = None
        if "scaler" in state:
            scale = {key: x.clone() for key, x in state["scaler"].items()}

        with self._with_tensors_of(state, names, gradients.stand_ins, extra):
            with self._checked(gradients, module_tensors, numbers, scale):
                output = self._loop_step(*batch, **kwargs)
            new_gradients = gradients.end()
            new_state = self._new_state(gradients.params, state, module_tensors)
        if new_gradients is not None:
            new_state["grads"] = new_gradients
        if scale is not None:
            new_state["scaler"] = scale
        check_apart_after_step(new_state, gradients.data_set)
        return new_state, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    @contextlib.contextmanager
    def _with_tensors_of(
        self,
        state: State,
        names: Mapping[int, str],
        stand_ins: Mapping[int, torch.Tensor],
        extra: list[ParamGroup],
    ) -> Iterator[None]:
        """Put the tensors of a state into the module and the optimizers, inside the context.

        Args:
            state: the state.
            names: the names of the module's parameters by their ids.
            stand_ins: the tensors that stand in for the module's, by their ids.
            extra: the values of the parameter groups that are inputs of the program.
        """
        inputs = iter(extra)
        with contextlib.ExitStack() as stack:
            stack.enter_context(substituted(self._model, stand_ins))
            for optimizer in self._optimizers:
                entries: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
                for p in params_of(optimizer):
                    state_of_p = state["optimizer"].get(names[id(p)])
                    if state_of_p is not None:
                        constants = constant_entries(optimizer.state.get(p, {}))
                        entries[stand_ins[id(p)]] = constants | state_of_p
                groups = _groups_with(optimizer, stand_ins, inputs, entries)
                stack.enter_context(patched(optimizer, param_groups=groups, state=entries))
            stack.enter_context(unchanged(self._optimizers))
            yield

    @contextlib.contextmanager
    def _checked(
        self,
        gradients: Gradients,
        module_tensors: Mapping[str, torch.Tensor],
        numbers: Numbers,
        scale: Scale | None,
    ) -> Iterator[None]:
        """Refuse, inside the context, what a loop step may not do. `module_tensors` are the module's own tensors."""
        params = gradients.params
        required_grad = {name: p.requires_grad for name, p in params.items()}
        steps = _steps_checked(self._optimizers, gradients, numbers, self._carry_grads)
        with steps, schedulers_refused(), scaling(self._scaler, scale), gradients:
            try:
                yield
            except OutsideTensorError as error:
                explained = explain_loose(error, self._optimizers, self._lifted_at)
                raise (
                    explained or explain_outside(error, self._loop_step, module_tensors)
                ) from None
            except KeyError as error:
                # A dict with the module's parameters as keys does not have their stand-ins.
                for name, p in params.items():
                    if error.args and error.args[0] is p:
                        raise _parameter_as_key(name) from error
                raise
        for name, p in params.items():
            old = required_grad[name]
            if p.requires_grad != old:
                raise TraceError(
                    f"lift: the loop step leaves requires_grad={p.requires_grad} on {name}, where it was {old}; the "
                    f"next call would start from {old} again.\n"
                    f"Set it outside of the loop step, which is then traced again; or set it back before its end."
                )

    def _new_state(
        self,
        params: Mapping[str, torch.Tensor],
        state: State,
        module_tensors: Mapping[str, torch.Tensor],
    ) -> State:
        """The state after the loop step. `module_tensors` are the module's tensors before it."""
        buffers = buffers_of(self._model, always=state["buffers"])
        for name, x in buffers.items():
            if name not in state["buffers"] and x is not module_tensors.get(name):
                raise TraceError(
                    f"lift: the loop step makes a tensor in the attribute {name} of the module, and the state does "
                    f"not have it.\n"
                    f"If no later call reads it, return it as output instead. Call the model once before lift, "
                    f"if one does; its shape may not change then."
                )
        for name in state["buffers"]:
            if name not in buffers:
                raise TraceError(
                    f"lift: the loop step takes the tensor {name} from the module, and a state keeps its tensors.\n"
                    f"Leave the tensor there, or keep it out of the attributes of modules."
                )
            old_shape = tuple(state["buffers"][name].shape)
            new_shape = tuple(buffers[name].shape)
            if new_shape != old_shape:
                raise TraceError(
                    f"lift: the loop step stores a tensor {list(new_shape)} in the attribute {name} of the module, "
                    f"which had {list(old_shape)} before, and a state keeps its shapes.\n"
                    f"If no later call reads it, as with the last activation, delete the attribute before lift, and "
                    f"return the tensor as output instead."
                )

        new = dict(state)
        new["params"] = {name: p.detach() for name, p in params.items()}
        new["buffers"] = {name: buffers[name].detach() for name in state["buffers"]}
        if self._optimizers:
            new["optimizer"] = self._new_optimizer_state(params, state["optimizer"])
        return new

    def _new_optimizer_state(self, params: Mapping[str, torch.Tensor], old_state: State) -> State:
        # The state of a parameter that is no longer in an optimizer stays as it is.
        states: dict[str, Entries] = dict(old_state)
        names = {id(p): name for name, p in params.items()}
        for optimizer in self._optimizers:
            by_name = states_by_name(optimizer, names)
            # State that the loop step creates would be created again in each call of the program.
            check_known(optimizer, by_name, old_state)
            states.update(by_name)

        new_state: dict[str, Entries] = {}
        for name, entries in old_state.items():
            new_entries = {}
            for key, old in entries.items():
                if key in states[name]:
                    new_entries[key] = pytree.tree_map(_in_precision_of, old, states[name][key])
            new_state[name] = new_entries
        return new_state


class Evaluation(LiftedStep[P, T]):
    """A function of the batch that uses a module, as a step that leaves its state unchanged.

    It takes the states of steps that train the module, and reads their parameters and buffers only.
    """

    def __init__(self, fn: Callable[P, T], model: nn.Module) -> None:
        super().__init__(torch.no_grad()(fn), model, (), False, None, (), None)

    def call_with(
        self, extra: list[ParamGroup], state: State, /, *batch: P.args, **kwargs: P.kwargs
    ) -> tuple[State, T]:
        self._check(state)
        weights = {"params": state["params"], "buffers": state["buffers"], "optimizer": {}}
        new_weights, output = super().call_with(extra, weights, *batch, **kwargs)
        params, buffers = new_weights["params"], new_weights["buffers"]
        return {**state, "params": params, "buffers": buffers}, output

    def check_changed(self, changed: Collection[str]) -> None:
        """Raises: TraceError if the function changes a parameter or a buffer."""
        if changed:
            raise TraceError(
                f"eval: {self.__name__} changes {min(changed)} of the state.\n"
                f"Batch norms update their statistics in training mode: call model.eval() before, and model.train() "
                f"after."
            )


def _signature_of(loop_step: Callable) -> inspect.Signature:
    """The signature of a lifted step: the state, then the arguments of the loop step."""
    arguments = inspect.signature(loop_step).parameters
    name = "state" if "state" not in arguments else "lifted_state"
    state = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    return inspect.Signature([state, *arguments.values()])


def _groups_with(
    optimizer: Optimizer,
    stand_ins: Mapping[int, torch.Tensor],
    inputs: Iterator[ParamGroup],
    state: Mapping[torch.Tensor, Entries],
) -> list[ParamGroup]:
    """The parameter groups of an optimizer for one call: with stand-ins, and with the settings of a trace.

    A lifted step that is called without a `Step` is not traced, and runs the optimizer with its own settings.

    Args:
        optimizer: the optimizer.
        stand_ins: the stand-ins by the ids of the parameters.
        inputs: for each group, the values that are inputs of the program.
        state: the optimizer's entries for each stand-in.
    """
    has_trace_settings = torch.compiler.is_compiling() and is_based_on_torch(optimizer)
    groups = []
    for group in optimizer.param_groups:
        new_group = {**group, **next(inputs)}
        new_group["params"] = [stand_ins[id(p)] for p in group["params"]]
        if has_trace_settings and not group.get("fused"):
            settings = _FUSED if may_fuse(optimizer, new_group, state) else _CAPTURABLE
            new_group.update({key: value for key, value in settings.items() if key in group})
        groups.append(new_group)
    return groups


def _in_precision_of(old: Any, new: Any) -> Any:
    """A new value of an optimizer's state in the precision of the old one."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return new.to(old.dtype) if new.is_floating_point() else new
    return new


@contextlib.contextmanager
def _steps_checked(
    optimizers: Sequence[Optimizer], gradients: Gradients, numbers: Numbers, are_carried: bool
) -> Iterator[None]:
    """Raise an error if the loop steps another optimizer, or computes gradients that no optimizer uses.

    An optimizer need not step in every program: a policy may be updated in every second call, as a bool says. But
    unless gradients `are_carried`, the loop step must reset what it does not use: a later call that steps it would
    start without these gradients.

    While one of them steps, also in a hook of backward, the mode `numbers` is active.
    """
    stepped_optimizers: list[Optimizer] = []
    running_optimizers: list[Optimizer] = []
    # The hooks enter and leave the mode. If a step fails, no hook follows, and the end of the context leaves it.
    number_mode = contextlib.ExitStack()

    def begin(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if optimizer not in optimizers:
            raise TraceError(
                f"lift: the loop step calls step() of another optimizer, {type(optimizer).__name__}, which would train "
                f"nothing.\nGive lift all of them: lift(loop_step, model, [first, second])."
            )
        stepped_optimizers.append(optimizer)
        running_optimizers.append(optimizer)
        number_mode.enter_context(numbers)
        return args, kwargs

    def end(optimizer: Optimizer, *_: Any) -> None:
        running_optimizers.pop()
        number_mode.close()
        gradients.after_step(params_of(optimizer))

    before_step = register_optimizer_step_pre_hook(begin)
    with before_step, register_optimizer_step_post_hook(end), number_mode:
        try:
            yield
        except ReadsValueError as error:
            if not running_optimizers:
                raise
            raise _reads_value(running_optimizers[-1], error) from error
    for k, optimizer in enumerate(optimizers):
        has_stepped = optimizer in stepped_optimizers
        if not (has_stepped or are_carried) and any(
            p.grad is not None for p in params_of(optimizer)
        ):
            raise _not_stepped(optimizers, k)


def _not_stepped(optimizers: Sequence[Optimizer], k: int) -> TraceError:
    method = "optimizer.step()"
    if len(optimizers) > 1:
        method = f"step() of optimizer {k}, {type(optimizers[k]).__name__}"
    return TraceError(
        f"lift: the loop step did not call {method} while it was traced, and leaves gradients for it.\n"
        f"  1. To accumulate gradients, step after each batch, and apply zt.accumulate(n) to the lifted step.\n"
        f"  2. To step in some calls only, as a bool says that you pass, compute no gradients for it in the others: "
        f"call .detach() on what it trains, or its zero_grad() at the end.\n"
        f"  3. To add to the gradients of earlier calls, carry them: lift(loop_step, model, optimizer, "
        f"carry_grads=True)."
    )


def _reads_value(optimizer: Optimizer, error: ReadsValueError) -> TraceError:
    """The error of an optimizer that reads a number from a tensor, to compute with it or to choose its update."""
    first_lines = "\n".join(str(error).splitlines()[:2])
    return TraceError(
        f"{first_lines}\n"
        f"{type(optimizer).__name__}.step() reads it as a Python number, and a program would always have the "
        f"number of its trace. Compute with the tensor itself: torch.as_tensor(step), not torch.tensor(float(step)); "
        f"torch.sqrt, not math.sqrt; torch.where, not if; or write the update in the loop step. Or use an optimizer "
        f"that does so, such as AdamW."
    )


def _loaded(optimizer: Optimizer) -> ValueError:
    return ValueError(
        f"lift: the state of {type(optimizer).__name__} was replaced after lift, as load_state_dict does, and the "
        f"lifted state does not have the loaded values.\n"
        f"Load the model and the optimizer before lift. Or load the lifted state: state = zt.load(path, state, step); "
        f"and then set learning rates in optimizer.param_groups."
    )


def _parameter_as_key(name: str) -> TraceError:
    return TraceError(
        f"lift: the loop step looks {name} up in a dict whose keys are parameters. While the loop runs another tensor "
        f"stands in for it.\n"
        f"Use names as keys, or bind each hook to its objects: "
        f"p.register_post_accumulate_grad_hook(functools.partial(hook, optimizer))."
    )
