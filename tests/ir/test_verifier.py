"""Every transform's program is verified, also that of a user's own transform."""

import re
from dataclasses import dataclass

import pytest
import torch

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import ALL, on_ranks
from ztrans.ir.collectives import WAIT, is_start
from ztrans.ir.graph import Var
from ztrans.ir.verifier import ProgramError, check_interface

SHARD = zt.shard_params(zt.AbstractMesh(dp=4))
aten = torch.ops.aten


@dataclass(frozen=True, repr=False)
class Rewrite(zt.Transform):
    """A user's own transform. `how` names the function in `HOW` that rewrites the program."""

    how: str = "nothing"

    @property
    def name(self) -> str:
        return "mine"

    def rewrite(self, graph: zt.ir.Graph) -> zt.ir.Graph:
        return HOW[self.how](graph)


def without_waits(graph):
    return graph.replace(eqns=tuple(e for e in graph.eqns if e.op is not WAIT))


def twice(graph):
    last = next(e for e in reversed(graph.eqns) if not is_start(e) and e.op is not WAIT)
    return graph.replace(eqns=(*graph.eqns, last))


def backwards(graph):
    return graph.replace(eqns=graph.eqns[::-1])


def narrower(graph):
    """The state comes back in half precision."""
    new = graph.outputs[0]
    half = Var("half", torch.float16, new.shape, new.layout)
    cast = zt.ir.Eqn(aten._to_copy.default, (new,), (half,), {"dtype": torch.float16}, "update")
    return graph.replace(eqns=(*graph.eqns, cast), outputs=(half, *graph.outputs[1:]))


HOW = {
    "nothing": lambda graph: graph,
    "without_waits": without_waits,
    "twice": twice,
    "backwards": backwards,
    "narrower": narrower,
    "fewer outputs": lambda graph: graph.replace(outputs=graph.outputs[:-1]),
    "fewer inputs": lambda graph: graph.replace(inputs=graph.inputs[:-1]),
    "other state": lambda graph: graph.replace(num_state=graph.num_state - 1),
    "none": lambda graph: None,
}


@pytest.mark.parametrize("how, message", [
    ("without_waits", r"params.0.weight.full: .* is read before it is bound, at t.*: .* = aten.t.default \[programs.py:\d+"),
    ("twice", r"is bound twice, at .* = aten"),
    ("backwards", r"is read before it is bound, at .* = wait"),
    ("narrower", r"state params.0.weight: f32\[16@dp,6\] comes back as half: f16\[16@dp,6\]"),
    ("fewer outputs", r"there are \d+ outputs, and there were \d+"),
    ("fewer inputs", r"is read before it is bound|there are \d+ inputs, and there were"),
    ("other state", r"\d+ inputs are state, and \d+ were"),
])  # fmt: skip
def test_the_error_names_the_transform_that_broke_the_program(how, message):
    with pytest.raises(ProgramError) as error:
        on_ranks(CASES["mlp_momentum"], 4, SHARD, Rewrite(how), *ALL)
    first, advice = str(error.value).splitlines()
    assert first.startswith(f"mine(how={how!r}) made a program that is not well formed: ")
    assert re.search(message, first), first
    assert (
        advice == "Correct its rewrite: the program that it returns must pass zt.ir.check(graph)."
    )


def test_the_error_names_a_transform_that_returns_no_program():
    with pytest.raises(
        TypeError,
        match=r"mine\(how='none'\): rewrite returned a NoneType; it returns the new Graph",
    ):
        on_ranks(CASES["mlp_momentum"], 4, SHARD, Rewrite("none"))


def test_a_users_transform_is_in_the_history():
    lowered = on_ranks(CASES["mlp_momentum"], 4, SHARD, Rewrite(), *ALL)
    assert [name for name, _ in lowered.history].count("mine") == 1
    assert "mine()" in lowered.graph.transforms


def test_a_transform_must_keep_the_inputs_of_the_program():
    graph = on_ranks(CASES["mlp_momentum"], 4, SHARD).graph
    x, *rest = graph.inputs
    renamed = graph.replace(inputs=(Var("other", x.dtype, x.shape, x.layout), *rest))
    with pytest.raises(
        ProgramError,
        match=r"input params.0.weight: f32\[16@dp,6\] has become other: f32\[16@dp,6\]",
    ):
        check_interface(graph, renamed)
    with pytest.raises(ProgramError, match=r"stranger: .* of the batch is no input"):
        check_interface(graph, graph.replace(batch=frozenset([Var("stranger", x.dtype, ())])))


def test_neighbours_divide_the_ranks_of_their_axis():
    graph = on_ranks(CASES["mlp_momentum"], 4, SHARD).graph
    assert zt.ir.check(graph.replace(joint=("dp/2",)))
    with pytest.raises(ProgramError) as error:
        zt.ir.check(graph.replace(joint=("dp/3",)))
    assert str(error.value) == "axis dp/3 is of 3 neighbours, which do not divide 4 ranks"


def test_a_gather_sends_what_is_cut_over_its_axis():
    """A shard of all ranks is no part that two neighbours could gather."""
    graph = on_ranks(CASES["mlp_momentum"], 4, SHARD).graph
    start = next(e for e in graph.eqns if is_start(e))
    near = start.replace(kwargs={**start.kwargs, "axis": "dp/2"})
    eqns = tuple(near if e is start else e for e in graph.eqns)
    with pytest.raises(ProgramError) as error:
        zt.ir.check(graph.replace(eqns=eqns, joint=("dp/2",)))
    first = "a gather over dp/2 sends params.0.bias: f32[16@dp], which is not cut over it"
    assert str(error.value).startswith(first)
