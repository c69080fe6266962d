"""With cast_ahead, updates write the half-precision weights of the next step, which never reads an old copy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.fake_cuda import FakeCuda
from tests.support.runners import FunctionRunner
from tests.support.worlds import clone
from ztrans import backends
from ztrans.ir.op_facts import CAST
from ztrans.planning import early_updates
from ztrans.runtime.cuda.graph_capture import Capture
from ztrans.runtime.cuda.half_gradients import half_gradients
from ztrans.runtime.cuda.half_weights import with_half_weights
from ztrans.runtime.inductor.backend import KernelCall

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
OPTIMIZERS = {
    "adamw": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
    "adam": lambda params: optim.Adam(params, lr=0.01, fused=True),
}


def lifted(name="adamw", dtype=torch.bfloat16, change=None, by_hand=False):
    """A step under autocast, or with casts of its own; it returns the weights' copies of its first layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4, bias=False))
    optimizer = OPTIMIZERS[name](model.parameters())

    halves = []

    def forward(x):
        if by_hand:
            halves.append(model[2].weight.to(dtype))
            h = nn.functional.linear(x.to(dtype), model[0].weight.to(dtype))
            return nn.functional.linear(h, halves.pop() if by_hand != "returned" else halves[0])
        with torch.autocast("cpu", dtype):
            return model(x)

    def loop_step(x):
        y = forward(x)
        loss = y.float().square().mean()
        loss.backward()
        optimizer.step()
        if change is not None:
            change(model)
        optimizer.zero_grad()
        return loss, y, halves.pop() if halves else None

    return zt.lift(loop_step, model, optimizer)


def lowered(*args, **kwargs):
    step, state = lifted(*args, **kwargs)
    return zt.Step.of(step).lower(state, X), state


def rewritten(graph):
    """The program of a state on a GPU."""
    tensors = [torch.empty(v.shape, dtype=v.dtype) for v in graph.inputs]
    return with_half_weights(half_gradients(graph, set(graph.inputs)), tensors)


def casts_of_weights(graph) -> int:
    state = graph.state
    return sum(
        e.op is CAST and e.out.dtype != torch.float32 and e.ins[0] in state for e in graph.eqns
    )


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(backends, "inputs_on_gpu", lambda graph, inputs: set(graph.inputs))


def copies(run) -> list[torch.Tensor]:
    return run.binding.local_program.half_weights[0].copies


def weights(state) -> list[torch.Tensor]:
    return [state["params"][name] for name in ("0.weight", "0.bias", "2.weight")]


def counted(run, monkeypatch) -> list[int]:
    """The numbers of casts of each later step, while it runs."""
    numbers = []
    (half_weights,) = run.binding.local_program.half_weights
    refresh = half_weights.refresh

    def counting(inputs):
        before = [x._version for x in half_weights.copies]
        refresh(inputs)
        numbers.append(sum(x._version != v for x, v in zip(half_weights.copies, before)))

    monkeypatch.setattr(half_weights, "refresh", counting)
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [False, True], ids=["autocast", "casts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_casts_of_weights_vanish(name, dtype, by_hand):
    before = lowered(name, dtype, by_hand=by_hand)[0].graph
    after, half_weights = rewritten(before)
    count = 2 if by_hand else 3
    assert (casts_of_weights(before), casts_of_weights(after)) == (count, 0)
    assert (
        after.num_state == before.num_state + count
        and len(after.inputs) == len(before.inputs) + count
    )
    assert [before.inputs[i].shape for i in half_weights.positions] == [
        x.shape for x in half_weights.copies
    ]
    assert {x.dtype for x in half_weights.copies} == {dtype}
    suffix = "bf16" if dtype == torch.bfloat16 else "fp16"
    assert f"[params.0.weight.{suffix}]" in str(after)


def check_equal_steps(subjects, states, step) -> None:
    """Take a step with each subject, from its own state; parameters and outputs must have the same bits."""
    results = []
    for k, run in enumerate(subjects):
        states[k], output = run(states[k], X)
        results += [[*states[k]["params"].values(), *output[:2]]]
    assert all(map(torch.equal, *results)), step


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # to compile imports Inductor
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits(name, backend, on_gpu, monkeypatch):
    """State and outputs, step by step; after the first step nothing is cast."""
    program, state = lowered(name)
    subjects = [program.compile(backend=backend, cast_ahead=ahead) for ahead in (False, True)]
    states = [clone(state), clone(state)]
    numbers = None
    for step in range(4):
        check_equal_steps(subjects, states, step)
        (half_weights,) = subjects[1].binding.local_program.half_weights
        leaves = pytree.tree_leaves(states[1])
        assert len(half_weights.copies) == (3 if backend == "eager" else 2)
        for place, copy in zip(half_weights.positions, half_weights.copies):
            assert torch.equal(copy, leaves[place].bfloat16())
        numbers = numbers if numbers is not None else counted(subjects[1], monkeypatch)
    assert numbers == [0, 0, 0]
    assert "half_weights" not in repr(subjects[1]) and "cast_ahead=True" in repr(subjects[1])


def test_the_memory_of_a_compiled_step_has_its_copies(on_gpu):
    program, state = lowered()
    plain, ahead = (program.compile(cast_ahead=cast) for cast in (False, True))
    assert ahead.memory_analysis() == program.memory_analysis(), "before the first call"
    for run in (plain, ahead):
        run(clone(state), X)
    nbytes = sum(2 * w.numel() for w in weights(state))
    before, after = plain.memory_analysis(), ahead.memory_analysis()
    assert after.state == before.state + nbytes
    assert nbytes == sum(x.nbytes for x in copies(ahead))
    assert min(after.live) >= after.state


ELEMENTWISE = {
    "adamw, foreach": lambda params: optim.AdamW(params, lr=0.01, foreach=True, fused=False),
    "sgd, nesterov": lambda params: optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, fused=False
    ),
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_kernels_of_inductor_write_copies_too(name, monkeypatch):
    """On a CPU: with the same bits, and a kernel less, because the update has the cast in its own."""
    monkeypatch.setitem(OPTIMIZERS, name, ELEMENTWISE[name])
    program, state = lowered(name)
    subjects = [program.compile(backend="inductor", cast_ahead=ahead) for ahead in (False, True)]
    states = [clone(state), clone(state)]
    for step in range(4):
        check_equal_steps(subjects, states, step)
        if step == 0:
            numbers = counted(subjects[1], monkeypatch)
    assert numbers == [0, 0, 0] and len(copies(subjects[1])) == 3
    assert all(map(torch.equal, copies(subjects[1]), (w.bfloat16() for w in weights(states[1]))))
    graphs = [run.binding.local_program.lowered.graph for run in subjects]
    assert [casts_of_weights(graph) for graph in graphs] == [3, 0]
    calls = [run.binding.local_program.runner.executable.program.graph.nodes for run in subjects]
    kernels = [sum(isinstance(n.target, KernelCall) for n in nodes) for nodes in calls]
    casts = [sum(n.target is CAST for n in nodes) for nodes in calls]
    assert kernels[1] + casts[1] < kernels[0] + casts[0]


@pytest.fixture
def mesh_of_one():
    yield zt.make_mesh("cpu", dp=1)
    dist.destroy_process_group()


def test_updates_during_backward_write_copies_too(on_gpu, monkeypatch, mesh_of_one):
    """On a mesh of one, with DTensors. An update that comes before a reader of the old weight leaves its cast."""
    monkeypatch.setattr(early_updates, "_TOGETHER", 0)
    results = []
    for update in ("last", "eager"):
        step, state = lifted()
        early = zt.chain(zt.shard_params(mesh_of_one), zt.overlap_grads(update=update))(
            zt.Step.of(step)
        )
        run = early.lower(early.shard(state), X).compile(cast_ahead=update == "eager")
        tensors = early.shard(state)
        for _ in range(3):
            tensors, output = run(tensors, X)
        results.append([*early.unshard(tensors)["params"].values(), *output[:2]])
    assert all(map(torch.equal, *results))
    assert run.lowered.plan.update == "eager" and len(copies(run)) >= 2


def test_without_inductor_an_elementwise_update_keeps_its_casts(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "adamw, foreach", ELEMENTWISE["adamw, foreach"])
    assert rewritten(lowered("adamw, foreach")[0].graph)[1] is None


def changed_in_place(state, program):
    with torch.no_grad():
        state["params"]["0.weight"].mul_(0.5)
    return state


def changed_through_a_view(state, program):
    state["params"]["0.weight"].detach()[2:4].zero_()
    return state


def replaced(state, program):
    state["params"]["0.weight"] = state["params"]["0.weight"].detach() * 0.5
    return state


def other_memory(state, program):
    state["params"]["0.weight"].data = state["params"]["0.weight"].detach() * 0.5
    return state


def by_another_program(state, program):
    """Whose kernels, as those of Inductor and of a replay, do not count what they write."""
    other = program.compile()
    other(clone(state), X)
    local = other.binding.local_program

    def uncounted(inputs):
        with torch.autograd._unsafe_preserve_version_counter(tuple(inputs)):
            return local.runner(inputs)

    other.binding.local_program = local._replace(runner=FunctionRunner(uncounted))
    return other(state, X)[0]


CHANGES = {
    changed_in_place: 1,
    changed_through_a_view: 1,
    replaced: 1,
    other_memory: 1,
    by_another_program: 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_changed_weight_is_cast_again(change, on_gpu, monkeypatch):
    program, state = lowered()
    plain, run = program.compile(), program.compile(cast_ahead=True)
    mine, true = clone(state), clone(state)
    for step in range(4):
        if step == 2:
            numbers = counted(run, monkeypatch)
            mine, true = change(mine, program), change(true, program)
        mine, ours = run(mine, X)
        true, theirs = plain(true, X)
        assert all(map(torch.equal, ours[:2], theirs[:2]))
        assert all(map(torch.equal, mine["params"].values(), true["params"].values()))
    assert numbers == [CHANGES[change], 0]


def test_two_states_in_turns(on_gpu, monkeypatch):
    program, state = lowered()
    plain, run = program.compile(), program.compile(cast_ahead=True)
    mine = [clone(state), clone(state)]
    true = [clone(state), clone(state)]
    for step, k in enumerate([0, 1, 1, 0, 0, 1]):
        if step == 1:
            numbers = counted(run, monkeypatch)
        batch = X * (k + 1)
        mine[k], ours = run(mine[k], batch)
        true[k], theirs = plain(true[k], batch)
        assert all(map(torch.equal, ours[:2], theirs[:2])), step
    assert numbers == [3, 0, 3, 0, 3]


def test_two_programs_of_one_state(on_gpu):
    """Programs of two batch sizes have copies of their own, and notice what the other has written."""
    program, state = lowered()
    small = zt.Step.of(lifted()[0]).lower(state, X[:2])
    plain, run = program.compile(), program.compile(cast_ahead=True)
    plain_small, run_small = small.compile(), small.compile(cast_ahead=True)
    mine, true = clone(state), clone(state)
    for ours, theirs, batch in [(run, plain, X), (run_small, plain_small, X[:2])] * 3:
        mine, output = ours(mine, batch)
        true, wanted = theirs(true, batch)
        assert all(map(torch.equal, output[:2], wanted[:2]))


def test_after_a_failed_step_all_weights_are_cast(on_gpu, monkeypatch):
    program, state = lowered()
    run = program.compile(cast_ahead=True)
    state, _ = run(state, X)
    numbers = counted(run, monkeypatch)
    local = run.binding.local_program

    def failing(inputs):
        raise ValueError("no more")

    run.binding.local_program = local._replace(runner=FunctionRunner(failing))
    with pytest.raises(ValueError, match="no more"):
        run(state, X)
    run.binding.local_program = local
    state, _ = run(state, X)
    state, _ = run(state, X)
    assert numbers == [0, 3, 0]


def test_close_forgets_the_casts(on_gpu, monkeypatch):
    """So it makes right what the counter does not see, as a write through `.data`."""
    program, state = lowered()
    plain, run = program.compile(), program.compile(cast_ahead=True)
    mine, true = clone(state), clone(state)
    mine, _ = run(mine, X)
    true, _ = plain(true, X)
    numbers = counted(run, monkeypatch)
    for each in (mine, true):
        each["params"]["0.weight"].data.mul_(0.5)
    run.close()
    mine, ours = run(mine, X)
    true, theirs = plain(true, X)
    assert numbers == [3] and all(map(torch.equal, ours[:2], theirs[:2]))


@pytest.mark.slow
def test_a_replay_reads_the_copies(on_gpu):
    """The graph holds their addresses. A changed weight is cast before the replay."""
    program, state = lowered()
    plain, run = program.compile(), program.compile(cast_ahead=True)
    mine, true = clone(state), clone(state)
    mine, _ = run(mine, X)
    true, _ = plain(true, X)
    local = run.binding.local_program
    cuda = FakeCuda()
    capture = Capture(local.runner, local.lowered.graph, cuda, "cpu")
    run.binding.local_program = local._replace(runner=capture)
    for step in range(5):
        if step == 3:
            mine, true = changed_in_place(mine, program), changed_in_place(true, program)
        mine, ours = run(mine, X)
        true, theirs = plain(true, X)
        assert all(map(torch.equal, ours[:2], theirs[:2])), step
        assert all(map(torch.equal, copies(run), (w.bfloat16() for w in weights(mine)))), step
    assert cuda.graphs[0].replays == 4


def test_a_profile_has_the_copies(on_gpu):
    program, state = lowered()
    run = program.compile(cast_ahead=True)
    state, _ = run(state, X)
    run.profile(state, X, steps=1)
    plain = program.compile()
    true = clone(state)
    assert all(map(torch.equal, run(state, X)[1][:2], plain(true, X)[1][:2]))


def clamped(model):
    with torch.no_grad():
        model[0].weight.clamp_(-0.01, 0.01)


def test_only_the_last_value_of_a_weight_is_written():
    """A weight that the step changes after its update keeps its cast."""
    after, half_weights = rewritten(lowered(change=clamped)[0].graph)
    assert casts_of_weights(after) == 1
    assert [x.shape for x in half_weights.copies] == [(16,), (4, 16)]


def test_an_update_that_reads_the_cast_keeps_it():
    """It would write the new copy while it reads the old one."""

    def minus_rounded(w, x):
        return w - w.bfloat16(), x * 2

    w, x = torch.randn(8), torch.randn(())
    graph = zt.Step.of(minus_rounded).lower(w, x).graph

    def rounded_first(w, x):
        return w - w.bfloat16().sum() * x, x * 2

    assert with_half_weights(graph, [w, x], fuses=True)[1] is None
    earlier = zt.Step.of(rounded_first).lower(w, x).graph
    assert len(with_half_weights(earlier, [w, x], fuses=True)[1].copies) == 1


def test_a_cast_that_is_returned_stays():
    """The update would write over it."""
    after, half_weights = rewritten(lowered(by_hand="returned")[0].graph)
    assert casts_of_weights(after) == 1 and [x.shape for x in half_weights.copies] == [(16, 8)]


@pytest.mark.slow
def test_what_stays_as_it_is():
    """Programs without half precision, of micro-batches, of a mesh; and a state that is not on a GPU."""
    program, state = lowered(dtype=torch.float32, by_hand=True)
    assert rewritten(program.graph) == (
        half_gradients(program.graph, set(program.graph.inputs)),
        None,
    )
    step, state = lifted()
    of_micro = zt.accumulate(5)(zt.Step.of(step)).lower(state, X).graph
    assert rewritten(of_micro)[1] is None
    for stage in (0, 3):
        sharded = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)(zt.Step.of(step))
        assert rewritten(sharded.lower(state, X[:4]).graph)[1] is None
    run = lowered()[0].compile(cast_ahead=True)
    run(clone(state), X)
    assert run.binding.local_program.half_weights == []
