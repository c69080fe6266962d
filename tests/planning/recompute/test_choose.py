"""What backward recomputes: the model against planned programs, the choice against the bound by cuts."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ztrans as zt
from benchmarks.frontier_models import gpt, llama
from benchmarks.llama_model import Config
from ztrans.ir.graph import Var
from ztrans.ir.recompute import recompute
from ztrans.planning.cluster import cluster
from ztrans.planning.recompute.bound import least_seconds
from ztrans.planning.recompute.choose import Effort, choose, choose_least, classes
from ztrans.planning.recompute.ladder import model_of_step
from ztrans.planning.recompute.model import NEVER, Computation, Model, Residency, Value

aten = torch.ops.aten
MACHINES = cluster("h100", dp="nvlink4")
SHARES = (0.8, 0.65, 0.5, 0.38)
SMALL = Config(width=512, heads=8, kv_heads=2, hidden=1536, vocab=1024)
STEPS = {
    "gpt": gpt,
    "llama": lambda: llama(layers=4, sequence=1024, config=SMALL),
}


def lowered(traced, graph):
    shard = zt.shard_params(zt.AbstractMesh(dp=8))
    transforms = (shard, zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())
    program = dataclasses.replace(traced.program, graph=graph)
    stage = dataclasses.replace(traced, program=program, transforms=transforms)
    return stage.in_own_order(MACHINES).hinted


@functools.cache
def step(name):
    """A traced step, and its model."""
    make, state, batch = STEPS[name]()
    traced = zt.Step.of(make).trace(state, *batch)
    graph = traced.graph.with_hints(recompute_at_least=0)
    return traced, model_of_step(graph, lowered(traced, graph), MACHINES)


def target(model, share: float) -> float:
    """A share of the activations: of what exceeds the bytes that are live at the beginning."""
    return model.live[0] + share * (model.live.max() - model.live[0])


@pytest.mark.parametrize("name", STEPS)
def test_the_model_has_the_bytes_of_the_rewritten_program(name):
    traced, model = step(name)
    activations = model.live.max() - model.live[0]
    for share in (0.8, 0.5):
        chosen = choose(model, target(model, share))
        values = {model.values[v].var for v in chosen.recomputed()}
        program = recompute(traced.graph, values)
        true = model_of_step(program, lowered(traced, program), MACHINES).live.max()
        assert abs(chosen.peak - true) < 0.02 * activations


@pytest.mark.parametrize("name", STEPS)
def test_the_added_seconds_are_near_the_bound_by_cuts(name):
    """Within the seconds of one largest candidate, because a choice cannot take half of it."""
    _, model = step(name)
    largest = max(c.seconds for c in model.computations if c.droppable)
    for share in SHARES:
        limit = target(model, share)
        chosen = choose(model, limit)
        places = (int(model.live.argmax()), int(chosen.live.argmax()))
        bound = least_seconds(model, limit, places)
        assert chosen.peak <= limit
        assert bound <= chosen.seconds * (1 + 1e-6)
        assert chosen.seconds <= 1.12 * bound + largest, share


def test_the_last_block_keeps_its_products():
    """Its backward runs at the peak, so nothing is won there."""
    _, model = step("gpt")
    half = choose(model, target(model, 0.5))
    gelus = gelus_of(model)
    last_block = gelus[-2] + 3  # after the second product and the sum of the block before it
    repeated = {model.computations[i].eqn.op for i in half.repeated if i >= last_block}
    assert repeated.isdisjoint([aten.mm.default, aten.addmm.default])


def test_the_first_blocks_go_first():
    _, model = step("gpt")
    little = choose(model, target(model, 0.8))
    gelus = gelus_of(model)
    repeated = [i for i in gelus if i in little.repeated]
    assert repeated == gelus[: len(repeated)]


def gelus_of(model) -> list[int]:
    return [i for i, c in enumerate(model.computations) if c.eqn.op is aten.gelu.default]


def test_equal_layers_are_one_class():
    _, model = step("gpt")
    sizes = [len(members) for members in classes(model)]
    gelus = [i for i, c in enumerate(model.computations) if c.eqn.op is aten.gelu.default]
    assert any(set(gelus[1:]) <= set(members) for members in classes(model))
    assert len(sizes) < len(model.computations) / 2


def test_a_choice_takes_few_moves():
    """Counted, not timed: about two moves are weighed for each that is made, and a few for each class."""
    _, model = step("gpt")
    effort = Effort()
    choose(model, target(model, 0.5), effort)
    assert effort.made <= len(model.computations)
    assert effort.weighed <= 8 * (effort.made + len(classes(model)))


def test_the_least_peak_is_below_every_target_that_is_reached():
    _, model = step("gpt")
    least = choose_least(model)
    for share in (0.5, 0.3, 0.2, 0.1):
        chosen = choose(model, target(model, share))
        assert least.peak <= chosen.peak


# Small programs, in which all choices can be tried.


def small_model(seconds, sizes, reads, backward) -> Model:
    """A chain of values, each computed from some before it; backward reads them in the opposite order."""
    count = len(seconds)
    end = 2 * count
    values = []
    computations = []
    readers: list[list[int]] = [[] for _ in range(count)]
    live = np.zeros(end, dtype=np.int64)
    for i in range(count):
        for v in reads[i]:
            readers[v].append(i)
        eqn = zt.ir.Eqn(aten.relu.default, (), (Var(f"v{i}", torch.float32, (sizes[i],)),))
        computations.append(Computation(eqn, seconds[i], tuple(reads[i]), (i,), (i,)))
    for i in range(count):
        forward = max([i, *readers[i]])
        place = end - 1 - i if backward[i] else NEVER
        last = place if backward[i] else -1
        eqn = computations[i].eqn
        values.append(Value(eqn.out, sizes[i], i, forward, place, last, True))
        live[i : max(forward, last) + 1] += sizes[i]
    return Model(tuple(values), tuple(computations), tuple(map(tuple, readers)), live)


@st.composite
def small_models(draw):
    count = draw(st.integers(2, 8))
    reads = [[]]
    for i in range(1, count):
        reads.append(sorted(draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=2))))
    whole = lambda a, b: draw(st.lists(st.integers(a, b), min_size=count, max_size=count))
    backward = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return small_model([1e-6 * n for n in whole(1, 9)], whole(1, 9), reads, backward)


def every_choice(model):
    count = len(model.computations)
    for size in range(count + 1):
        for repeated in itertools.combinations(range(count), size):
            yield Residency(model, repeated)


@settings(max_examples=60, deadline=None)
@given(model=small_models(), share=st.floats(0.3, 1.0))
def test_no_choice_is_below_the_bound_and_the_greedy_one_is_among_them(model, share):
    limit = share * model.live.max()
    fits = [choice.seconds for choice in every_choice(model) if choice.peak <= limit]
    bound = least_seconds(model, limit, range(len(model.live) // 2, len(model.live)))
    if fits:
        assert bound <= min(fits) + 1e-9
    chosen = choose(model, limit)
    if chosen.peak <= limit:
        assert min(fits) <= chosen.seconds + 1e-12


@settings(max_examples=60, deadline=None)
@given(model=small_models(), order=st.randoms(use_true_random=False))
def test_moves_add_up_and_can_be_taken_back(model, order):
    """The bytes, places and seconds after any moves are those of the choice made at once."""
    residency = Residency(model)
    for _ in range(6):
        i = order.randrange(len(model.computations))
        residency.apply(residency.move({i: i not in residency.repeated}))
        at_once = Residency(model, sorted(residency.repeated))
        assert (residency.live == at_once.live).all()
        assert residency.first == at_once.first and residency.last == at_once.last
        assert abs(residency.seconds - at_once.seconds) < 1e-12
