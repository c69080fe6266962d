"""`zt.testing.check_laws`: the transforms of ztrans pass, and each law finds a transform that breaks it."""

import itertools
import re
import types
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

import ztrans as zt
from ztrans import ir
from ztrans.testing import laws

LAWS = {"worlds": (2,), "stages": (2,)}


def arguments():
    torch.manual_seed(0)
    params = {"up": torch.randn(8, 16), "down": torch.randn(16, 4)}
    return params, (torch.randn(8, 8), torch.randn(8, 4))


def train(params, x, y):
    loss = lambda params: (torch.relu(x @ params["up"]) @ params["down"] - y).square().mean()
    grads, value = torch.func.grad_and_value(loss)(params)
    return {k: p - 0.1 * grads[k] for k, p in params.items()}, value


def check(transform, **how):
    zt.testing.check_laws(transform, train, *arguments(), **{**LAWS, **how})


@pytest.mark.slow
@pytest.mark.parametrize("transform, stages", [
    (zt.fuse_cast_gather(), (3,)), (zt.remat(), (0, 3)), (zt.delay_weight_grads(), (2,)), (zt.prefetch(), (3,)),
], ids=repr)  # fmt: skip
def test_the_transforms_of_ztrans_obey_the_laws(transform, stages):
    check(transform, stages=stages)


def test_a_step_that_reads_an_iterator_is_found():
    rates = itertools.count(1)

    def scales(params, x, y):
        return params, (x * next(rates)).sum()

    with pytest.raises(
        zt.testing.LawError, match=r"scales: traced twice, it has two programs"
    ) as e:
        zt.testing.check_laws(zt.prefetch(), scales, *arguments(), **LAWS)
    assert re.search(r"first: .* = mul\(x, 1\) .*\n  second: .* = mul\(x, 2\)", str(e.value))
    assert str(e.value).endswith("or keep it in the state. docs/limits.md lists what is fixed.")


def test_a_step_that_counts_in_an_attribute_of_a_computed_name_is_found():
    counts = types.SimpleNamespace(calls=0)

    def counting(params, x, y):
        name = "".join(["ca", "lls"])
        setattr(counts, name, getattr(counts, name) + 1)
        return params, (x * getattr(counts, name)).sum()

    with pytest.raises(zt.testing.LawError, match=r"counting: traced twice, it has two programs"):
        zt.testing.check_laws(zt.prefetch(), counting, *arguments(), **LAWS)


@pytest.mark.slow
def test_a_transform_that_changes_results_by_rounding_needs_a_tolerance():
    check(zt.accumulate(2), tolerance=1e-5)
    with pytest.raises(
        zt.testing.LawError, match=r"changes the state\['up'\] by .*the same bits are asked for"
    ):
        check(zt.accumulate(2), worlds=(1,), stages=(0,))


@dataclass(frozen=True, repr=False)
class Doubled(zt.Transform):
    """Doubles the first reduced gradient: a rewrite that does not keep the meaning."""

    def rewrite(self, graph):
        eqns = []
        for e in graph.eqns:
            wrong = e.provenance is not None and e.provenance.role == "grad" and ir.is_start(e)
            eqns.append(e.replace(kwargs={**e.kwargs, "op": "sum"}) if wrong else e)
        return graph.replace(eqns=tuple(eqns))


def test_a_rewrite_that_changes_the_meaning_is_found():
    with pytest.raises(
        zt.testing.LawError, match=r"changes the state\[.*on 2 ranks, stage 2, alone: the same bits"
    ):
        check(Doubled())


@dataclass(frozen=True, repr=False)
class _NoValue(zt.Transform):
    sizes: list = field(default_factory=list)

    def rewrite(self, graph):
        return graph


def test_a_transform_that_is_no_value_is_found():
    with pytest.raises(
        zt.testing.LawError,
        match=r"no_value\(.*\) is no value: it must be equal to a copy of itself",
    ):
        check(_NoValue())


@dataclass(frozen=True, repr=False)
class _ReadsHints(zt.Transform):
    def rewrite(self, graph):
        hinted = sum(e.hint is not None for e in graph.eqns)
        return graph.replace(name=f"{graph.name}_{hinted}")


def test_a_transform_that_depends_on_its_place_is_found():
    with pytest.raises(
        zt.testing.LawError,
        match=r"the program depends on its place among the schedules, on 2 ranks",
    ):
        check(_ReadsHints())


@dataclass(frozen=True, repr=False)
class _Adds(zt.Transform):
    """Adds an output."""

    phase: ClassVar[int] = 1
    label: str = "twice"
    named: bool = True

    def rewrite(self, graph):
        loss = graph.outputs[-1]
        twice = ir.Var(self.label, loss.dtype, loss.shape)
        e = ir.Eqn(torch.ops.aten.mul.Tensor, (loss, 2), (twice,), region="update")
        added = (*graph.added, self.label) if self.named else graph.added
        return graph.replace(eqns=(*graph.eqns, e), outputs=(*graph.outputs, twice), added=added)


def test_an_added_output_is_returned_behind_that_of_the_step():
    check(_Adds(), stages=(0, 3))
    params, batch = arguments()
    run = _Adds()(train)
    for _ in range(2):  # the second call takes the path of a known state
        params, (loss, added) = run(params, *batch)
        assert list(added) == ["twice"] and torch.equal(added["twice"], 2 * loss)
    sharded = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), _Adds())(train)
    params, batch = arguments()
    ranks = [tuple(x.chunk(2)[r] for x in batch) for r in range(2)]
    _, outputs = sharded.lower(params, *ranks[0]).lockstep(params, ranks)
    _, loss = train(params, *batch)
    for mean, added in outputs:
        assert torch.allclose(mean, loss) and torch.allclose(added["twice"], 2 * loss)


def test_an_added_output_needs_a_name():
    params, batch = arguments()
    with pytest.raises(
        zt.ir.ProgramError,
        match=r"there are 4 outputs, and there were 3. Add outputs behind the others, with a name",
    ):
        _Adds(named=False)(train).lower(params, *batch)


@dataclass(frozen=True, repr=False)
class _NotANumber(zt.Transform):
    """Multiplies the loss by NaN."""

    def rewrite(self, graph):
        loss = graph.outputs[-1]
        wrong = ir.Var("wrong", loss.dtype, loss.shape)
        e = ir.Eqn(torch.ops.aten.mul.Tensor, (loss, float("nan")), (wrong,), region="update")
        return graph.replace(eqns=(*graph.eqns, e), outputs=(*graph.outputs[:-1], wrong))


def test_a_transform_that_gives_nan_is_found():
    with pytest.raises(zt.testing.LawError, match=r"changes the output.* by nan"):
        check(_NotANumber())


def test_equal_values_that_are_not_finite_have_no_distance():
    x = torch.tensor([float("nan"), float("inf"), 2.0])
    assert laws._distance(x, x.clone()) == 0
    assert laws._distance(x + torch.tensor([0, 0, 2.0]), x) == 1
