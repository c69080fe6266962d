"""Local steps: each host trains a replica of its own, and the replicas are averaged now and then (LocalSGD, DiLoCo).

Nothing is rewritten. These are steps around the user's, which average parameters over the `independent_axis` of its
`shard_params`. Traces, layouts and checkpoints are those of any step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .calling.call import ExtraInputs
from .calling.trees import named_leaves
from .ir.printer import counted
from .ops import pmean
from .step import Step
from .transforms.base import check_number
from .transforms.shard_params import Axis, ShardParams

Tensors = dict[str, torch.Tensor]
LocalState = dict[str, Any]
# outer(params, pseudo_gradient, outer_state) -> (params, outer_state)
Outer = Callable[[Tensors, Tensors, dict[str, Any]], tuple[Tensors, dict[str, Any]]]
# The user's step on its own state, for the batch of a call.
Run = Callable[[Any], tuple[Any, Any]]
# What a step of local steps does around that.
Around = Callable[[Run, LocalState], tuple[LocalState, Any]]
# The parameters of the user's state that are averaged, by name.
Trained = Callable[[Any], Tensors]
# From the means of parameters over the hosts: their new values, and the new leaves that all hosts share.
Average = Callable[[LocalState, Tensors], tuple[Tensors, LocalState]]


def local_steps(step: Callable, h: int, outer: Outer | None = None, parts: int = 1) -> LocalSteps:
    """Make the steps with which replicas train apart for `h` steps, and are then averaged (LocalSGD, DiLoCo).

        inner, sync, init = local = zt.local_steps(step, h=50, outer=zt.nesterov(lr=0.7, momentum=0.9))
        state = inner.shard(init(state))                     # {"state": state, "outer": ..., "momentum": ...}
        for i, batch in enumerate(batches):
            state, loss = local.at(i)(state, *batch)         # `sync` in every 50th step, otherwise `inner`

    `inner` is the step on `state["state"]`. `sync` is the step, and then the average over the hosts, after which all
    have equal parameters. Only `sync` sends anything between hosts. Both have the transforms of `step`.

    The parameters are the leaves of `state["params"]`, as of a lifted step, without frozen parameters of the module.
    Everything else, such as moments and batch statistics, stays that of each host. In layouts, a leaf of `state` has
    the path `state.params...`, and shared parameters and outer state have `outer...` and `momentum...`.

    Args:
        step: a step with `shard_params(mesh, independent_axis="host")` among its transforms.
        h: the number of steps from one average to the next. No program depends on it.
        outer: the optimizer of the parameters that all hosts share: `outer(params, pseudo_gradient, outer_state)`
            returns the new parameters and outer state. Each is a dict by the name of the parameter. The pseudo-gradient
            is the shared parameter minus the mean over the hosts. An entry of the outer state begins as
            `outer.init(p)` if there is such a function, and otherwise as zeros like the parameter `p`. Without an
            outer optimizer, the new parameters are the mean.
        parts: with n > 1, the parameters are averaged in n parts of about equal bytes, one in every h/n steps. The
            message of a part has the values from before a step, and with `overlap_grads` it runs under that step; what
            the step adds to the part then stays that of its host. So hosts differ by at most one step in a part that
            has just been averaged. `sync` still averages everything.

    Raises: ValueError if the step has no independent axis, if `h` is not a number from 1 on, or if `parts` is not one
        from 1 to `h`. TypeError if `outer` is no function; when the step is traced, if the state does not come from
        `init`, or `outer` does not return what it has to; and in `init`, if the state has no tensors at "params".

    Source: Stich, Local SGD Converges Fast, 2019; Douillard et al., DiLoCo, 2023, and Streaming DiLoCo, 2025.

    >>> import ztrans as zt
    >>> @zt.shard_params(zt.AbstractMesh(host=2, dp=4), independent_axis="host")
    ... def step(state, x):
    ...     w = state["params"]["w"]
    ...     grad = torch.func.grad(lambda w: (x @ w).square().mean())(w)
    ...     return {"params": {"w": w - 0.1 * grad}}, None
    >>> inner, sync, init = local = local_steps(step, h=4, outer=nesterov(lr=0.7, momentum=0.9))
    >>> [local.at(i).__name__ for i in range(5)]
    ['step', 'step', 'step', 'step_and_sync', 'step']
    >>> lowered = sync.lower(init({"params": {"w": torch.zeros(8)}}), torch.ones(2, 8))
    >>> lowered.cost_analysis().over("host")        # bytes that a rank receives: its quarter of the parameters
    8
    """
    check_number("local_steps: h", h, "a number of steps, at least 1", 1)
    check_number("local_steps: parts", parts, "a number of parts, at least 1", 1)
    if parts > h:
        raise ValueError(
            f"local_steps: parts={parts} and h={h}. Each part is averaged once in h steps, one part in a step, so "
            f"there are at most h parts."
        )
    if outer is not None and (not callable(outer) or isinstance(outer, type) or outer is nesterov):
        raise TypeError(
            f"local_steps: outer={outer!r}; it is a function outer(params, pseudo_gradient, outer_state), such as "
            f"zt.nesterov(lr=0.7, momentum=0.9)."
        )
    own = Step.of(step)
    trained = functools.partial(_trained, own.__name__, own.fn)
    axis = _independent_axis(own)
    average = _average(outer)
    streamed = []
    for number in range(parts if parts > 1 else 0):
        around = _under_a_step(average, trained, axis, number, parts)
        streamed.append(
            _step_around(own, around, f"{own.__name__}_and_part_{number + 1}_of_{parts}")
        )
    return LocalSteps(
        inner=_step_around(own, _alone, own.__name__),
        sync=_step_around(own, _after_a_step(average, trained, axis), f"{own.__name__}_and_sync"),
        init=_init(trained, outer),
        h=h,
        parts=tuple(streamed),
    )


@dataclass(frozen=True)
class LocalSteps:
    """What `local_steps` returns. `inner, sync, init = local` unpacks it.

    Attributes:
        inner: a step of each host alone.
        sync: a step, and then the average of all parameters over the hosts.
        init: `init(state)` is the state of these steps, for `inner.shard`.
        h: the number of steps from one average to the next.
        parts: the steps that average a part of the parameters; empty if these are averaged all at once.
    """

    inner: Step
    sync: Step
    init: Callable[[Any], dict[str, Any]]
    h: int
    parts: tuple[Step, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.inner, self.sync, self.init))

    def at(self, number: int) -> Step:
        """The step to run as step `number`, counted from 0 on: `inner`, or one that averages.

        Part k of n follows k h/n steps, so parts are spread evenly. A loop that resumes goes on with its count.

        Raises: ValueError if `number` is not a whole number from 0 on.
        """
        check_number(
            "local_steps: at: number", number, "the number of a step, counted from 0 on", 0
        )
        done = number % self.h + 1
        if not self.parts:
            return self.sync if done == self.h else self.inner
        for k, step in enumerate(self.parts, 1):
            if done == k * self.h // len(self.parts):
                return step
        return self.inner


def nesterov(lr: float, momentum: float = 0.9) -> Outer:
    """Make the outer optimizer of DiLoCo: SGD with Nesterov momentum.

    For a parameter p with pseudo-gradient g, its momentum m becomes `momentum * m + g`, and then p becomes
    `p - lr * (g + momentum * m)`. With `nesterov(1.0, 0.0)` parameters become the mean over the hosts.

    Source: Sutskever et al., 2013, as in torch.optim.SGD(nesterov=True); Douillard et al., DiLoCo, 2023.

    >>> outer = nesterov(lr=0.5, momentum=0.5)
    >>> outer({"w": torch.ones(2)}, {"w": torch.ones(2)}, {"w": torch.zeros(2)})
    ({'w': tensor([0.2500, 0.2500])}, {'w': tensor([1., 1.])})
    """

    def nesterov_step(
        params: Tensors, pseudo_gradient: Tensors, outer_state: dict[str, Any]
    ) -> tuple[Tensors, dict[str, Any]]:
        new_params, new_momentum = {}, {}
        for name, g in pseudo_gradient.items():
            new_momentum[name] = momentum * outer_state[name] + g
            new_params[name] = params[name] - lr * (g + momentum * new_momentum[name])
        return new_params, new_momentum

    return nesterov_step


# ---- what is done around the user's step. Closures, because a step reads the values in them.


def _alone(run: Run, local: LocalState) -> tuple[LocalState, Any]:
    state, output = run(_held(local, "state"))
    return {**local, "state": state}, output


def _after_a_step(average: Average, trained: Trained, axis: Axis) -> Around:
    def around(run: Run, local: LocalState) -> tuple[LocalState, Any]:
        state, output = run(_held(local, "state"))
        params, shared = average(local, pmean(trained(state), axis))
        return {**local, **shared, "state": _with_params(state, params)}, output

    return around


def _under_a_step(
    average: Average, trained: Trained, axis: Axis, number: int, parts: int
) -> Around:
    """Average a part of the parameters as they were before the step, and add what the step changes."""

    def around(run: Run, local: LocalState) -> tuple[LocalState, Any]:
        # Copies, because the step may write its parameters in place.
        old = pytree.tree_map(torch.clone, _part(trained(_held(local, "state")), number, parts))
        # Nothing before the end of the step reads the means, so their message may run under all of it.
        means = pmean(old, axis)
        state, output = run(local["state"])
        averaged, shared = average(local, means)
        new = trained(state)
        params = {name: p + (new[name] - old[name]) for name, p in averaged.items()}
        return {**local, **shared, "state": _with_params(state, params)}, output

    return around


def _average(outer: Outer | None) -> Average:
    """The new parameters from their means over the hosts: the means themselves, or a step of the outer optimizer."""

    def average(local: LocalState, means: Tensors) -> tuple[Tensors, LocalState]:
        if outer is None:
            return means, {}
        outer_params, outer_state = _held(local, "outer"), _held(local, "momentum")
        shared = {name: outer_params[name] for name in means}
        pseudo_gradients = {name: shared[name] - mean for name, mean in means.items()}
        old_state = {name: outer_state[name] for name in means}
        new, new_state = _both(outer(shared, pseudo_gradients, old_state), means)
        return dict(new), {
            "outer": {**outer_params, **new},
            "momentum": {**outer_state, **new_state},
        }

    return average


def _held(local: LocalState, key: str) -> Any:
    """A part of the state that `init` has made.

    Raises: TypeError if it is not there.
    """
    if not isinstance(local, Mapping) or key not in local:
        raise TypeError(
            f"local_steps: the state has no {key!r}, so it does not come from `init` of these local steps.\n"
            f"Make it once, before the first step: state = local.inner.shard(local.init(state))."
        )
    return local[key]


def _both(returned: Any, names: Collection[str]) -> tuple[Tensors, dict[str, Any]]:
    """The parameters and the state that an outer optimizer has returned.

    Raises: TypeError if these are not two dicts, the first with the name of each parameter.
    """
    pair = returned if isinstance(returned, tuple) else ()
    if len(pair) != 2 or not all(isinstance(part, Mapping) for part in pair):
        raise TypeError(
            f"local_steps: outer returned a {type(returned).__name__}; it returns a pair of dicts by the names of the "
            f"parameters: (params, outer_state)."
        )
    missing = [name for name in names if name not in pair[0]]
    if missing:
        raise TypeError(
            f"local_steps: outer returned no new value of {', '.join(missing[:3])}. It returns a new value of each "
            f"parameter that it gets."
        )
    return pair


def _init(trained: Trained, outer: Outer | None) -> Callable[[Any], LocalState]:
    def init(state: Any) -> LocalState:
        """The state of local steps: the user's, and the parameters and outer state that all hosts share."""
        params = trained(state)
        if outer is None:
            return {"state": state}
        state_of = getattr(outer, "init", torch.zeros_like)
        with torch.no_grad():
            return {
                "state": state,
                "outer": {name: p.detach().clone() for name, p in params.items()},
                "momentum": {name: state_of(p.detach()) for name, p in params.items()},
            }

    return init


# ---- parameters


def _trained(name: str, fn: Callable, state: Any) -> Tensors:
    """The parameters in a state that are averaged, by name: without integers and frozen parameters of a module.

    Raises: TypeError if the state has no tensors at "params".
    """
    params = state.get("params") if isinstance(state, Mapping) else None
    leaves = named_leaves(params)
    if params is None or not all(isinstance(p, torch.Tensor) for p in leaves.values()):
        keys = (
            f"the keys {', '.join(map(repr, state))}" if isinstance(state, Mapping) else "no keys"
        )
        raise TypeError(
            f"local_steps: the state of {name} has {keys}, and local steps average the tensors that it has at "
            f"'params'.\nMake it a dict, with the parameters at 'params' and everything else at other keys."
        )
    frozen: set[str] = set()
    if isinstance(fn, ExtraInputs):
        for module in fn.modules():
            frozen.update(key for key, p in module.named_parameters() if not p.requires_grad)
    return {
        key: p
        for key, p in leaves.items()
        if key not in frozen and (p.is_floating_point() or p.is_complex())
    }


def _with_params(state: Any, new: Tensors) -> Any:
    """A state with new values of some parameters."""
    leaves = {**named_leaves(state["params"]), **new}
    tree = pytree.tree_structure(state["params"])
    return {**state, "params": pytree.tree_unflatten(leaves.values(), tree)}


def _part(params: Tensors, number: int, parts: int) -> Tensors:
    """One of several parts of the parameters, of about equal bytes: the largest come first, each to the smallest part.

    Raises: ValueError if there are fewer parameters than parts.
    """
    if parts > len(params):
        raise ValueError(
            f"local_steps: parts={parts}, and the state has {counted(len(params), 'parameter')}. A part has whole "
            f"parameters: use at most {counted(len(params), 'part')}."
        )
    sizes = [0] * parts
    members: Tensors = {}
    for name, p in sorted(params.items(), key=lambda item: -item[1].numel()):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += p.numel() * p.itemsize
        if smallest == number:
            members[name] = p
    return {name: p for name, p in params.items() if name in members}


# ---- steps


def _independent_axis(step: Step) -> Axis:
    """The axis along which the replicas of a step train apart.

    Raises: ValueError if there is none.
    """
    for t in step.transforms:
        if isinstance(t, ShardParams) and t.independent_axis is not None:
            return t.independent_axis
    raise ValueError(
        f"local_steps: {step.__name__} has no axis along which replicas train apart.\n"
        f"Shard it first: step = zt.shard_params(mesh, axis='dp', independent_axis='host')({step.__name__}), on a mesh "
        f"such as zt.make_mesh('cpu', host=2, dp=-1); then zt.local_steps(step, h)."
    )


def _step_around(step: Step, around: Around, name: str) -> Step:
    """A step with the same transforms, whose function is `around` the function of the step."""
    fn = step.fn

    @functools.wraps(fn)
    def around_step(local: LocalState, /, *batch: Any, **kwargs: Any) -> tuple[LocalState, Any]:
        return around(lambda state: fn(state, *batch, **kwargs), local)

    around_step.__name__ = name
    if isinstance(fn, ExtraInputs):
        return Step(_AroundLifted(fn, around, around_step), step.transforms)
    return Step(around_step, step.transforms)


class _AroundLifted(ExtraInputs):
    """`around_step` of a lifted step. Extra inputs are passed through."""

    def __init__(self, lifted: ExtraInputs, around: Around, around_step: Callable) -> None:
        functools.update_wrapper(self, around_step)
        self.extra_name = lifted.extra_name
        self._lifted = lifted
        self._around = around

    def __call__(self, local: LocalState, /, *batch: Any, **kwargs: Any) -> tuple[LocalState, Any]:
        return self.call_with(self.extra_inputs(), local, *batch, **kwargs)

    def call_with(
        self, extra: Any, local: LocalState, /, *batch: Any, **kwargs: Any
    ) -> tuple[LocalState, Any]:
        def run(state: Any) -> tuple[Any, Any]:
            return self._lifted.call_with(extra, state, *batch, **kwargs)

        return self._around(run, local)

    def extra_inputs(self) -> Any:
        return self._lifted.extra_inputs()

    def modules(self) -> Sequence[nn.Module]:
        return self._lifted.modules()

    def before_run(self) -> None:
        self._lifted.before_run()

    def after_shard(self) -> None:
        self._lifted.after_shard()

    def constants(self) -> Mapping[str, Hashable]:
        return self._lifted.constants()

    def evaluation(self, fn: Callable) -> Callable:
        evaluation = self._lifted.evaluation(fn)
        return _step_around(Step.of(evaluation), _alone, evaluation.__name__).fn

    def known_tensors(self, state: Any) -> Mapping[int, torch.Tensor]:
        return self._lifted.known_tensors(_held(state, "state"))

    def check_changed(self, changed: Collection[str]) -> None:
        of_state = [name.removeprefix("state.") for name in changed if name.startswith("state.")]
        self._lifted.check_changed(of_state)
