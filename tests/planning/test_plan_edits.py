"""Plans edited by hand. Each is applied and changes no result, or is refused with an error that names the plan."""

import copy
import json
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import batches, on_ranks, slices
from ztrans.planning.cluster import Link
from ztrans.planning.cost import memory
from ztrans.planning.realise import OverLimitError, apply_plan
from ztrans.planning.skeleton import skeleton

SLOW = zt.cluster("cpu", dp=Link("wire", 1e-5, 1e8), host=Link("other", 1e-5, 1e8))
RANKS = 4
MANY = (zt.overlap_grads(bucket=2000), zt.prefetch(max_in_flight=4000), zt.fuse_cast_gather())
FEW = (zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())
HSDP = zt.shard_params(zt.AbstractMesh(host=2, dp=2), replicate_axis="host")
PROGRAMS = {
    "gpt_adam": (zt.shard_params(zt.AbstractMesh(dp=RANKS)), *MANY),
    "accumulation": (zt.shard_params(zt.AbstractMesh(dp=RANKS), stage=2), *MANY),
    "clipped": (zt.shard_params(zt.AbstractMesh(dp=RANKS)), *FEW),
    "sam": (HSDP, *MANY),
    "mlp_momentum": (zt.shard_params(zt.AbstractMesh(dp=RANKS), stage=0), *FEW),
}
ODD = (None, 3, 0.5, True, "", "nobody", [], {}, [[]], ["nobody", ""], {"a": 1})


def lower(name: str) -> zt.stages.Lowered:
    return on_ranks(CASES[name], RANKS, *PROGRAMS[name], cluster=SLOW)


def edits(lowered: zt.stages.Lowered):
    """Random edits of a plan's JSON. Each is a function that changes the plan in place."""
    places = list(skeleton(lowered.unordered).place_names)

    def kind(plan, chance):
        return plan[chance.choice([k for k in ("gathers", "reductions") if plan[k]])]

    def bucket(plan, chance):
        return chance.choice(kind(plan, chance))

    def swap(plan, chance):
        buckets = kind(plan, chance)
        i, j = chance.randrange(len(buckets)), chance.randrange(len(buckets))
        buckets[i], buckets[j] = buckets[j], buckets[i]

    def swap_members(plan, chance):
        a, b = bucket(plan, chance)[0], bucket(plan, chance)[0]
        i, j = chance.randrange(len(a)), chance.randrange(len(b))
        a[i], b[j] = b[j], a[i]

    def drop_bucket(plan, chance):
        buckets = kind(plan, chance)
        buckets.pop(chance.randrange(len(buckets)))

    def double_bucket(plan, chance):
        buckets = kind(plan, chance)
        buckets.insert(chance.randrange(len(buckets)), copy.deepcopy(chance.choice(buckets)))

    def drop_member(plan, chance):
        members = bucket(plan, chance)[0]
        members.pop(chance.randrange(len(members)))

    def double_member(plan, chance):
        bucket(plan, chance)[0].append(chance.choice(bucket(plan, chance)[0]))

    def stranger(plan, chance):
        bucket(plan, chance)[0].append(chance.choice(["nobody", "", "loss", *places]))

    def elsewhere(plan, chance):
        bucket(plan, chance)[1] = chance.choice([*places, "nowhere", "matmul 1000", "matmul 1 + x"])

    def next_place(plan, chance):
        b = bucket(plan, chance)
        if b[1] in places:
            b[1] = places[(places.index(b[1]) + chance.choice([-3, -2, -1, 1, 2, 3])) % len(places)]

    def with_next(plan, chance):
        """Let the updates after a reduction run with the next, or alone. A gather cannot say so."""
        b = bucket(plan, chance)
        suffix = ", with the next"
        b[1] = b[1].removesuffix(suffix) if b[1].endswith(suffix) else b[1] + suffix

    def merge(plan, chance):
        buckets = kind(plan, chance)
        if len(buckets) > 1:
            i = chance.randrange(len(buckets) - 1)
            buckets[i][0] += buckets.pop(i + 1)[0]

    def split(plan, chance):
        buckets = kind(plan, chance)
        i = chance.randrange(len(buckets))
        members, at = buckets[i]
        buckets[i : i + 1] = (
            [[members[:1], at], [members[1:], at]] if members[1:] else [[members, at]]
        )

    def keep(plan, chance):
        """Drop a gather. It may be the first gather of its value, whose value then exists nowhere."""
        buckets = plan["gathers"]
        if buckets:
            members = chance.choice(buckets)[0]
            plan["dropped"].append(members.pop(chance.randrange(len(members))))
            plan["gathers"] = [b for b in buckets if b[0]]

    def give_back(plan, chance):
        if plan["dropped"]:
            plan["gathers"].append([[plan["dropped"].pop()], chance.choice(places)])

    def update(plan, chance):
        plan["update"] = chance.choice(["eager", "last", "as written", "nonsense", "", None, 3])

    def retype(plan, chance):
        """Replace a random value by one of another type."""
        at, key = plan, chance.choice([*plan])
        while isinstance(at[key], list) and at[key] and chance.random() < 0.7:
            at, key = at[key], chance.randrange(len(at[key]))
        at[key] = chance.choice(ODD)

    def fields(plan, chance):
        if chance.random() < 0.5:
            plan.pop(chance.choice([*plan]))
        else:
            plan["gather"] = []

    def reverse(plan, chance):
        chance.choice([kind(plan, chance), bucket(plan, chance)[0]]).reverse()

    def program(plan, chance):
        plan["program"] = "0" * 16

    return [swap, swap_members, drop_bucket, double_bucket, drop_member, double_member, stranger, elsewhere, elsewhere,
            next_place, next_place, with_next, merge, split, keep, keep, give_back, update, retype, retype, fields, reverse, program]  # fmt: skip


def equal(a, b) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_edited_plan_is_applied_or_refused(name):
    lowered, case = lower(name), CASES[name]
    plan = json.loads(json.dumps({**lowered.plan._decisions(), "notes": lowered.plan.notes}))
    assert plan["gathers"] or plan["reductions"]
    unplanned = on_ranks(case, RANKS, PROGRAMS[name][0], PROGRAMS[name][-1])
    rank_batches = slices(batches(case, 1)[0], RANKS)
    wanted = unplanned.lockstep(case.state(), rank_batches)
    seen = Counter()
    for seed in range(240):
        chance, edited = Random(seed), copy.deepcopy(plan)
        for _ in range(chance.choice([1, 1, 2, 3])):
            edit = chance.choice(edits(lowered))
            try:
                edit(edited, chance)
            except (TypeError, IndexError, AttributeError, KeyError, ValueError):
                break  # an earlier edit has removed what this one changes
        try:
            followed = lowered.with_plan(zt.Plan.of(edited))
        except ValueError as error:
            first = str(error).splitlines()[0]
            assert first.startswith("plan: "), first
            assert not any(
                word in str(error)
                for word in ("KeyError", "NoneType", "object is not", "unhashable")
            )
            seen["refused"] += 1
            continue
        seen["applied"] += 1
        zt.ir.check(followed.graph)
        assert equal(followed.lockstep(case.state(), rank_batches), wanted), edited
    assert seen["refused"] > 100 and seen["applied"] > 15, seen


def test_a_plan_that_fits_exactly_is_applied():
    lowered = lower("clipped")
    graph = lowered.unordered
    peak = memory(apply_plan(graph, lowered.plan)).peak

    def limited(limit):
        return graph.replace(hints=replace(graph.hints, memory_limit=limit))

    assert memory(apply_plan(limited(peak), lowered.plan)).peak == peak
    with pytest.raises(OverLimitError, match=f"has {peak} bytes live"):
        apply_plan(limited(peak - 1), lowered.plan)
