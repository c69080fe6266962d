"""Every transform's program is verified, also that of a user's own transform."""

import re
from dataclasses import dataclass

import pytest
import torch

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import ALL, on_ranks
from ztrans.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT, is_start, wait
from ztrans.ir.collectives import SHARD as SHARD_OP
from ztrans.ir.graph import Eqn, Partial, Provenance, Split, Var, rename
from ztrans.ir.marks import ACCUMULATE, GRADIENT
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


def without_reductions(graph):
    """Each gradient reaches the update without its all_reduce."""
    waits = {w.ins[0]: w for w in graph.eqns if w.op is WAIT}
    terms = {}
    dropped = set()
    for e in graph.eqns:
        if e.op is ALL_REDUCE and e.provenance.role == "grad":
            awaited = waits[e.out]
            terms[awaited.out] = e.ins[0]
            dropped |= {e, awaited}
    kept = tuple(e for e in graph.eqns if e not in dropped)
    return rename(graph.replace(eqns=kept), terms)


HOW = {
    "nothing": lambda graph: graph,
    "without_waits": without_waits,
    "twice": twice,
    "backwards": backwards,
    "narrower": narrower,
    "without_reductions": without_reductions,
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


def test_the_error_names_a_transform_without_a_rewrite():
    class Nothing(zt.Transform):
        pass

    with pytest.raises(
        NotImplementedError,
        match=r"nothing\(\) has no rewrite. Define rewrite\(self, graph\) in Nothing",
    ):
        on_ranks(CASES["mlp_momentum"], 4, SHARD, Nothing())


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
    with pytest.raises(ProgramError, match=r"stranger: .* of the batch is not an input"):
        check_interface(graph, graph.replace(batch=frozenset([Var("stranger", x.dtype, ())])))


def test_a_transform_keeps_the_new_state_equal_on_all_ranks():
    whole = zt.shard_params(zt.AbstractMesh(dp=4), stage=0)
    with pytest.raises(ProgramError) as error:
        on_ranks(CASES["mlp_momentum"], 4, whole, Rewrite("without_reductions"))
    assert str(error.value).splitlines()[0] == (
        "mine(how='without_reductions') made a program that is not well formed: the new value of params.0.weight "
        "differs over dp, and was equal there: it has lost a reduction."
    )


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


X = Var("x", torch.float32, (4, 4))
W = Var("w", torch.float32, (8, 4))
TERMS = Var("t", torch.float32, (8, 4), (Partial("dp", "sum"),))
CUT = Var("s", torch.float32, (8, 4), (Split("dp"),))
GRAD = {"provenance": Provenance("grad", ("w",), "dp")}


def test_what_is_carried_is_started_by_the_step():
    future = Var("w'", torch.float32, (8, 4), future=True)
    graph = zt.ir.Graph("f", (future,), (), (future,), 0, mesh=(("dp", 4),), carried=1)
    with pytest.raises(ProgramError, match="is carried but is not a gather of the new state"):
        zt.ir.check(graph)


def one(eqn: Eqn) -> zt.ir.Graph:
    """The program of one equation, and of the waits for what it starts."""
    waits = tuple(wait(v) for v in eqn.results if v.future)
    inputs = tuple(dict.fromkeys(eqn.ins))
    return zt.ir.Graph("f", inputs, (eqn, *waits), (), 0, mesh=(("dp", 4),))


def reduced(member: Var, dtype: torch.dtype, layout: tuple = (), scatter: bool = True) -> Eqn:
    out = Var("g'", dtype, member.shape, layout, future=True)
    kwargs = {"op": "sum", "dtype": None, "axis": "dp"}
    return Eqn(REDUCE_SCATTER if scatter else ALL_REDUCE, ([member],), (out,), kwargs, **GRAD)


def gathered(member: Var, dtype: torch.dtype, layout: tuple) -> Eqn:
    out = Var("w'", dtype, member.shape, layout, future=True)
    return Eqn(ALL_GATHER, ([member],), (out,), {"dtype": None, "axis": "dp"}, **GRAD)


def aten_eqn(op, out: Var, *args, **kwargs) -> Eqn:
    return Eqn(op, args, (out,), kwargs)


WHOLE = Var("y", torch.float32, (8, 4))
I64 = Var("y", torch.int64, (7,))
BF16 = {"dtype": torch.bfloat16}


@pytest.mark.parametrize("eqn, problem", [
    (aten_eqn(aten.mm.default, I64, X, X), "its arguments give f32[4,4], not y: i64[7]"),
    (aten_eqn(aten._to_copy.default, WHOLE, W, **BF16), "its arguments give bf16[8,4], not y: f32[8,4]"),
    (aten_eqn(aten.add.Tensor, WHOLE, CUT, CUT), "s: f32[8@dp,4] and y: f32[8,4] are cut in other ways"),
    (aten_eqn(aten.add.Tensor, CUT, TERMS, W), "t: f32[8,4]{sum@dp} and s: f32[8@dp,4] are cut in other ways"),
    (reduced(W, torch.int8), "w: f32[8,4] becomes g': i8[8,4]!: only floats and complex values may change their dtype"),
    (reduced(W, torch.float32), "w: f32[8,4] gives g': f32[8@dp,4]!, not g': f32[8,4]!"),
    (reduced(CUT, torch.float32, (Split("dp"),)), "a reduction over dp adds up s: f32[8@dp,4], which is cut over it"),
    (reduced(TERMS, torch.float32, (Split("dp"),), scatter=False), "t: f32[8,4]{sum@dp} gives g': f32[8,4]!, not g': f32[8@dp,4]!"),
    (gathered(CUT, torch.float32, (Split("dp"),)), "s: f32[8@dp,4] gives w': f32[8,4]!, not w': f32[8@dp,4]!"),
    (gathered(CUT, torch.int32, ()), "s: f32[8@dp,4] becomes w': i32[8,4]!: only floats and complex values may change their dtype"),
    (Eqn(SHARD_OP, (W, 0), (WHOLE,), {"axis": "dp"}), "w: f32[8,4] gives f32[8@dp,4], not y: f32[8,4]"),
    (Eqn(SHARD_OP, (CUT, 0), (WHOLE,), {"axis": "dp"}), "s: f32[8@dp,4] is not whole over dp"),
    (Eqn(GRADIENT, (W, X), (I64,)), "a mark has the type of w: f32[8,4]"),
    (Eqn(GRADIENT, (1.0, 2.0), (WHOLE,)), "a mark is of a value, not of a literal"),
    (Eqn(ACCUMULATE, (W, WHOLE), (CUT,)), "a sum over micro-batches has another type than its terms"),
    (reduced(TERMS, torch.float32, scatter=False).replace(kwargs={"op": "sum", "dtype": None, "axis": "gone"}), "no such mesh axis"),
])  # fmt: skip
def test_the_types_of_results_follow_from_the_operands(eqn, problem):
    with pytest.raises(ProgramError) as error:
        zt.ir.check(one(eqn))
    assert str(error.value) == f"{problem}, at {eqn.outs[0]} = {eqn.op} [None]"


@pytest.mark.parametrize("eqn", [
    aten_eqn(aten.mm.default, Var("y", torch.float32, (4, 4)), X, X),
    aten_eqn(aten.add.Tensor, Var("y", torch.float32, (8, 4), (Split("dp"),)), CUT, 1.0),
    reduced(TERMS, torch.bfloat16, (Split("dp", 1),)),
    reduced(W, torch.float32, scatter=False),
    gathered(CUT, torch.bfloat16, ()),
    # The default dtype of a trace is not known here, and of this operation's result nothing else.
    aten_eqn(aten.true_divide.Tensor, Var("y", torch.float64, (7,)), Var("n", torch.int64, (7,)), 2),
    aten_eqn(aten.nonzero.default, Var("y", torch.int64, (3, 2)), X),
])  # fmt: skip
def test_what_follows_from_the_operands_is_accepted(eqn):
    assert zt.ir.check(one(eqn))
