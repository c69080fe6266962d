"""`Lowered.summary`: the figures of the timeline, of the costs and of the memory, on one screen."""

import pytest
import torch

import ztrans as zt
from tests.support.formats import SentAs
from ztrans.ir.wire_format import Coded
from ztrans.planning.devices import H100

WIDTH, ROWS, RANKS = 256, 64, 8
CLUSTER = zt.cluster("h100", dp="infiniband")


def train_step(state, x):
    gradient, loss = torch.func.grad_and_value(lambda w: (x @ w).square().mean())(state["w"])
    return {"w": state["w"] - 0.1 * gradient}, loss


def lowered(*transforms, rows=ROWS, cluster=CLUSTER):
    mesh = zt.AbstractMesh(dp=RANKS)
    step = zt.chain(zt.shard_params(mesh), *transforms)(train_step)
    return step.lower({"w": torch.ones(WIDTH, WIDTH)}, torch.ones(rows, WIDTH), cluster=cluster)


@pytest.mark.parametrize("micro", [1, 4])
def test_the_speed_of_a_step_follows_from_its_rows_and_its_products(micro):
    program = lowered(*[zt.accumulate(micro)] * (micro > 1))
    summary = program.summary()
    seconds = program.timeline().seconds
    assert summary.ranks == RANKS and summary.items == ROWS * RANKS and not summary.items_are_tokens
    assert summary.items_per_second == ROWS * RANKS / seconds
    # Forward and the gradient of the weights are one product each; nothing needs the gradient of x.
    operations = 2 * 2 * ROWS * WIDTH * WIDTH
    assert summary.mfu == pytest.approx(operations / H100.rate("f32") / seconds, rel=0.05)


def test_tokens_are_the_elements_of_integer_batches():
    def lm_step(state, tokens):
        def loss(table):
            return torch.nn.functional.embedding(tokens, table).square().mean()

        gradient, value = torch.func.grad_and_value(loss)(state)
        return state - gradient, value

    step = zt.shard_params(zt.AbstractMesh(dp=2))(lm_step)
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    summary = step.lower(torch.ones(32, 8), tokens, cluster=CLUSTER).summary()
    assert (summary.items, summary.items_are_tokens) == (2 * 4 * 16, True)


def test_a_summary_prints_the_figures_of_timeline_costs_and_memory():
    program = lowered(zt.overlap_grads(), zt.prefetch())
    timeline, cost = program.timeline(), program.cost_analysis()
    rows = {
        line.split("  ")[0]: line for line in str(program.summary()).splitlines() if line[0] != " "
    }
    assert "train_step on 8 ranks, H100" in rows
    assert zt.ir.printer.format_seconds(timeline.seconds) in rows["step"]
    assert timeline.bound[1] in rows["step"]
    assert zt.ir.printer.format_bytes(program.memory_analysis().peak) in rows["peak memory"]
    assert zt.ir.printer.format_bytes(cost.wire_bytes) in rows["received"]


@pytest.mark.parametrize("ranks_of_a_host, link", [(RANKS, "nvlink4"), (4, "infiniband")])
def test_ranks_of_one_host_use_the_link_inside_it(ranks_of_a_host, link):
    dp = zt.by_host(ranks_of_a_host, inside="nvlink4", between="infiniband")
    summary = lowered(cluster=zt.cluster("h100", dp=dp)).summary()
    assert link in {name for (_, name), _ in summary.link_seconds}
    assert (ranks_of_a_host == RANKS) == ("infiniband" not in str(summary))


def test_the_values_that_are_sent_as_codes_are_counted_by_format():
    """A rank receives 7/8 of the codes, which have a scale of 4 bytes for 256 elements."""
    program = lowered(zt.overlap_grads(), zt.prefetch(), SentAs(Coded(8, 256), Coded(4, 256)))
    received = zt.ir.printer.format_bytes(7 * (WIDTH * WIDTH // 8) // 256 * (256 + 4))
    assert f"dp param: 1 collective of 1 value, 1 as i8/256, {received}" in str(program.plan)
    assert "us, values as i4/256: 1, values as i8/256: 1" in str(program.summary())
    titles = [event.title for event in program.timeline().events]
    assert "w.full = all_gather as i8/256" in titles


def test_measured_figures_stand_beside_simulated_ones():
    step = zt.shard_params(zt.make_mesh("cpu", dp=1))(train_step)
    state = step.shard({"w": torch.ones(WIDTH, WIDTH)})
    x = torch.ones(ROWS, WIDTH)
    state, _ = step(state, x)
    compiled = step.compiled(state, x)
    profile = compiled.profile(state, x)
    summary = step.lower(state, x).summary(profile)
    _, heads, row, *_ = str(summary).splitlines()
    assert heads.split() == ["simulated", "measured"]
    assert zt.ir.printer.format_seconds(profile.timeline.seconds) in row
    assert summary.items_per_second == ROWS / profile.timeline.seconds
