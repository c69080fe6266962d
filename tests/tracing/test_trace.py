"""The trace of a step: pytrees, numbers, the user's lines, regions, gradient marks, random draws and buffers."""

import re
from collections import Counter, namedtuple
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributions import Categorical, Distribution, Normal, kl_divergence
from torch.func import functional_call, grad, grad_and_value
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import ztrans as zt
from tests.support.fp8 import E4M3, Scaled, ToScaled
from tests.support.traced import trace
from tests.support.worlds import clone, distance
from ztrans.calling.signature import Abstract, Constant
from ztrans.ir.layout import LeafSharding
from ztrans.ir.op_facts import is_random
from ztrans.runtime.codegen import to_fx

W, B = torch.linspace(-1, 1, 8).view(4, 2), torch.tensor([0.5, -0.5])
X, Y = torch.linspace(0, 2, 12).view(3, 4).cos(), torch.linspace(0, 1, 6).view(3, 2)
STATE, BATCH = {"params": {"w": W, "b": B}}, (X, Y)
KINDS = {int: torch.int64, float: torch.float64}
Pair, Record = namedtuple("Pair", "one two"), make_dataclass("Record", ["one", "two"])
pytree.register_dataclass(Record)


def flat(*args):
    """The inputs of a traced graph for these arguments: tensors, and numbers as scalar tensors."""
    leaves = [x for x in pytree.tree_leaves(args) if type(x) in (torch.Tensor, int, float)]
    return [
        x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=KINDS[type(x)]) for x in leaves
    ]


def evaluated(program, *args):
    """The results of the traced graph, as the pytree that the step returns."""
    return pytree.tree_unflatten(zt.ir.evaluate(program.graph, *flat(*args)), program.out_tree)


def loss(w, b, x, y):
    h = torch.tanh(x @ w)
    return (h + b - y).square().mean()


def step(state, batch, lr=0.1):
    grads, value = grad_and_value(lambda p: loss(p["w"], p["b"], *batch))(state["params"])
    return {"params": {k: p - lr * grads[k] for k, p in state["params"].items()}}, value


def line(function, marker):
    """The number of the first line after `def function` that contains `marker`."""
    text = Path(__file__).read_text().splitlines()
    start = next(i for i, row in enumerate(text) if row.strip().startswith(f"def {function}("))
    return next(i for i, row in enumerate(text[start:], start + 1) if marker in row)


TREES = {
    "dict": (lambda a, b: {"one": a, "two": b}, ["one", "two", "batch.one", "batch.two"]),
    "list": (lambda a, b: [a, b], ["state.0", "state.1", "batch.0", "batch.1"]),
    "tuple": (lambda a, b: (a, b), ["state.0", "state.1", "batch.0", "batch.1"]),
    "namedtuple": (Pair, ["one", "two", "batch.one", "batch.two"]),
    "dataclass": (Record, ["one", "two", "batch.one", "batch.two"]),
    "nested": (lambda a, b: {"x": [Pair(a, {"z": b})], "n": {}}, ["x.0.one", "x.0.two.z", "batch.x.0.one", "batch.x.0.two.z"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", TREES)
def test_state_and_batch_may_be_any_pytree(kind):
    make, names = TREES[kind]

    def step(state, batch):
        grads, value = grad_and_value(
            lambda p: loss(*pytree.tree_leaves(p), *pytree.tree_leaves(batch))
        )(state)
        return pytree.tree_map(lambda p, g: p - 0.1 * g, state, grads), {
            "loss": make(value, value * 2)
        }

    state, batch = make(W, B), make(X, Y)
    program = trace(step, state, batch)
    assert [v.name for v in program.graph.inputs] == names
    assert zt.ir.check(program.graph).batch == set(program.graph.inputs[2:])
    got, want = evaluated(program, state, batch), step(state, batch)
    assert pytree.tree_structure(got) == pytree.tree_structure(want)
    assert distance(got, want) < 1e-6


def test_numbers_are_inputs():
    def counts(state, batch, lr, power=2):
        new, value = step(state, batch, lr * state["decay"] ** state["n"] * power)
        return {**new, "decay": state["decay"], "n": state["n"] + 1}, value

    state = {**STATE, "decay": 0.5, "n": 1}
    graph = (program := trace(counts, state, BATCH, 0.1, 3)).graph
    assert [str(v) for v in graph.inputs if not v.shape] == [
        "decay: f64[]",
        "n: i64[]",
        "lr: f64[]",
        "power: i64[]",
    ]
    assert {v.name for v in graph.batch} == {"batch.0", "batch.1"}
    for lr, n in ((0.1, 1), (0.7, 4)):
        new = evaluated(program, state | {"n": n}, BATCH, lr, 3)[0]
        assert distance(new["params"], counts(state | {"n": n}, BATCH, lr, 3)[0]["params"]) < 1e-6
        assert new["n"] == n + 1 and new["decay"] == 0.5


def test_flags_and_literals_are_constants():
    def flagged(state, batch):
        x = batch["x"] if batch["mask"] is None else 0
        return state, x.sum() * (2 if batch["double"] else 1) + len(batch["mode"]) + torch.tensor(
            [1.0, 2.0]
        )

    batch = {"x": X, "double": True, "mask": None, "mode": "fast"}
    for given in (batch, batch | {"double": False}):
        program = trace(flagged, STATE, given)
        assert [
            x.abstract.value
            for x in program.signature.leaves
            if isinstance(x.abstract, Constant) and x.abstract.value is not None
        ] == [given["double"], "fast"]
        want = flagged(STATE, given)[1]
        assert torch.equal(evaluated(program, STATE, given)[1], want)
        assert torch.equal(to_fx(program.graph)(*flat(STATE, given))[-1], want)


LAYOUTS = {
    "transposed": X.T.contiguous().T,
    "strided": X.repeat(2, 1)[::2],
    "expanded": X[:, :1].expand(3, 4),
}


@pytest.mark.parametrize("x", [*LAYOUTS.values(), X[:0]], ids=[*LAYOUTS, "empty"])
def test_a_batch_may_have_any_strides(x):
    def views(state, batch):
        new, _ = step(state, batch)
        return new, batch[0].reshape(-1).flip(0) * 2

    batch = (x, Y[: len(x)])
    got, want = evaluated(trace(views, STATE, batch), STATE, batch), views(STATE, batch)
    torch.testing.assert_close(got, want, equal_nan=True)


def test_equations_have_lines_and_regions_and_gradients_are_marked():
    graph, given = trace(step, STATE, BATCH, 0.1).graph, flat(STATE, BATCH, 0.1)
    tanh, square, seed = (
        line("loss", "tanh(x @ w)"),
        line("loss", ".square()"),
        line("step", "grad_and_value"),
    )
    inside = {(region, at) for region in ("forward", "backward") for at in (tanh, square, seed)}
    assert {(e.region, e.source.line) for e in graph.eqns} == inside | {
        ("update", line("step", "p - lr"))
    }
    assert {e.source.file for e in graph.eqns} == {__file__}
    assert [e.source.line for e in graph.eqns if "tanh" in str(e.op)] == [tanh] * 2
    assert f"# test_trace.py:{tanh} loss" in str(graph)
    marks = {e.outs[0].name: e.args[1].name for e in graph.eqns if str(e.op) == "gradient"}
    assert marks == {"params.w.grad": "params.w", "params.b.grad": "params.b"}
    module = to_fx(graph)
    assert all(map(torch.equal, module(*given), zt.ir.evaluate(graph, *given)))
    nodes = [n for n in module.graph.nodes if n.op == "call_function"]
    # Views that are part of another call run with it, and each equation runs once.
    weights = [weight for n in nodes for weight in n.meta["weights"]]
    assert len(weights) == len(graph.eqns)
    assert [n.meta["eqn"] for n in nodes] == [e for e, weight in zip(graph.eqns, weights) if weight]


def by_grad(f, params, backward=False):
    leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
    if not backward:
        return dict(zip(leaves, torch.autograd.grad(f(leaves), list(leaves.values()))))
    f(leaves).backward()
    return {k: v.grad for k, v in leaves.items()}


def at_worst_nearby(f, params):
    g = grad(f)(params)
    return grad(f)({k: p + 0.05 * g[k].sign() for k, p in params.items()})


def by_row(f, params):
    rows = [grad(f)(params, slice(i, i + 1)) for i in range(3)]
    return {k: sum(g[k] for g in rows) / 3 for k in params}


WAYS = {
    "func": (lambda f, params: grad(f)(params), 1, set()),
    "grad": (by_grad, 1, set()),
    "backward": (partial(by_grad, backward=True), 1, set()),
    "sam": (at_worst_nearby, 2, {line("at_worst_nearby", ".sign()")}),
    "accumulation": (by_row, 3, {line("by_row", "/ 3")}),
}


@pytest.mark.parametrize("way, times, updates", WAYS.values(), ids=WAYS)
def test_every_way_to_take_gradients_gives_the_same_regions(way, times, updates):
    def descends(params, x, y):
        g = way(lambda p, rows=slice(None): loss(p["w"], p["b"], x[rows], y[rows]), params)
        return {k: p.detach() - 0.1 * g[k] for k, p in params.items()}, None

    program = trace(descends, STATE["params"], X, Y)
    graph = zt.ir.check(program.graph)
    counts = Counter((e.region, str(e.op)) for e in graph.eqns)
    assert counts["forward", "aten.mm.default"] == counts["forward", "aten.tanh.default"] == times
    assert (
        counts["backward", "aten.mm.default"]
        == counts["backward", "aten.tanh_backward.default"]
        == times
    )
    assert counts["backward", "gradient"] == 2 * times and not counts["update", "gradient"]
    assert {e.source.line for e in graph.eqns if e.region == "update"} == {
        line("descends", "- 0.1"),
        *updates,
    }
    assert (
        distance(evaluated(program, STATE["params"], X, Y)[0], descends(STATE["params"], X, Y)[0])
        < 1e-6
    )


def traced(*layers, wrap=lambda f, x: f(x)):
    """Trace the step of a module, and check that the program computes the same under the same seed.

    Returns the step, its state, its program and the new state.
    """
    model = nn.Sequential(nn.Linear(4, 64), *layers, nn.Linear(64, 2))

    def step(state, x, y):
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        buffers = {k: b.clone() for k, b in state["buffers"].items()}
        value = F.mse_loss(wrap(lambda x: functional_call(model, (params, buffers), (x,)), x), y)
        grads = torch.autograd.grad(value, list(params.values()))
        return {
            "params": {k: params[k].detach() - 0.1 * g for k, g in zip(params, grads)},
            "buffers": buffers,
        }, value

    state = {
        "params": {k: p.detach() for k, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }
    program = trace(step, state, X, Y)
    torch.manual_seed(7)
    got = evaluated(program, state, X, Y)
    torch.manual_seed(7)
    assert distance(got, pytree.tree_map(torch.detach, step(state, X, Y))) < 1e-6
    return step, state, zt.ir.check(program.graph), got[0]


def test_casts_of_autocast_are_in_the_program():
    _, _, graph, _ = traced(
        nn.Tanh(), wrap=lambda f, x: torch.autocast("cpu", torch.bfloat16)(f)(x).float()
    )
    casts = [e for e in graph.eqns if "_to_copy" in str(e.op) and e.region == "forward"]
    types = {e.ins[0].name: e.outs[0].type for e in casts}
    assert types["params.0.weight"] == "bf16[64,4]" and types["params.2.bias"] == "bf16[2]"


def test_random_draws_of_dropout_are_in_forward():
    step, state, graph, _ = traced(nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.1))
    lowered = zt.shard_params(zt.AbstractMesh(dp=2), stage=3)(step).lower(state, X, Y)
    for program in (graph, lowered.graph):
        assert [e.region for e in program.eqns if is_random(e)] == ["forward"] * 2


def test_buffers_of_batch_norm_are_state():
    _, state, graph, new = traced(nn.BatchNorm1d(64), nn.Tanh())
    assert "buffers.1.running_mean" in [v.name for v in graph.inputs]
    assert (
        new["buffers"]["1.num_batches_tracked"] == 1
        and state["buffers"]["1.num_batches_tracked"] == 0
    )
    assert not torch.equal(new["buffers"]["1.running_var"], state["buffers"]["1.running_var"])


def test_the_batch_norm_of_cudnn_becomes_a_functional_one():
    """The operation does not declare that it writes the running statistics. It can be traced by name without a GPU."""

    def step(state, x):
        mean, var = state["mean"].clone(), state["var"].clone()
        y, *_ = torch.ops.aten.cudnn_batch_norm(
            x, state["var"], state["mean"], mean, var, True, 0.1, 1e-5
        )
        return {"mean": mean, "var": var}, y

    x, state = torch.randn(8, 3, 4), {"mean": torch.zeros(3), "var": torch.ones(3)}
    lowered = zt.Step.of(step).lower(state, x)
    mean, var = torch.zeros(3), torch.ones(3)
    y = F.batch_norm(x, mean, var, training=True)
    assert "aten._native_batch_norm_legit_functional.default" in {
        str(e.op) for e in lowered.graph.eqns
    }
    assert distance(lowered.compile()(state, x), ({"mean": mean, "var": var}, y)) == 0


def test_a_checkpoint_is_recomputed_in_backward():
    checkpointed = partial(checkpoint, use_reentrant=False)
    _, _, graph, _ = traced(nn.Tanh(), wrap=checkpointed)
    assert [e.region for e in graph.eqns if "tanh.default" in str(e.op)] == ["forward", "backward"]
    _, _, graph, _ = traced(nn.Dropout(0.5), wrap=checkpointed)
    assert [e.region for e in graph.eqns if is_random(e)] == ["forward"], (
        "the mask of a dropout is kept"
    )


@pytest.mark.filterwarnings("ignore:trace. the step writes into its argument")
def test_tracing_changes_neither_the_arguments_nor_the_generator():
    w, seed = W.clone().requires_grad_(), torch.get_rng_state()
    w.grad = torch.ones_like(w)
    state, batch = {"params": {"w": w, "b": B.clone()}}, (X.clone(), Y.clone())

    def writes(state, batch):
        batch[0].mul_(2)
        new, value = step(state, (batch[0] * torch.rand_like(batch[0]), batch[1]))
        state["params"]["b"].zero_()
        return new, value

    program = trace(writes, state, batch)
    assert (
        torch.equal(w, W)
        and torch.equal(w.grad, torch.ones_like(w))
        and w.requires_grad
        and w.is_leaf
    )
    assert torch.equal(state["params"]["b"], B) and torch.equal(batch[0], X) and not B.requires_grad
    assert torch.equal(torch.get_rng_state(), seed)
    assert str(trace(writes, state, batch).graph) == str(program.graph)
    assert str(trace(writes, pytree.tree_map(lambda x: x.to("meta"), state), batch).graph) == str(
        program.graph
    )


@pytest.fixture
def mesh():
    yield zt.make_mesh("cpu", dp=1)
    torch.distributed.destroy_process_group()


def test_an_output_may_hold_the_state(mesh):
    def returns(state, batch):
        new, value = step(state, batch)
        return new, {
            "old": state["params"],
            "new": new["params"],
            "view": new["params"]["w"].T,
            "loss": value,
        }

    run = zt.shard_params(mesh)(returns)
    state, plain, held = run.shard(STATE), STATE, []
    for _ in range(3):
        state, output = run(state, BATCH)
        plain, want = returns(plain, BATCH)
        held.append((output, want))
    assert all(distance(output, want) < 1e-6 for output, want in held)


def test_leaves_are_traced_on_their_device(mesh):
    """A DTensor on its own device, and a meta tensor on the device of the rest of the program."""

    def placed(state, x):
        return state + torch.arange(3, device=state.device), torch.zeros(3, device=x.device)

    def devices(state, x, **where):
        program = trace(placed, state, x, shardings=[LeafSharding(("dp",))] * 2, **where)
        return {
            str(e.kwargs["device"])
            for e in program.graph.eqns
            if e.kwargs.get("device") is not None
        }

    x = torch.empty(3, device="meta")
    laid = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    assert (
        Abstract.of(laid, True).device == "meta"
        and Abstract.of(zt.shard_params(mesh)(placed).shard(X[0]), True).device == "cpu"
    )
    assert devices(laid, x, device="meta") == {"meta"} and devices(laid, x) == devices(
        x, torch.ones(3)
    ) == {"cpu"}


@pytest.mark.parametrize(
    "read", [lambda x: x * W.tolist()[0][0], lambda x: x * torch.tensor([W[0, 0], W[0, 0]]).sum()]
)
def test_values_of_a_tensor_from_outside_are_not_read(read):
    with pytest.raises(
        ValueError,
        match=r"reads a tensor \[.*neither its state nor its batch(?s:.)*test_trace.py:\d+ .*<lambda>",
    ):
        trace(lambda state, x: (state, read(x)), STATE, X)
    assert trace(lambda state, x: (state, x * torch.tensor([1.0, 2.0]).sum()), STATE, X)


def test_a_fused_optimizer_takes_no_memory_while_it_is_traced():
    """PyTorch would run it on real tensors, which take four times the memory of the model."""

    def fused(state, x):
        lists = [
            [v] for v in (state["p"].clone(), x.clone(), state["m"].clone(), state["v"].clone())
        ]
        rates = {
            "lr": torch.tensor(0.1),
            "beta1": 0.9,
            "beta2": 0.99,
            "weight_decay": 0.1,
            "eps": 1e-8,
        }
        torch._fused_adamw_(*lists, [], [torch.ones(())], **rates, amsgrad=False, maximize=False)
        return {k: each[0] for k, each in zip("pmv", (lists[0], lists[2], lists[3]))}, 0.0

    big = torch.empty(1 << 40, 64, device="meta")
    assert "_fused_adamw" in str(trace(fused, dict.fromkeys("pmv", big), big).graph)


def several(state, batch, way):
    """Two losses with a seed gradient for each. `way` calls backward."""
    params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
    out = batch[0] @ params["w"] + params["b"]
    losses = [out.square().mean(), out.sum()]
    way(losses, [torch.tensor(1.0), torch.tensor(0.1)], params)
    return {
        **state,
        "params": {k: p.detach() if p.grad is None else p.grad for k, p in params.items()},
    }, 0.0


WAYS = {
    "seeds": lambda losses, seeds, ps: torch.autograd.backward(losses, seeds),
    "grad_tensors": lambda losses, seeds, ps: torch.autograd.backward(losses, grad_tensors=seeds),
    "gradient": lambda losses, seeds, ps: losses[0].backward(seeds[1]),
    "one_input": lambda losses, seeds, ps: losses[0].backward(inputs=ps["w"]),
    "inputs": lambda losses, seeds, ps: torch.autograd.backward(losses, seeds, inputs=[ps["b"]]),
    "dict": lambda losses, seeds, ps: losses[1].backward(inputs={"w": ps["w"]}),
}
if torch.__version__ < "2.13":
    del WAYS["dict"]  # this torch does not accept a dict yet


@pytest.mark.parametrize("way", WAYS)
def test_backward_accepts_seeds_and_inputs_in_every_form(way):
    run = zt.Step(partial(several, way=WAYS[way]))
    want, _ = several(STATE, BATCH, WAYS[way])
    assert distance(run(run.shard(STATE), BATCH)[0], want) <= 1e-6


def test_the_gradient_of_an_intermediate_value_can_be_retained():
    def kept(state, batch):
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        hidden = batch[0] @ params["w"]
        hidden.retain_grad()
        (hidden + params["b"]).square().mean().backward()
        return {**state, "params": {k: p.grad for k, p in params.items()}}, hidden.grad

    run = zt.Step(kept)
    want = kept(STATE, BATCH)
    assert distance(run(run.shard(STATE), BATCH), want) <= 1e-6


def test_a_scalar_argument_may_be_a_tensor():
    def scaled(state, lr):
        return state.clone().add_(1.0, alpha=lr), torch.sub(state, state * 2, alpha=lr)

    w, lr = torch.randn(3), torch.tensor(0.5)
    for got, want in zip(zt.Step(scaled)(w.clone(), lr), scaled(w, 0.5)):
        assert torch.allclose(got, want)
    with pytest.raises(ValueError, match="reads a tensor's value while it is traced"):
        zt.Step(lambda s, lr: (torch.add(s, s, alpha=lr, out=torch.empty_like(s)), 0.0)).trace(
            w, lr
        )


TABLE = nn.Embedding(4, 2, sparse=True)
SPARSE = {
    "embedding": lambda w, ids: F.embedding(ids, w, sparse=True),
    "torch.embedding": lambda w, ids: torch.embedding(w, ids, -1, False, True),
    "embedding_bag": lambda w, ids: F.embedding_bag(ids, w, mode="sum", sparse=True),
    "module": lambda w, ids: functional_call(TABLE, {"weight": w}, (ids,)),
    "gather": lambda w, ids: torch.gather(w, 0, ids, sparse_grad=True),
}
LOOKUPS = {
    "one_hot": lambda w, ids: F.one_hot(ids, 4).float() @ w,
    "one_hot in vmap": lambda w, ids: (
        torch.func.vmap(lambda i: F.one_hot(i, num_classes=4))(ids).float() @ w
    ),
    "embedding": lambda w, ids: F.embedding(ids, w),
    "embedding_bag": lambda w, ids: F.embedding_bag(ids, w, mode="sum"),
    "gather": lambda w, ids: torch.gather(w, 0, ids),
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("way", [torch.autograd.grad, torch.autograd.backward, grad])
def test_a_sparse_gradient_is_refused(name, way):
    def step(state, ids):
        if way is grad:
            grad(lambda w: SPARSE[name](w, ids).square().sum())(state["w"].detach())
        else:
            inputs = () if way is torch.autograd.backward else (state["w"],)
            way(SPARSE[name](state["w"], ids).square().sum(), *inputs)
        return state, 0.0

    state, ids = {"w": W.clone().requires_grad_()}, torch.tensor([[0, 2], [3, 2], [1, 0]])
    with pytest.raises(
        ValueError, match=r"a sparse gradient.*\n  at .*test_trace.*\nLeave out sparse"
    ):
        zt.Step.of(step).trace(state, ids)


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("way", ["func", "autograd"])
def test_gradients_of_lookups_are_dense(name, way):
    def step(state, ids, way=way):
        value = lambda p: LOOKUPS[name](p["w"], ids).square().sum()
        g = (grad(value) if way == "func" else partial(by_grad, value))(state)["w"]
        return {"w": state["w"] - 0.1 * g}, None

    state, ids = {"w": W}, torch.tensor([[0, 2], [3, 2], [1, 0]])
    lowered = zt.shard_params(zt.AbstractMesh(dp=2))(step).lower(state, ids)
    assert not any("sparse_coo" in str(e.op) for e in zt.ir.check(lowered.graph).eqns)
    want = step(state, ids, way="autograd")[0]
    assert distance(lowered.lockstep(state, [(ids,), (ids,)])[0], want) < 1e-6


def forward_mode(state, x):
    """A directional derivative that the step reduces itself, and an operation without a sharding rule (`renorm`)."""
    weights = torch.renorm(state["w"], 2, 0, 1.0)
    direction = torch.ones_like(state["w"])
    value, slope = torch.func.jvp(
        lambda w: torch.tanh(x @ (w + weights)).square().mean(), (state["w"],), (direction,)
    )
    return {"w": state["w"] - 0.1 * zt.pmean(slope, "dp") * direction}, value


# Forward-mode differentiation of PyTorch uses torch.jit.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize("stage", range(4))
def test_a_step_without_autograd_has_a_forward(stage):
    state, x = {"w": W}, torch.cat([X, X + 1])
    lowered = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)(forward_mode).lower(state, X)
    regions = {str(e.op): e.region for e in zt.ir.check(lowered.graph).eqns}
    assert [regions[f"aten.{op}"] for op in ("renorm.default", "tanh.default", "mean.default")] == [
        "forward"
    ] * 3
    assert regions["aten.sub.Tensor"] == "update"
    new, outputs = lowered.lockstep(state, [(X,), (X + 1,)])
    want, value = forward_mode(state, x)
    assert distance(new, want) < 1e-6 and distance(outputs[0], value) < 1e-6


def test_a_step_without_autograd_must_reduce_what_enters_its_state():
    def tracks(state, x):
        return {"w": 0.9 * state["w"] + x.mean()}, x.sum()

    with pytest.raises(ValueError, match=r"reaches state w.*without having been reduced") as e:
        zt.shard_params(zt.AbstractMesh(dp=2))(tracks).lower({"w": W}, X)
    assert f"test_trace.py:{line('tracks', 'x.mean')}" in str(e.value)


WRAPPED = Scaled(torch.zeros(4, 4, dtype=E4M3), torch.ones(()))
WRAPPERS = {
    "state.w": (lambda state, x: (state, x.sum()), WRAPPED, torch.ones(4)),
    "x": (lambda state, x: (state, x.sum()), torch.ones(4), WRAPPED),
    "the output": (lambda state, x: (state, ToScaled.apply(x)), torch.ones(4), torch.ones(4, 4)),
    "the output['x'][0]": (
        lambda state, x: (state, {"x": [ToScaled.apply(x)]}),
        torch.ones(4),
        torch.ones(4, 4),
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_tensor_that_holds_others_is_none_of_a_program(name):
    """A step may make such tensors: tests/transforms/test_scaled_casts.py."""
    step, w, x = WRAPPERS[name]

    def wrapped(state, x):
        return step(state, x)

    with pytest.raises(
        TypeError,
        match=rf"trace: {re.escape(name)} is a tests.support.fp8.Scaled, which holds other tensors",
    ) as e:
        zt.Step.of(wrapped).trace({"w": w}, x)
    assert "leave out enable_fsdp_float8_all_gather" in str(e.value)


def test_parameters_that_hold_other_tensors_are_not_lifted():
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(WRAPPED)
    with pytest.raises(
        TypeError, match=r"lift: weight is a tests.support.fp8.Scaled, which holds other tensors"
    ):
        zt.lift(lambda x: None, model, torch.optim.SGD(model.parameters(), lr=0.1))


def of_a_variational_model(q, x):
    prior = Normal(torch.zeros(3), torch.ones(3))
    return kl_divergence(q, prior).sum() + (q.rsample() - x).square().sum()


def of_a_policy(q, x):
    choices = Categorical(logits=q.loc)
    return choices.log_prob(choices.sample()).sum() + choices.entropy().sum() + q.log_prob(x).sum()


@pytest.mark.parametrize("loss_of", [of_a_variational_model, of_a_policy])
def test_distributions_are_traced_without_their_checks_of_values(loss_of):
    def step(state, x):
        loss = lambda state: loss_of(Normal(state["mean"], state["log"].exp()), x)
        return state, torch.func.grad_and_value(loss)(state)

    state, x = {"mean": torch.randn(2, 3), "log": torch.randn(2, 3)}, torch.randn(2, 3)
    Distribution.set_default_validate_args(True)  # torch.compile, in an earlier test, turns it off
    torch.manual_seed(0)
    want = step(state, x)[1]
    torch.manual_seed(0)
    assert distance(zt.Step.of(step)(clone(state), x)[1], want) == 0
    with pytest.raises(
        ValueError, match="to satisfy the constraint"
    ):  # they check again after the trace
        Normal(torch.zeros(1), -torch.ones(1))
