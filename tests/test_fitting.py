"""What fits a limit of memory: the stage that is chosen, the ways that an error names, several limits."""

import dataclasses
import functools
import gc
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, grad_and_value

import ztrans as zt
from tests.support.worlds import clone
from ztrans import fitting
from ztrans.fitting import EQUAL, fastest_within, pattern_of_moments
from ztrans.planning.devices import H100
from ztrans.planning.limit import DoesNotFit

MESH = zt.AbstractMesh(dp=4)
PLANNED = (zt.overlap_grads(), zt.prefetch())


def loss(params, x):
    for w in params.values():
        x = F.gelu(x @ w)
    return x.square().mean()


def step(params, x):
    grads = grad(loss)(params, x)
    return {k: p - 0.1 * grads[k] for k, p in params.items()}, None


def arguments(layers: int, width: int, rows: int):
    return {f"w{i}": torch.zeros(width, width) for i in range(layers)}, torch.zeros(rows, width)


WIDE = (5, 512, 64)  # layers, width, rows: here parameters take the memory
ROOMY, MIDDLE, TIGHT = (
    1 << 30,
    8_500_000,
    7_500_000,
)  # all stages fit, one is tight, one does not fit
LONG = (4, 64, 1024)  # and here activations


def within(memory: int):
    """A cluster of GPUs on which a step may have this much live."""
    figures = {
        "launch_overhead": 0.0,
        "edge": 0.0,
        "streaming": 1.0,
        "kernel_gap": 4e-6,
    }  # not those of H100s
    gpu = dataclasses.replace(H100, name="small", memory=memory, reserve=0, **figures)
    return zt.cluster(gpu, dp="nvlink4")


@functools.cache
def lower(sizes, stage, memory: int, *more: zt.Transform):
    shard = zt.shard_params(MESH, stage=stage)
    step_on_ranks = zt.chain(shard, *PLANNED, *more)(step)
    return step_on_ranks.lower(*arguments(*sizes), cluster=within(memory))


@functools.cache
def refused(sizes, stage, memory: int, *more: zt.Transform) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as caught:
        lower(sizes, stage, memory, *more)
    return caught.value


# The stage.


@pytest.mark.slow
def test_the_lowest_of_the_fastest_stages_that_fit_is_chosen():
    """With room for all gathered parameters the stages are equally fast. With less, stage 1 fits and is slower."""
    for memory, expected in ((ROOMY, 1), (MIDDLE, 3)):
        seconds = {s: lower(WIDE, s, memory).timeline().seconds for s in (1, 2, 3)}
        fast = [s for s in seconds if seconds[s] <= min(seconds.values()) * (1 + EQUAL)]
        assert lower(WIDE, "auto", memory).graph.zero_stage == min(fast) == expected
    assert lower(WIDE, "auto", TIGHT).graph.zero_stage == 3, "the others do not fit"


def test_the_notes_of_the_plan_have_the_time_and_the_peak_of_every_stage():
    tight, middle = lower(WIDE, "auto", TIGHT), lower(WIDE, 1, MIDDLE)

    def takes(lowered) -> str:
        seconds, peak = lowered.timeline().seconds, lowered.memory_analysis().peak
        return f"{seconds * 1e6:.2f} us a step, peak {peak / 2**20:.2f} MiB"

    assert tight.plan.notes[:3] == (
        "not chosen: shard_params(axis='dp', stage=1): it needs 7.50 MiB",
        "not chosen: shard_params(axis='dp', stage=2): it needs 7.50 MiB",
        f"chosen: shard_params(axis='dp', stage=3): {takes(tight)}",
    )
    assert tight.plan.notes[2] in str(tight.plan)
    first = lower(WIDE, "auto", MIDDLE).plan.notes[0]
    assert first == f"not chosen: shard_params(axis='dp', stage=1): {takes(middle)}"


def test_the_program_is_that_of_the_chosen_stage():
    tight = lower(WIDE, "auto", TIGHT)
    assert str(tight) == str(lower(WIDE, 3, TIGHT))
    assert "shard_params(axis='dp', stage=3)" in tight.graph.transforms
    assert dict(tight.history)["shard_params"].zero_stage == 3


def test_an_open_stage_is_an_option_like_any_other():
    shard = zt.shard_params(MESH, stage="auto")
    assert repr(shard) == "shard_params(axis='dp', stage='auto')"
    assert shard(shard(step)) == shard(step)
    reordered = zt.chain(shard, *reversed(PLANNED))(step)
    again = reordered.lower(*arguments(*WIDE), cluster=within(TIGHT))
    assert str(again) == str(lower(WIDE, "auto", TIGHT))


@pytest.mark.parametrize("memory, stage", [(ROOMY, 1), (TIGHT, 3)])
def test_the_chosen_stage_computes_what_the_plain_step_computes(memory, stage):
    torch.manual_seed(0)
    state, x = arguments(*WIDE)
    state = {k: torch.randn_like(w) / 16 for k, w in state.items()}
    batches = [(part,) for part in torch.randn(4 * len(x), x.shape[1]).chunk(4)]
    chosen = lower(WIDE, "auto", memory)
    assert chosen.graph.zero_stage == stage
    new, _ = chosen.lockstep(clone(state), batches)
    plain, _ = step(clone(state), torch.cat([x for (x,) in batches]))
    torch.testing.assert_close(new, plain)


def test_a_plan_is_for_the_stage_that_it_was_made_for(tmp_path):
    """A step with a plan, and one for another batch size, take that stage, whatever would be chosen now."""
    tight = lower(WIDE, "auto", TIGHT)
    tight.plan.save(tmp_path / "plan")
    plan = zt.Plan.load(tmp_path / "plan")
    chain = zt.chain(zt.shard_params(MESH, stage="auto"), *PLANNED)
    roomy = chain(step).lower(*arguments(*WIDE), cluster=within(ROOMY), plan=plan)
    assert roomy.graph.zero_stage == 3 and str(roomy) == str(tight)
    assert roomy.plan.notes[:3] == tight.plan.notes[:3]
    smaller = chain(step).trace(*arguments(5, 512, 8))
    assert smaller.lower(cluster=tight.cluster, plan=tight.plan, follow=True).graph.zero_stage == 3
    with pytest.raises(ValueError, match="it was made for program"):
        chain(step).lower(*arguments(4, 512, 64), plan=plan)


@pytest.mark.slow
def test_all_micro_batches_have_the_chosen_stage():
    """Stages 1 and 2 gather once for all micro-batches, so they are faster where they fit."""
    assert lower(WIDE, "auto", ROOMY, zt.accumulate(2)).graph.zero_stage == 1
    assert lower(WIDE, "auto", 10_000_000, zt.accumulate(2)).graph.zero_stage == 3


def test_stages_1_to_3_store_the_same_state():
    shards = [zt.shard_params(MESH, stage=stage) for stage in ("auto", 1, 2, 3)]
    shardings = [shard(step).leaf_shardings(arguments(*WIDE)[0]) for shard in shards]
    assert all(each == shardings[0] for each in shardings)


def test_a_program_cannot_be_rewritten_with_an_open_stage():
    shard = zt.shard_params(MESH, stage="auto")
    with pytest.raises(ValueError) as caught:
        shard.rewrite(zt.Step.of(step).trace(*arguments(*LONG)).graph)
    assert str(caught.value) == (
        "shard_params(axis='dp', stage='auto'): the stage is chosen by Step.lower. Name one to rewrite a program with "
        "it."
    )
    with pytest.raises(ValueError, match="ZeRO stages are 0, 1, 2 and 3, or 'auto'"):
        zt.shard_params(MESH, stage="all")


# The ways to fit.


@pytest.mark.slow
def test_the_error_says_what_fits_with_the_times_and_peaks_that_it_would_have():
    memory = 2_000_000
    error = refused(LONG, 1, memory)
    lines = str(error).splitlines()
    assert lines[0].startswith(
        "small: 1.91 MiB, its memory without the reserve of 0 B, is less than the step needs in any order tried: "
    )
    assert lines[6] == "It fits in one of these ways, as they were simulated:"
    added = {
        'zt.remat(memory="auto")': zt.remat(memory="auto"),
        'zt.offload(memory="auto")': zt.offload(memory="auto"),
        "zt.accumulate(2)": zt.accumulate(2),
    }
    assert [way.line for way in error.ways] == [*added], "the fastest comes first"
    for way, line in zip(error.ways, lines[7:]):
        lowered = lower(LONG, 1, memory, added[way.line])
        seconds, peak = lowered.timeline().seconds, lowered.memory_analysis().peak
        assert (way.seconds, way.peak) == (seconds, peak) and peak <= memory
        assert line == f"  {way.line}: {seconds * 1e6:.2f} us a step, peak {peak / 2**20:.2f} MiB"
    assert lines[10:] == [
        "Or take a smaller batch or another device: lower(cluster=zt.cluster(...)). If you know that more may be live, "
        "name the limit: zt.prefetch(memory=...)."
    ]


@pytest.mark.slow
def test_a_higher_stage_that_fits_is_named():
    (way,) = refused(WIDE, 1, TIGHT).ways
    assert way.line == "zt.shard_params(..., stage=3)"
    assert way.seconds == lower(WIDE, 3, TIGHT).timeline().seconds


def adam(state, x):
    grads, value = grad_and_value(loss)(state["params"], x)
    m = {k: 0.9 * state["m"][k] + 0.1 * g for k, g in grads.items()}
    v = {k: 0.99 * state["v"][k] + 0.01 * g * g for k, g in grads.items()}
    params = {k: p - 0.1 * m[k] / (v[k].sqrt() + 1e-8) for k, p in state["params"].items()}
    return {"params": params, "m": m, "v": v}, value


@pytest.mark.slow
def test_moments_on_the_host_are_named_by_a_pattern():
    params, x = arguments(4, 256, 32)
    state = {"params": params, "m": params, "v": params}
    moved = zt.offload(where="[mv].*", at_least=0)
    chain = zt.chain(zt.shard_params(MESH), *PLANNED)
    with pytest.raises(DoesNotFit) as caught:
        chain(adam).lower(state, x, cluster=within(1_500_000))
    (way,) = caught.value.ways
    assert way.line == "zt.offload(where='[mv].*', at_least=0)"
    lowered = moved(chain(adam)).lower(state, x, cluster=within(1_500_000))
    assert way.peak == lowered.memory_analysis().peak <= 1_500_000


def test_the_pattern_names_only_leaves_that_nothing_but_the_update_reads():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x):
        optimizer.zero_grad()
        value = model(x).square().mean()
        value.backward()
        optimizer.step()
        return value

    lifted, state = zt.lift(train, model, optimizer)
    traced = zt.Step.of(lifted).trace(state, torch.zeros(4, 8))
    assert pattern_of_moments(traced.graph) == "optimizer.*"
    assert pattern_of_moments(zt.Step.of(step).trace(*arguments(*LONG)).graph) == ""


@pytest.mark.slow
def test_more_micro_batches_than_the_step_has_are_named():
    lines = [way.line for way in refused(LONG, 3, 1_000_000, zt.accumulate(2)).ways]
    assert sorted(lines) == [
        "zt.accumulate(4)",
        'zt.offload(memory="auto")',
        'zt.remat(memory="auto")',
    ]


@pytest.mark.slow
def test_several_ways_are_combined_if_none_is_enough():
    """1023 rows cannot be cut into two micro-batches, and the host has no memory."""
    cluster = dataclasses.replace(within(1_350_000), host_memory=1)
    chain = zt.chain(zt.shard_params(MESH, stage=1), *PLANNED)
    with pytest.raises(DoesNotFit) as caught:
        chain(step).lower(*arguments(4, 64, 1023), cluster=cluster)
    (way,) = caught.value.ways
    assert way.line == 'zt.shard_params(..., stage=3) and zt.remat(memory="auto")'


@pytest.mark.slow
@pytest.mark.parametrize("memory", [1, 40_000])
def test_what_cannot_fit_has_no_ways(memory):
    error = refused(LONG, 3, memory)
    assert error.ways == () and "It fits" not in str(error)
    last = str(error).splitlines()[-1]
    assert last.startswith("Take a smaller batch or another device"), "no rank more makes room"


def test_a_limit_that_a_transform_names_has_ways_too():
    within_limit = zt.chain(
        zt.shard_params(MESH), zt.overlap_grads(), zt.prefetch(memory=2_000_000)
    )
    with pytest.raises(DoesNotFit) as caught:
        within_limit(step).lower(*arguments(*LONG), cluster=within(ROOMY))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(
        "prefetch(memory=2000000): 1.91 MiB is less than the step needs in any order tried: "
    )
    assert lines[7].startswith('  zt.remat(memory="auto"): ') and len(lines) > 8
    assert lines[-1] == "Or give it that much, or a smaller batch."


def test_more_ranks_are_named_if_they_can_help():
    """Each then has less of the state. Of what is whole on every rank, such as a gathered layer, it has as much."""
    state = 5 * 512 * 512  # the bytes of the parameters on each of 4 ranks
    least = refused(WIDE, 3, 1_000_000).least.peak
    text = str(refused(WIDE, 3, least - state // 2))
    assert "more ranks (2 times as many may be enough)" in text, "a rank then has half of the state"
    assert "more ranks" not in str(refused(WIDE, 3, least - 2 * state))
    assert "more ranks" not in str(refused(WIDE, 0, least - 1)), "no rank has only a part of it"


def head_loss(params, x, target):
    return F.cross_entropy(x @ params["head"], target)


def head_step(params, x, target):
    grads = grad(head_loss)(params, x, target)
    return {k: p - 0.1 * grads[k] for k, p in params.items()}, None


def test_tiles_of_a_wide_loss_are_named():
    chain = zt.chain(zt.shard_params(MESH), *PLANNED)
    state = {"head": torch.empty(32, 512, device="meta")}
    batch = torch.empty(1023, 32, device="meta"), torch.empty(1023, dtype=torch.int64)
    with pytest.raises(DoesNotFit) as caught:
        chain(head_step).lower(state, *batch, cluster=within(2_500_000))
    assert [way.line for way in caught.value.ways] == ['zt.tile(memory="auto")']
    tiled = zt.tile(memory="auto")(chain(head_step)).lower(state, *batch, cluster=within(2_500_000))
    assert caught.value.ways[0].peak == tiled.memory_analysis().peak <= 2_500_000


def test_moments_and_values_of_forward_go_to_the_host_by_one_line():
    moments, both = (
        zt.offload(where="m*", at_least=0),
        zt.offload(where="m*", at_least=0, memory="auto"),
    )
    error = refused(LONG, 1, 2_000_002)
    traced = zt.chain(zt.shard_params(MESH), moments)(step).trace(*arguments(*LONG))
    attempt = fitting.Attempt(traced.graph, traced.transforms, error)
    ((line, transforms),) = fitting._activations_on_host(attempt)
    assert line == "zt.offload(where='m*', memory='auto', at_least=0)" == f"zt.{both!r}"
    assert transforms[1:] == (both,)


def test_a_large_step_is_tried_in_a_few_ways(monkeypatch):
    """Each takes as long as to lower the step."""
    tried = []

    def fails(attempt, remedy, later_remedies, try_with):
        tried.append(remedy)
        return attempt._replace(remedies=later_remedies)

    monkeypatch.setattr(fitting, "_tried", fails)
    refused(LONG, 1, 2_000_003)
    everything = len(tried)
    tried.clear()
    monkeypatch.setattr(fitting, "_EQNS_TO_TRY", 1)
    refused(LONG, 1, 2_000_001)
    assert len(tried) == fitting._LEAST_TRIES < everything


def test_a_step_of_one_process_has_ways():
    state, x = arguments(*LONG)
    meta = {k: w.to("meta") for k, w in state.items()}, x.to("meta")
    with pytest.raises(DoesNotFit) as caught:
        zt.chain(zt.remat())(step).lower(*meta, cluster=within(1_000_000))
    assert [way.line for way in caught.value.ways] == ["zt.accumulate(4)"]


@pytest.mark.slow
def test_the_step_is_traced_again_with_the_autocast_of_the_caller():
    memory = 1_000_000
    with torch.autocast("cpu", torch.bfloat16):
        error = refused(LONG, 1, memory, zt.remat())
        micro = zt.chain(zt.shard_params(MESH, stage=1), *PLANNED, zt.remat(), zt.accumulate(2))(
            step
        )
        lowered = micro.lower(*arguments(*LONG), cluster=within(memory))
    assert "bf16" in str(lowered)
    assert lowered.memory_analysis().peak in [way.peak for way in error.ways]


def test_a_lowered_step_does_not_hold_the_arguments_of_its_call():
    state, x = arguments(*LONG)
    lowered = zt.chain(zt.shard_params(MESH), *PLANNED)(step).lower(state, x)
    batch = weakref.ref(x)
    del x
    gc.collect()
    assert batch() is None and lowered.traced.trace_again is None


# Several limits.


def traced(*transforms: zt.Transform) -> zt.stages.Traced:
    return zt.chain(zt.shard_params(MESH), *transforms)(step).trace(*arguments(*LONG))


def test_each_limit_has_the_fastest_program_that_fits_it():
    limits = [2_700_000, 1_400_000, 40_000, 2_000_000]
    frontier = traced(*PLANNED, zt.remat(memory="auto")).frontier(limits, cluster=within(ROOMY))
    assert frontier[2] is None
    recomputed = []
    times = []
    for limit, lowered in sorted((limit, each) for limit, each in zip(limits, frontier) if each):
        assert lowered.memory_analysis().peak <= limit
        recomputed.append(len(lowered.plan.recomputed))
        times.append(lowered.timeline().seconds)
    assert recomputed == [5, 3, 0]
    assert times == sorted(times, reverse=True)


class _Trial(NamedTuple):
    seconds: float
    peak: int


def test_a_program_that_was_planned_for_another_limit_is_taken_if_it_is_faster():
    trials = {12: _Trial(2.0, 10), 24: _Trial(3.0, 20), 36: _Trial(3.0, 20), 48: _Trial(1.0, 40)}
    assert [fastest_within(trials, limit) for limit in (9, 24, 36, 39, 40)] == [
        None,
        12,
        12,
        12,
        48,
    ]
    del trials[12]
    assert [fastest_within(trials, limit) for limit in (12, 24, 36, 39)] == [None, 24, 36, 24]


def test_a_program_that_was_planned_for_another_limit_has_its_own(monkeypatch):
    """The larger limit takes the program of the smaller one, which is faster here, and is the limit of that program."""
    found = {1_400_000: 1.0, 2_000_000: 2.0}
    step_within = traced(*PLANNED, zt.remat(memory="auto"))

    def simulate(graph, cluster):
        return _Trial(found[graph.hints.memory_limit], 0)

    monkeypatch.setattr("ztrans.stages.simulate", simulate)
    small, large = step_within.frontier([1_400_000, 2_000_000], cluster=within(ROOMY))
    assert large.graph.hints.memory_limit == 2_000_000
    assert "found within 1.34 MiB" in large.plan.notes
    assert large.plan.recomputed == small.plan.recomputed
    assert [*map(repr, large.graph.eqns)] == [*map(repr, small.graph.eqns)]
    named = traced(*PLANNED[:1], zt.prefetch(memory=2_000_000), zt.remat(memory=2_000_000))
    again = named.lower(plan=large.plan, cluster=within(ROOMY))
    assert str(again) == str(large)


def test_a_limit_takes_the_place_of_the_one_that_a_transform_names():
    named = traced(
        zt.prefetch(memory=7), zt.remat(memory=7), zt.offload(where="m.*", at_least=0, memory=7)
    )
    assert [t.within(8) for t in named.transforms[1:]] == [
        zt.prefetch(memory=8),
        zt.remat(memory=8),
        zt.offload(where="m.*", at_least=0, memory=8),
    ]
    assert zt.remat().within(8) == zt.remat()
    assert zt.offload(where="m.*", at_least=0).within(8) == zt.offload(where="m.*", at_least=0)


def test_a_step_without_a_limit_has_no_frontier():
    with pytest.raises(ValueError, match="step: no transform of this step has a limit of memory"):
        traced(zt.remat()).frontier([1_000_000])
    with pytest.raises(ValueError, match=r"frontier: limits=0; it is a number of bytes"):
        traced(zt.prefetch()).frontier([0.5])


@dataclasses.dataclass(frozen=True, repr=False)
class _Limited(zt.Transform):
    memory: int = 7

    @property
    def memory_limit(self):
        return self.memory

    def rewrite(self, graph):
        return graph


def test_a_transform_that_keeps_its_limit_is_named():
    with pytest.raises(ValueError, match=r"limited\(\): it names a limit of memory, and it cannot"):
        traced(_Limited()).frontier([1_000_000])


def test_the_error_of_a_step_that_fits_no_limit_says_what_it_needs():
    with pytest.raises(DoesNotFit, match=r"prefetch\(memory=50000\): 48.83 KiB is less than"):
        traced(zt.prefetch()).frontier([40_000.7, 50_000], cluster=within(ROOMY))
    assert traced(zt.prefetch()).frontier([]) == []
