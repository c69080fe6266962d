"""Published runs: the committed table, FSDP's schedule of a small model, and PyTorch's allocator."""

import dataclasses
import json
from itertools import pairwise

import pytest

from benchmarks import RESULTS
from benchmarks.published.__main__ import (
    NEAR,
    ORDER,
    ROWS,
    cluster_of,
    program,
    ratio,
    step_seconds,
)
from benchmarks.published.memory import MIB, Allocator, reserved_bytes
from benchmarks.published.models import Sizes
from benchmarks.published.schedule import ROOT, is_gather, unit_of
from ztrans.ir.collectives import REDUCE_SCATTER
from ztrans.ir.pairing import pair
from ztrans.planning.cost import memory

COMMITTED = {row["name"]: row for row in json.loads((RESULTS / "published.json").read_text())}

# Rows that are further from the measurement than the page asks for, as (row, figure), and orders that differ.
FAR = {
    ("MPT 30B", "seconds"),
    ("MPT 13B, 2 hosts", "seconds"),
    ("MPT 13B, 8 hosts", "seconds"),
    ("MPT 1B, 8 hosts", "seconds"),
}
OTHER_ORDER = {("Llama 3.1 8B, eager, 16 hosts", "Llama 3.1 8B, eager")}


def test_the_table_has_every_row():
    assert list(COMMITTED) == [row.name for row in ROWS]
    for row in ROWS:
        assert COMMITTED[row.name]["measured"] == {"seconds": row.seconds, "peak GiB": row.peak}


@pytest.mark.parametrize("figure", ["seconds", "peak GiB"])
@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_a_row_is_near_its_measurement(name, figure):
    share = ratio(COMMITTED[name], figure)
    if share is None:
        pytest.skip("not measured")
    assert (abs(share - 1) > NEAR) == ((name, figure) in FAR), f"{share:.3f} of the measurement"


@pytest.mark.parametrize("slower, faster", ORDER)
def test_variants_are_in_the_order_in_which_they_were_measured(slower, faster):
    rows = {row.name: row for row in ROWS}
    tokens = {}
    for name in (slower, faster):
        row = rows[name]
        a_step = row.micro * row.batch * row.sequence
        tokens[name] = a_step / COMMITTED[name]["simulated"]["seconds"]
    assert rows[faster].tokens > rows[slower].tokens
    assert (tokens[faster] > tokens[slower]) == ((slower, faster) not in OTHER_ORDER)


# A small model in the schedule of FSDP.


def small(name: str, **changes):
    """A published row with three small layers, and its program; `changes` are fields of the row."""
    row = next(row for row in ROWS if row.name == name)
    sizes = Sizes(3, 256, 2, 1024, *((512, 1) if row.sizes.hidden else ()))
    row = dataclasses.replace(row, **{"sizes": sizes, "sequence": 128, "batch": 2, **changes})
    return row, program(row, cluster_of(row), sizes.layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, regathered", [("MPT 1B", [2, 1, 0]), ("Llama 3.1 8B, eager", [1, 0])]
)
def test_fsdp_sends_a_message_for_each_block_and_gathers_one_ahead(name, regathered):
    _, graph = small(name)
    starts = pair(graph).starts.values()
    gathers = [started for started in starts if is_gather(started.start)]
    assert [unit_of(s.start) for s in gathers if s.start.region == "forward"] == [ROOT, 0, 1, 2]
    again = [unit_of(s.start) for s in gathers if s.start.region == "backward"]
    assert again == regathered, "the root is kept, and with FSDP2 the last block"
    for earlier, later in pairwise(gathers[1:]):
        assert earlier.first_wait - 3 <= later.index < later.first_wait - 3, "one ahead, no more"
    grads = [s for s in starts if s.start.op is REDUCE_SCATTER]
    assert [unit_of(s.start) for s in grads][:3] == [2, 1, 0]
    for earlier, later in pairwise(grads):
        assert min(earlier.waits) == later.index + 1, "one reduction at a time"


@pytest.mark.slow
def test_micro_batches_share_one_update():
    row, graph = small("MPT 1B")
    cluster = cluster_of(row)
    one = step_seconds(row, graph, cluster)
    three = step_seconds(dataclasses.replace(row, micro=3), graph, cluster)
    assert 2 * one < three < 3 * one


@pytest.mark.slow
def test_compiled_blocks_take_less_time_and_less_memory():
    eager, graph = small("Llama 3.1 8B, eager", sequence=2048, batch=8)
    compiled = next(row for row in ROWS if row.name == "Llama 3.1 8B, compiled")
    cluster = cluster_of(eager)
    assert step_seconds(compiled, graph, cluster) < step_seconds(eager, graph, cluster)
    assert reserved_bytes(graph, compiled.is_compiled) < reserved_bytes(graph, eager.is_compiled)
    assert reserved_bytes(graph, eager.is_compiled) > memory(graph).peak


# PyTorch's allocator.


def test_an_allocator_takes_the_smallest_block_that_fits_and_splits_it():
    allocator = Allocator()
    large, small_block = allocator.take(40 * MIB), allocator.take(12 * MIB)
    assert allocator.reserved == 52 * MIB
    allocator.give(large)
    allocator.give(small_block)
    allocator.take(11 * MIB)
    assert allocator.reserved == 52 * MIB
    allocator.take(38 * MIB)
    assert allocator.reserved == 52 * MIB, "the block of 40 MiB is still whole"


def test_an_allocator_joins_free_neighbours_and_nothing_across_segments():
    allocator = Allocator()
    first = allocator.take(30 * MIB)
    allocator.give(first)
    halves = [allocator.take(15 * MIB) for _ in range(2)]
    assert allocator.reserved == 30 * MIB
    for half in halves:
        allocator.give(half)
    allocator.take(30 * MIB)
    assert allocator.reserved == 30 * MIB
    allocator.take(60 * MIB)
    assert allocator.reserved == 90 * MIB


def test_an_allocator_rounds_as_pytorch_does():
    for size, reserved in ((1, 2 * MIB), (2 * MIB, 20 * MIB), (11 * MIB + 1, 12 * MIB)):
        allocator = Allocator()
        allocator.take(size)
        assert allocator.reserved == reserved
