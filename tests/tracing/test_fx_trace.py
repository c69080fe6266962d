"""The FX graph of make_fx is a stage of its own: it runs, it is printed by FX, and its nodes know their lines."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import ztrans as zt
from tests.support.cover import parameters_of
from tests.support.lifted import loop_of
from tests.support.programs import CASES
from tests.support.worlds import clone
from ztrans.calling.global_state import patched
from ztrans.ir.layout import as_tensor
from ztrans.tracing import fx_trace
from ztrans.tracing.annotate import origin_of

FILE = str(Path(__file__))


def tensor_leaves(tree) -> list[torch.Tensor]:
    """The leaves of a tree as tensors. A program takes a number of Python as a tensor of 64 bits."""
    leaves = pytree.tree_leaves(tree)
    return [x.detach() if isinstance(x, torch.Tensor) else as_tensor(x) for x in leaves]


@pytest.mark.slow
@pytest.mark.parametrize("name", parameters_of(CASES))
def test_the_fx_graph_has_the_bits_of_the_plain_step(name):
    """The plain step runs as in a trace: there torch's AdamW keeps its count of steps as a tensor."""
    case = CASES[name]
    state = case.state()
    batch = case.batch(case.samples)
    traced = zt.Step.of(case.step).trace(clone(state), *batch)
    torch.manual_seed(0)
    with patched(torch.compiler, _is_compiling_flag=name in ("adamw_single", "adamw_foreach")):
        want = tensor_leaves(case.step(clone(state), *clone(batch)))
    torch.manual_seed(0)
    got = traced.fx(*tensor_leaves((clone(state), *clone(batch))))
    assert len(got) == len(want)
    for mine, theirs in zip(got, want):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def step(state, x):
    def loss(w):
        return (x @ w).relu().square().mean()

    grad, value = torch.func.grad_and_value(loss)(state["w"])
    return {"w": state["w"] - 0.1 * grad}, value


STATE = {"w": torch.randn(4, 3)}
X = torch.randn(5, 4)


def test_the_fx_graph_is_the_first_stage_of_the_history():
    traced = zt.Step.of(step).trace(STATE, X)
    name, module = traced.lower().history[0]
    assert name == "make_fx"
    assert module is traced.fx
    assert isinstance(module, fx.GraphModule)


def test_placeholders_have_the_names_of_the_leaves():
    traced = zt.Step.of(step).trace(STATE, X)
    assert [node.target for node in traced.fx.graph.find_nodes(op="placeholder")] == ["w", "x"]
    assert traced.fx.code.splitlines()[3].strip() == "def forward(self, w, x):"


def test_leaves_may_have_names_that_are_no_identifiers():
    def scaled(state, x):
        return {key: value * x for key, value in state.items()}, x

    names = ("lambda", "1", "a.b", "a_b", "run_", "self", "torch")
    state = {name: torch.ones(2) for name in names}
    traced = zt.Step.of(scaled).trace(state, torch.tensor(2.0))
    assert all(
        torch.equal(x, torch.full((2,), 2.0))
        for x in traced.fx(*state.values(), torch.tensor(2.0))[: len(names)]
    )


def test_nodes_have_the_lines_of_the_step_backward_ones_included():
    traced = zt.Step.of(step).trace(STATE, X)
    lines, first = inspect.getsourcelines(step)
    loss_line = first + next(i for i, line in enumerate(lines) if "relu" in line)
    origins = {
        node.name: origin_of(node) for node in traced.fx.graph.nodes if node.op == "call_function"
    }
    assert all(origin is not None and origin.source.file == FILE for origin in origins.values())
    assert origins["mm"].source.line == origins["mm_1"].source.line == loss_line
    assert not origins["mm"].fact.backward
    assert origins["mm_1"].fact.backward


def test_marks_of_gradients_and_means_are_nodes():
    def marked(state, x):
        grad, value = torch.func.grad_and_value(lambda w: (x @ w).mean())(state["w"])
        return {"w": state["w"] - grad}, zt.pmean(value)

    targets = [str(node.target) for node in zt.Step.of(marked).trace(STATE, X).fx.graph.nodes]
    assert "ztrans.gradient.default" in targets
    assert "ztrans.pmean.default" in targets


def test_constants_among_the_outputs_are_left_out():
    def labelled(state, x):
        return state, {"sum": x.sum(), "name": "run", "count": 3}

    traced = zt.Step.of(labelled).trace(STATE, X)
    assert len(traced.fx(STATE["w"], X)) == 2
    assert traced.lower().compile()(clone(STATE), X)[1]["name"] == "run"


def test_a_write_through_a_view_of_a_literal_is_not_baked_in():
    """make_fx alone reads 0.0 here."""

    def counted(state, x):
        count = torch.tensor(0.0)
        count.view(1).add_(x.sum())
        return state, x * float(count)

    with pytest.raises(ValueError, match="counted reads a tensor's value while it is traced"):
        zt.Step.of(counted).trace(STATE, X)


def test_a_lifted_loop_has_an_fx_graph_too():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    lifted, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    module = zt.Step.of(lifted).trace(state, X).fx
    assert isinstance(module, fx.GraphModule)
    assert module.print_readable(print_output=False)


def test_a_checkpoint_that_preserves_the_state_of_the_generator_is_traced():
    def dropped(state, x):
        return state, checkpoint(F.dropout, x, use_reentrant=False, preserve_rng_state=True)

    zt.Step.of(dropped).trace(STATE, X.clone().requires_grad_())


def test_what_fake_operations_gave_is_forgotten_in_time(monkeypatch):
    """PyTorch keeps it for each shape of a batch as long as the process lives."""
    monkeypatch.setattr(fx_trace, "_MOST_FAKE_RESULTS", 40)

    def step(w, x):
        for _ in range(20):
            w = w + (x * w.sum()).mean()
        return w, x

    sizes = []
    for rows in range(2, 12):
        zt.Step.of(step).trace(torch.zeros(3), torch.zeros(rows, 5))
        sizes.append(len(FakeTensorMode.cache))
    assert max(sizes) <= 40
