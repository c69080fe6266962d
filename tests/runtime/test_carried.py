"""What a step leaves to the next one on its mesh, and when that uses it. The other ranks do not exist."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import batches, fake_mesh, slices
from ztrans.runtime.carried import CarryingExecutable
from ztrans.runtime.collectives import Start
from ztrans.runtime.mesh import _end
from ztrans.runtime.session import session_of

CASE = CASES["mlp_momentum"]
BATCH = slices(batches(CASE, 1)[0], 4)[1]


@pytest.fixture
def mesh():
    with fake_mesh() as mesh:
        yield mesh


@pytest.fixture
def starts(monkeypatch) -> list:
    """The calls that start gathers from the state."""
    calls = []
    plain = CarryingExecutable.start_carried

    def start(run, inputs):
        calls.append(run)
        return plain(run, inputs)

    monkeypatch.setattr(CarryingExecutable, "start_carried", start)
    return calls


def made(mesh) -> zt.Step:
    across = zt.prefetch(across_steps=True)
    return zt.chain(zt.shard_params(mesh), zt.overlap_grads(), across)(CASE.step)


def weight(state) -> torch.Tensor:
    return state["params"]["0.weight"]


def in_place(state) -> None:
    with torch.no_grad():
        weight(state).mul_(0.5)


def of_the_local_part(state) -> None:
    weight(state).to_local().mul_(0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("change", "again"), [
    (lambda state: None, False),
    (weight, False),
    (in_place, True),
    (of_the_local_part, True),
], ids=["nothing", "read", "in place", "of the local part"])  # fmt: skip
def test_a_step_goes_on_with_what_the_last_one_has_started(mesh, starts, change, again):
    step = made(mesh)
    state = step.shard(CASE.state())
    for _ in range(3):
        state, _ = step(state, *BATCH)
    assert len(starts) == 1
    change(state)
    state, _ = step(state, *BATCH)
    assert len(starts) == 1 + again


def test_another_state_starts_anew(mesh, starts):
    step = made(mesh)
    states = [step.shard(CASE.state()) for _ in range(2)]
    for turn in (0, 1, 1, 0):
        states[turn], _ = step(states[turn], *BATCH)
    assert len(starts) == 3


def test_a_batch_of_another_size_goes_on(mesh, starts):
    step = made(mesh)
    state = step.shard(CASE.state())
    for samples in (6, 3, 6):
        state, _ = step(state, *CASE.batch(samples))
    assert len(starts) == 1


def test_another_step_drops_what_was_started(mesh, starts):
    step = made(mesh)
    state = step.shard(CASE.state())
    state, _ = step(state, *BATCH)
    members = session_of(mesh).carried.members
    zt.shard_params(mesh)(lambda state, batch: (state, zt.pmean(batch[0].sum())))(state, *BATCH)
    assert session_of(mesh).carried is None
    assert all(member.future.work is None for member in members), "its messages have ended"
    step(state, *BATCH)
    assert len(starts) == 2


def test_a_program_that_is_closed_starts_anew(mesh, starts):
    step = made(mesh)
    state = step.shard(CASE.state())
    state, _ = step(state, *BATCH)
    members = session_of(mesh).carried.members
    step.compiled(state, *BATCH).close()
    assert all(member.future.work is None for member in members), "its messages have ended"
    step(state, *BATCH)
    assert len(starts) == 2


def test_a_process_ends_after_the_gathers_that_its_last_step_has_started(mesh, monkeypatch):
    """A slower rank needs them to end its own last step."""
    step = made(mesh)
    step(step.shard(CASE.state()), *BATCH)
    members = session_of(mesh).carried.members
    have_ended = []

    def destroy() -> None:
        have_ended.append(all(member.future.work is None for member in members))

    with monkeypatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", destroy)
        _end(os.getpid())
    assert have_ended == [True]


def test_a_program_that_has_not_run_forgets_what_another_one_has_started(mesh, starts):
    step = made(mesh)
    state = step.shard(CASE.state())
    state, _ = step(state, *BATCH)
    step.lower(state, *BATCH).compile().close()
    step(state, *BATCH)
    assert len(starts) == 2


def test_a_step_that_fails_leaves_nothing(mesh, starts, monkeypatch):
    step = made(mesh)
    state = step.shard(CASE.state())
    state, _ = step(state, *BATCH)

    def fail(self, *members):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Start, "forward", fail)
        step(state, *BATCH)
    assert session_of(mesh).carried is None


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # Inductor's own modules
def test_a_program_of_inductor_takes_what_was_started(mesh, starts):
    step = made(mesh)
    state = step.shard(CASE.state())
    compiled = step.lower(state, *BATCH).compile(backend="inductor")
    for _ in range(3):
        state, _ = compiled(state, *BATCH)
    assert len(starts) == 1


def test_ranks_that_do_not_go_on_alike_disagree(mesh):
    step = made(mesh)
    state = step.shard(CASE.state())
    compiled = step.compiled(state, *BATCH)
    state, _ = compiled(state, *BATCH)
    contract = compiled.binding.local_program.contract
    terms = partial(contract.terms, [torch.zeros(())] * len(compiled.graph.inputs), 1)
    text = contract.explain(
        mesh,
        {0: terms(uses_carried=True), 2: terms(uses_carried=False), 3: terms(uses_carried=True)},
    )
    assert text == (
        "  On ranks 0, 3 the step begins with gathers that the step before has started, as "
        "prefetch(across_steps=True) says. On rank 2 it has another state, or one that has changed since.\n"
        "Change the state between the same two steps on all ranks. The next call starts these gathers again on all of "
        "them."
    )
