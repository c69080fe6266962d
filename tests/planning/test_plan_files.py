"""Plans in files: what a file may hold, and errors that name the file. `tests/faults` has writes that fail."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, on_ranks, slices

CASE, SHARD = CASES["mlp_momentum"], zt.shard_params(zt.AbstractMesh(dp=4))
OLD, NEW = zt.Plan("old"), zt.Plan("new", notes=("a note " * 1000,))


def lower(**how) -> zt.stages.Lowered:
    return on_ranks(CASE, 4, SHARD, *ALL, **how)


def saved(tmp_path: Path, **edits) -> Path:
    """A plan's file, with some fields changed by hand."""
    path = tmp_path / "step.plan"
    lower().plan.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **edits}))
    return path


def test_a_saved_plan_replaces_an_old_one(tmp_path, monkeypatch):
    """Also through a symbolic link. The file has the permissions of any new file."""
    path, link = tmp_path / "step.plan", tmp_path / "link.plan"
    OLD.save(path)
    link.symlink_to(path)
    NEW.save(link)
    assert zt.Plan.load(path) == NEW and link.is_symlink()
    (tmp_path / "plain").write_text("")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    monkeypatch.chdir(tmp_path)
    NEW.save("relative.plan")
    assert zt.Plan.load("relative.plan") == NEW


@pytest.mark.parametrize("edits, message", [
    ({"update": "nonsense"}, "does not hold a plan (update is 'nonsense'; it is one of 'eager', 'last', 'as written')."),
    ({"gathers": 3}, "does not hold a plan (gathers is 3; it is a list of pairs, of the names of members and of a place)."),
    ({"reductions": [["a", "the end"]]}, """does not hold a plan (reductions holds ('a', 'the end'), which is not a pair of the names of members and of a place)."""),
    ({"dropped": [3]}, "does not hold a plan (dropped is (3,); it is a list of strings)."),
    ({"program": None}, "does not hold a plan (program is None; it is the hash of a program)."),
    ({"gather": []}, "does not hold a plan (it has 'gather', which is not a field of a plan; the nearest is 'gathers')."),
    ({"update": "as written"}, "does not hold a plan (update is 'as written', and a program as written has no buckets)."),
])  # fmt: skip
def test_a_file_with_other_types_is_refused(edits, message, tmp_path):
    path = saved(tmp_path, **edits)
    with pytest.raises(ValueError) as error:
        zt.Plan.load(path)
    assert str(error.value) == f"plan: {path} {message}\nMake one: lowered.plan.save(path)."


def test_a_file_without_a_json_object_is_refused(tmp_path):
    (tmp_path / "step.plan").write_text("[1, 2]")
    with pytest.raises(
        ValueError,
        match=r"step\.plan does not hold a plan \(it is a list, not an object with program, ",
    ):
        zt.Plan.load(tmp_path / "step.plan")


def test_the_error_of_an_edited_plan_names_the_file_and_the_member(tmp_path):
    """In `lower(plan=)`, in `Lowered.with_plan`, and in a step with a plan."""
    path = saved(tmp_path, dropped=["params.0.weight.full"])
    plan, lowered = zt.Plan.load(path), lower()
    message = f"""plan {path}: it names the gather 'params.0.weight.full' twice.\nLower without the plan, and save it again."""
    step = zt.chain(SHARD, *ALL)(CASE.step).with_plan(plan)
    arguments = CASE.state(), *slices(batches(CASE, 1)[0], 4)[0]
    for take in (
        lambda: lower(plan=plan),
        lambda: lowered.with_plan(plan),
        lambda: step.lower(*arguments),
    ):
        with pytest.raises(ValueError) as error:
            take()
        assert str(error.value) == message


def test_a_plan_with_a_gather_that_starts_after_its_use_is_refused(tmp_path):
    lowered = lower()
    (members, _), *rest = lowered.plan.gathers
    wrong = dataclasses.replace(lowered.plan, gathers=(*rest, (members, "the end")))
    with pytest.raises(
        ValueError,
        match=r"plan: the gather \[params.0.weight.full.*\] cannot start at 'the end': it may start at 'the start' only",
    ):
        lowered.with_plan(wrong)


def test_a_plan_that_drops_the_first_gather_of_a_value_is_refused():
    lowered = lower()
    first = lowered.plan.gathers[0][0][0]
    others = (
        (tuple(name for name in members if name != first), at)
        for members, at in lowered.plan.gathers
    )
    gathers = tuple((members, at) for members, at in others if members)
    wrong = dataclasses.replace(
        lowered.plan, gathers=gathers, dropped=(*lowered.plan.dropped, first)
    )
    with pytest.raises(
        ValueError,
        match=r"plan: the gather \[params.0.weight.full\] is dropped, and no value is kept for it",
    ):
        lowered.with_plan(wrong)


def refusal(lowered: zt.stages.Lowered, **edits) -> str:
    """What the error of an edited plan says, without the name of the plan and the last line."""
    with pytest.raises(ValueError) as caught:
        lowered.with_plan(dataclasses.replace(lowered.plan, **edits))
    text, advice = str(caught.value).split("\n")
    assert advice == "Lower without the plan, and save it again."
    return text.removeprefix("plan: ").removesuffix(".")


def test_a_name_that_the_program_lacks_is_refused_with_the_nearest_one():
    lowered = lower()
    (members, place), *rest = lowered.plan.gathers
    gathers = (((*members[:-1], "params.4.bais.full"), place), *rest)
    assert refusal(lowered, gathers=gathers) == (
        "the program has no gather 'params.4.bais.full'; the nearest is 'params.4.bias.full'"
    )
    assert refusal(lowered, dropped=("xyz",)) == "the program has no gather 'xyz'"
    (members, place), *rest = lowered.plan.reductions
    reductions = (((members[0].upper(), *members[1:]), place), *rest)
    assert refusal(lowered, reductions=reductions).startswith(
        f"the program has no reduction '{members[0].upper()}'"
    )


def test_a_collective_among_those_of_the_other_kind_is_refused_with_both_kinds():
    lowered = lower()
    gather, reduction = lowered.plan.gathers[0][0][0], lowered.plan.reductions[0][0][0]
    (members, place), *rest = lowered.plan.gathers
    gathers = (((*members, reduction), place), *rest)
    among_gathers = f"'{reduction}' is a reduction, and stands among the gathers"
    assert refusal(lowered, gathers=gathers) == among_gathers
    assert refusal(lowered, dropped=(reduction,)) == among_gathers
    (members, place), *rest = lowered.plan.reductions
    reductions = (((*members, gather), place), *rest)
    assert refusal(lowered, reductions=reductions) == (
        f"'{gather}' is a gather, and stands among the reductions"
    )


@pytest.fixture(scope="module")
def mixed() -> zt.stages.Lowered:
    """A step that casts one of its two parameters, so their messages have two dtypes."""

    def step(params, x):
        def loss(params):
            h = torch.tanh(x.bfloat16() @ params["a"].bfloat16())
            return (h.float() @ params["b"]).square().mean()

        grads = torch.func.grad(loss)(params)
        return {k: w - grads[k] for k, w in params.items()}, None

    params = {name: torch.ones(8, 8) for name in "ab"}
    return zt.chain(SHARD, *ALL)(step).lower(params, torch.ones(4, 8))


def test_a_bucket_of_two_kinds_is_refused_with_the_properties_that_differ(mixed):
    (a, place), (b, _) = mixed.plan.gathers
    assert refusal(mixed, gathers=(((*a, *b), place),)) == (
        "the gathers 'a.full' and 'b.full' are of two kinds and cannot share a bucket: dtype bf16 and its own"
    )


def test_a_wrong_place_is_refused_with_the_places_that_are_allowed(mixed):
    first, (b, _) = mixed.plan.gathers
    may_start = "it may start from 'the start' to 'matmul 1 + 2'"
    assert refusal(mixed, gathers=(first, (b, "gradient 1"))) == (
        f"the gather [b.full] cannot start at 'gradient 1': {may_start}"
    )
    assert refusal(mixed, gathers=(first, (b, "matmull 1"))) == (
        f"the gather [b.full]: the program has no place 'matmull 1'; the nearest is 'matmul 1'; {may_start}"
    )
    ((reduced, _),) = mixed.plan.reductions
    assert refusal(mixed, reductions=((reduced, "the start"),)) == (
        "the reduction [b.grad, ... 1 more] cannot be waited for at 'the start': it may be waited for at 'gradient 1' only"
    )


def test_a_plan_that_does_not_fit_the_budget_is_refused():
    """The plan is valid, but its order needs more memory than the limit of the step."""
    peak = on_ranks(CASE, 4, SHARD, zt.overlap_grads(), zt.prefetch()).memory_analysis().peak
    within = (zt.overlap_grads(), zt.prefetch(memory=2 * peak))
    lowered = on_ranks(CASE, 4, SHARD, *within)
    tight = dataclasses.replace(
        lowered,
        unordered=lowered.unordered.with_hints(memory_limit=lowered.memory_analysis().peak - 1),
    )
    with pytest.raises(
        ValueError,
        match=r"plan: the program that it makes has \d+ bytes live .*, and the limit of the step is \d+",
    ):
        tight.with_plan(lowered.plan)


class Config:
    """A user's object. As Python prints it, it has an address."""

    def shards(self, path, leaf):
        return True


@pytest.mark.parametrize("option", [
    lambda: Config().shards,
    lambda: functools.partial(Config.shards, Config()),
    lambda: functools.partial(Config().shards),
])  # fmt: skip
def test_a_plan_does_not_depend_on_the_address_of_an_option(option):
    """It is another one on each rank, and in each process that loads the plan."""

    def lowered(where, **how):
        shard = zt.shard_params(zt.AbstractMesh(dp=4), where=where)
        return on_ranks(CASE, 4, shard, *ALL, **how)

    first, second = option(), option()
    plan = lowered(first).plan
    assert lowered(second, plan=plan).plan == plan
