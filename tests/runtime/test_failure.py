"""Steps that fail. The state is then old, or new, or marked as half updated.

With `update="last"` the state is not written before all collectives have ended.
"""

from __future__ import annotations

import gc
import signal
import time

import pytest
import torch
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.cover import parameters_of
from tests.support.lifted import loop_of
from tests.support.programs import CASES
from tests.support.runners import FunctionRunner
from tests.support.worlds import ALL, batches, clone, on_ranks, slices
from ztrans.calling.leaf_records import check_whole
from ztrans.ir.collectives import WAIT
from ztrans.ir.donation import donation, first_write
from ztrans.runtime.failure import Writes, ending_together
from ztrans.runtime.session import explain_loss

SHOTS = 20  # interrupts, at moments spread over a step
LAST = (zt.overlap_grads(update="last"), *ALL[1:])


def same(a, b) -> bool:
    return all(
        torch.equal(torch.as_tensor(x), torch.as_tensor(y))
        for x, y in zip(*map(pytree.tree_leaves, (a, b)))
    )


def wide_step(state, x):
    """A step of some milliseconds. About half of the time goes into its many updates."""
    weights = {k: w.detach().requires_grad_() for k, w in state["weights"].items()}
    y = x
    for w in weights.values():
        y = torch.tanh(y @ w)
    grads = torch.autograd.grad(y.square().mean(), list(weights.values()))
    moments = {k: 0.9 * state["moments"][k] + g for k, g in zip(weights, grads)}
    return {
        "weights": {k: state["weights"][k] - m for k, m in moments.items()},
        "moments": moments,
    }, y.mean()


def wide_state():
    torch.manual_seed(0)
    weights = {f"w{i:02}": 0.05 * torch.randn(256, 256) for i in range(24)}
    return {"weights": weights, "moments": {k: torch.zeros_like(w) for k, w in weights.items()}}


def interrupted(step, state, x, after: float) -> bool:
    """Interrupt the step `after` so many seconds, and return whether it was.

    A signal that arrives before or after the step raises nothing, as it would end the process of the test.
    """

    def interrupt(_, frame):
        while frame is not None:
            if frame.f_code is zt.Step.__call__.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    old = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # an exception in a callback of the garbage collector would be lost
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        step(state, x)
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        gc.enable()
    return False


@pytest.mark.slow
@pytest.mark.parametrize("update", ["eager", "last"])
def test_a_state_is_old_or_new_or_marked_after_interrupts_at_many_moments(update):
    mesh = zt.make_mesh("cpu", dp=-1)
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(update=update))(wide_step)
    state, x = step.shard(wide_state()), torch.randn(128, 256)
    state, _ = step(state, x)
    takes = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        state, _ = step(state, x)
        takes = min(takes, time.perf_counter() - began)
    torn = whole = 0
    for k in range(SHOTS):
        before = step.unshard(state)
        after = clone(before)
        was_interrupted = interrupted(step, state, x, max(1e-4, takes * (k + 0.5) / SHOTS))
        if not was_interrupted:
            continue
        try:
            full = step.unshard(state)
        except RuntimeError as error:
            assert "this state is half updated" in str(error) and "KeyboardInterrupt" in str(error)
            torn += 1
            state = step.shard(after)
            continue
        whole += 1
        if not same(full, before):
            wanted, _ = step(step.shard(before), x)
            assert same(full, step.unshard(wanted)), (
                "the state is neither old nor new, but is not marked"
            )
    assert torn + whole > 0, "no interrupt has hit the step"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no")])
def test_a_step_that_fails_inside_no_grad_leaves_gradients_on(error):
    """An interrupt may arrive in the exit of `torch.no_grad()`, before it turns gradients on again."""
    with pytest.raises(type(error)), ending_together("step", [], None, Writes()):
        torch.set_grad_enabled(False)
        raise error
    is_enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert is_enabled


def test_an_interrupt_in_the_exit_of_a_step_is_named():
    """Then Python closes the generator of the context, at some later time."""
    leaf = torch.zeros(2)
    writes = Writes()
    context = ending_together("step", [leaf], None, writes)
    context.__enter__()
    writes.begin()
    del context
    with pytest.raises(RuntimeError, match="failed with an interrupt, such as KeyboardInterrupt"):
        check_whole([leaf], "step")


WITH_SHARDS_OR_WHOLE = (
    "gpt_adam",
    "batch_norm_mean",
    "adamw_fused",
    "sam",
)  # here at stages 0 and 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"),
    parameters_of(
        [
            (name, stage)
            for name in (*WITH_SHARDS_OR_WHOLE, "clipped", "accumulation", "muon")
            for stage in (0, 1, 2, 3)
        ],
        [
            *((name, stage) for name in WITH_SHARDS_OR_WHOLE for stage in (0, 3)),
            *((name, stage) for name in ("clipped", "accumulation") for stage in (1, 3)),
            *(("muon", stage) for stage in (2, 3)),
        ],
    ),
)
def test_with_update_last_the_state_is_written_after_the_last_wait(name, stage):
    """The bits are those of eager updates."""
    case = CASES[name]
    lowered = [
        on_ranks(case, 2, zt.shard_params(zt.AbstractMesh(dp=2), stage=stage), *ts)
        for ts in (LAST, ALL)
    ]
    graph = lowered[0].graph
    given, start, state = donation(graph), first_write(graph), set(graph.state)
    assert all(e.op is not WAIT and e.region == "update" for e in graph.eqns[start:])
    for e in graph.eqns[:start]:
        assert e not in given.in_place_ops or not any(
            given.owner[out] in state for out in e.outs if out is not None
        ), e
    early = [e for e in lowered[1].graph.eqns if e in donation(lowered[1].graph).in_place_ops]
    assert early, "eager updates are in place, so the test compares the two"
    results = [x.lockstep(case.state(), slices(batches(case, 1)[0], 2)) for x in lowered]
    assert same(*results)


def test_state_that_forward_changes_is_written_at_the_end_too():
    """As the running statistics and the counter of a batch norm."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    step = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), *LAST)(step)
    graph = step.lower(state, torch.randn(8, 4)).graph
    given, start = donation(graph), first_write(graph)
    counters = {v for v in graph.state if "num_batches" in v.name}
    writes = [
        i
        for i, e in enumerate(graph.eqns)
        if e in given.in_place_ops and any(given.owner[o] in counters for o in e.outs)
    ]
    assert counters and all(i >= start for i in writes)


def test_a_half_updated_state_is_refused_and_another_state_is_not():
    step = zt.Step.of(lambda s, x: ({"a": s["a"] + x.sum(), "b": s["b"] * 2}, x))
    state, x = {"a": torch.zeros(3), "b": torch.ones(3)}, torch.ones(2)
    compiled = step.compiled(state, x)

    def broken(*_):
        raise MemoryError("none is left")

    bound = compiled._new_local_program([state["a"], state["b"], x], [state["a"], state["b"]])
    compiled.binding.local_program = bound._replace(
        runner=FunctionRunner(lambda local: (bound.writes.begin(), broken()))
    )
    with pytest.raises(MemoryError) as error:
        step(state, x)
    assert error.value.__notes__ == [
        "ztrans: step 1 of step was ended by this. The state is half updated."
    ]
    with pytest.raises(RuntimeError, match="step 1 of step failed with MemoryError"):
        step(state, x)
    with pytest.raises(RuntimeError, match="shard: this state is half updated"):
        step.shard(state)
    with pytest.raises(RuntimeError, match="unshard: this state is half updated"):
        step.unshard(state)
    check_whole([torch.zeros(3)], "another state")


def test_the_error_of_a_lost_rank_says_the_cause():
    """A rank that has lost others itself leaves an empty note."""
    failed = "failed in step 1 of blended_step with ValueError"
    assert explain_loss({2: "", 1: failed}, [3]) == [f"Rank 1 {failed}."]
    silent, advice = explain_loss({2: ""}, [1, 3])
    assert silent.startswith("Ranks 1, 3 said nothing: the program there has ended, or it")
    assert advice.startswith("Every rank must take the same number of steps.")
    assert explain_loss({2: ""}, []) == []


def test_a_tuned_program_marks_a_half_updated_state_too():
    state, x = {"a": torch.zeros(3), "b": torch.ones(3)}, torch.ones(2)
    compiled = (
        zt.Step.of(lambda s, x: ({"a": s["a"] + x.sum(), "b": s["b"] * 2}, x))
        .lower(state, x)
        .compile()
    )
    tuned, _ = compiled.tune(state, x, steps=1)
    program = tuned.binding.local_program.runner.executable.program
    forward = program.forward

    def broken(*inputs):
        forward(*inputs)
        raise MemoryError("none is left")

    program.forward = broken
    with pytest.raises(MemoryError) as error:
        tuned(state, x)
    assert error.value.__notes__[-1].endswith("The state is half updated.")
