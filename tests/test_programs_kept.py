"""The programs that a step keeps: how many there are, which go first, and what they hold."""

import gc
import sys
import weakref

import pytest
import torch
from torch import fx

import ztrans as zt
from tests.support.lifted import batch, lifted
from ztrans import program_cache
from ztrans.compiled import Compiled
from ztrans.ir.graph import Graph
from ztrans.planning.solver import search


def train_step(state, x):
    return {"w": state["w"] - 0.1 * x.mean(0)}, (x @ state["w"]).sum()


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(x) is kind for x in gc.get_objects())


@pytest.mark.parametrize(("most", "shapes"), [
    (16, 50),
    pytest.param(program_cache.MOST_PROGRAMS, 200, marks=pytest.mark.exhaustive),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:train_step has")
def test_many_batch_shapes_hold_their_memory(most, shapes, monkeypatch):
    monkeypatch.setattr(program_cache, "MOST_PROGRAMS", most)
    step = zt.Step.of(train_step)
    state = {"w": torch.zeros(3)}
    before = alive(Compiled), alive(Graph), alive(fx.GraphModule)
    counts = []
    for rows in range(1, shapes + 1):
        x = torch.full((rows, 3), 2.0)
        expected = train_step(state, x)[1]
        state, out = step(state, x)
        assert torch.equal(out, expected)
        if rows in (shapes // 2, shapes):
            now = alive(Compiled), alive(Graph), alive(fx.GraphModule)
            counts.append([after - first for first, after in zip(before, now)])
    assert len(step._cache) == most
    assert counts[0] == counts[1]
    compiled, graphs, modules = counts[1]
    assert compiled == most
    assert graphs <= 4 * compiled and modules <= compiled


@pytest.mark.filterwarnings("ignore:train_step has")
def test_the_program_that_was_not_used_for_longest_goes_first(monkeypatch):
    monkeypatch.setattr(program_cache, "MOST_PROGRAMS", 4)
    step = zt.Step.of(train_step)
    state = {"w": torch.zeros(3)}

    def call(rows: int) -> bool:
        """Whether a call with so many rows needs a new program."""
        nonlocal state
        before = set(map(id, step._cache.values()))
        state, _ = step(state, torch.ones(rows, 3))
        return bool(set(map(id, step._cache.values())) - before)

    assert all(call(rows) for rows in (1, 2, 3, 4))
    assert not call(2)
    assert call(5) and not call(2) and not call(4), "3 has gone"
    assert call(3) and not call(4) and not call(2), "5 has gone"
    assert not call(1), "the first one stays: the ranks have agreed on its plan"
    assert len(step._cache) == 4


@pytest.mark.filterwarnings("ignore:scaled has")
def test_of_programs_that_differ_otherwise_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(program_cache, "MOST_PROGRAMS", 3)

    def scaled(state, x, name):
        return state, x.sum() * len(name)

    step = zt.Step.of(scaled)
    state = {"w": torch.zeros(3)}
    for k in range(1, 6):
        assert step(state, torch.ones(2), "n" * k)[1] == 2 * k
        assert step(state, torch.ones(3), "n" * k)[1] == 3 * k
    names = [
        compiled.lowered.recording.signature.leaves[-1].abstract.value
        for compiled in step._cache.values()
    ]
    assert names == ["nnn", "nnnn", "nnnnn"], "of each, the program for the size that came first"
    assert step(state, torch.ones(2), "n")[1] == 2, "it is made again"


def test_a_step_keeps_no_fx_graph_and_no_history():
    _, _, plain, state = lifted()
    step = zt.Step.of(plain)
    lowered = step.lower(state, batch(0))
    state, _ = step(state, batch(0))
    compiled = step.compiled(state, batch(0))
    assert compiled.lowered.traced.graph is not None
    assert [name for name, _ in compiled.lowered.history] == ["lower"]
    with pytest.raises(ValueError, match=r"Trace it again: step.trace\(state, \*batch\).fx"):
        _ = compiled.lowered.traced.fx
    compiled = lowered.compile()
    assert [name for name, _ in compiled.lowered.history] == ["lower"]
    assert lowered.history[0][0] == "make_fx" and lowered.traced.fx.code, "what you hold has all"
    module = weakref.ref(lowered.traced.fx)
    del lowered
    gc.collect()
    assert module() is None


def test_a_program_of_a_step_is_planned_again():
    """`tune` plans from the program as written, which a step keeps."""
    mesh = zt.make_mesh("cpu", dp=1)
    _, _, plain, state = lifted()
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(plain)
    state, _ = step(step.shard(state), batch(0))
    step.tune(state, batch(0), steps=1)
    assert len(step._cache) == 1
    assert [name for name, _ in step._cache.values()[0].lowered.history] == ["lower"]
    torch.distributed.destroy_process_group()


def test_planning_keeps_no_program():
    """What analyses of plans found goes with the program."""
    lowered = zt.chain(zt.shard_params(zt.AbstractMesh(dp=4)), zt.overlap_grads(), zt.prefetch())(
        lifted()[2]
    ).lower(lifted()[3], batch(0))
    programs = [weakref.ref(lowered.graph), weakref.ref(lowered.unordered)]
    del lowered
    gc.collect()
    assert [program() for program in programs] == [None, None]


def test_an_equal_problem_is_searched_once(monkeypatch):
    searched = []
    searches = search._searched
    monkeypatch.setattr(search, "_searched", lambda *args: searched.append(args) or searches(*args))
    search._placed.clear()

    def lower(rows: int) -> str:
        transforms = zt.shard_params(zt.AbstractMesh(dp=4)), zt.overlap_grads(), zt.prefetch()
        _, _, step, state = lifted()
        return str(zt.chain(*transforms)(step).lower(state, torch.randn(rows, 7)))

    first = lower(8)
    count = len(searched)
    assert count and lower(8) == first and len(searched) == count
    lower(12)
    assert len(searched) == 2 * count


def interrupted_at(line: int, function, *args) -> bool:
    """Call a function, and raise an interrupt before its line number `line`; whether it has so many lines."""
    left = line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code is not function.__code__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_while_a_program_is_looked_up_does_not_lose_it():
    """This rank alone would then trace a new one, and the ranks would refuse each other's calls."""
    step = zt.Step.of(train_step)
    state = {"w": torch.zeros(3)}
    step(state, torch.ones(2, 3))
    (compiled,) = step._cache.values()
    signature = compiled.lowered.recording.signature
    line = 1
    while interrupted_at(line, program_cache.ProgramCache.get, step._cache, signature):
        assert step._cache.values() == [compiled], line
        line += 1
    assert line > 5
