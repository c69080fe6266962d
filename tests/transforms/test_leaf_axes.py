"""`shard_params` over several axes: joint axes, and an axis for each leaf."""

from __future__ import annotations

import functools
import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support import context_parallel, dtensors, experts
from tests.support.parallel import dual
from tests.support.parallel import own as c10d
from tests.support.programs import CASES
from tests.support.worlds import ALL, default_dtype, distance, plain, sharded
from ztrans.ir.interpreter import lockstep, split_state

JOINT = zt.AbstractMesh(dp=2, cp=3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_step_over_two_axes_as_one_computes_the_same(stage, hosts):
    """Odd dims are cut over six ranks; with two hosts the shards are replicated."""
    hsdp = {"replicate_axis": "host"} if hosts > 1 else {}
    mesh = zt.AbstractMesh(host=hosts, dp=2, cp=2) if hosts > 1 else JOINT
    with default_dtype(torch.float64):
        for name in ("uneven", "clipped")[:hosts]:
            case = CASES[name]
            truth, outputs = plain(case, steps=3)
            state, each, lowered = sharded(
                case, 24 // 4 if hosts == 1 else 8, stage, 3, mesh=mesh, axis=("dp", "cp"), **hsdp
            )
            assert distance(state, truth) < 1e-10
            assert distance(each[-1][0], outputs[-1]) < 1e-10
            assert ("@dp*cp" in str(lowered)) == (stage > 0)
            assert {e.kwargs["axis"] for e in lowered.graph.eqns if "axis" in e.kwargs} <= {
                "dp*cp",
                "host",
            }


def exchange(x: torch.Tensor) -> torch.Tensor:
    """Send row r to rank r of `ep`, and receive a row from each."""
    return c10d.wait_tensor(c10d.all_to_all_single(x.contiguous(), [1, 1], [1, 1], "ep"))


exchanged = dual(exchange, lambda g: exchanged(g))
EXPERTS = zt.AbstractMesh(dp=2, ep=2)


def axis(path: str, leaf: torch.Tensor) -> str | tuple[str, ...]:
    return "dp" if experts.is_expert(path) else ("dp", "ep")


def of_function(mesh: zt.AbstractMesh, **options) -> zt.Transform:
    return zt.shard_params(mesh, axis=axis, dim=experts.inner, **options)


@functools.cache
def traced_experts(hosts: int) -> zt.stages.Traced:
    """What a rank of one or two hosts traces, at any stage."""
    step = experts.make_step(exchanged, ranks=2)
    rows = experts.batches(1)[0].chunk(4 * hosts)[0]
    return zt.Step.of(step).trace(experts.of_rank(experts.state(), 0, 2), rows)


@functools.cache
def trained_experts(steps: int) -> tuple[dict, torch.Tensor]:
    """The state and the last output of the plain step."""
    step, state, value = experts.make_step(), experts.state(), None
    for x in experts.batches(steps):
        state, value = step(state, x)
    return state, value


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("hosts", [1, 2])
def test_experts_and_dense_layers_are_reduced_in_one_step(stage, hosts):
    """Gradients of experts are summed over `ep` by the step's own messages, and reduced over `dp`; all others over both."""
    mesh = zt.AbstractMesh(dp=2, ep=2) if hosts == 1 else zt.AbstractMesh(host=2, dp=2, ep=2)
    hsdp = {"replicate_axis": "host"} if hosts > 1 else {}
    truth, value = trained_experts(3)
    lowered = (
        traced_experts(hosts)
        .with_transforms((of_function(mesh, stage=stage, **hsdp), *ALL))
        .lower()
    )
    new, values = experts.trained(lowered.graph, experts.state(), experts.batches(3))
    assert distance(new, truth) < 1e-12
    assert distance(values[0], value) < 1e-12
    axes = {}  # of each leaf, that over which its gradient is reduced
    for e in lowered.graph.eqns:
        is_of_gradient = e.provenance is not None and e.provenance.role == "grad"
        if is_of_gradient and e.kwargs["axis"] != "host":
            axes.update(dict.fromkeys(e.provenance.paths, e.kwargs["axis"]))
    assert axes == {
        f"params.{k}": "dp" if experts.is_expert(k) else "dp*ep" for k in experts.state()["params"]
    }


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["whole", "shard"])
def test_experts_in_micro_batches(keep):
    data = experts.batches(2)
    plain_step = experts.make_step()
    truth = experts.state()
    for x in data:
        truth, _ = plain_step(truth, x)
    step = zt.chain(of_function(EXPERTS), *ALL, zt.accumulate(2, keep=keep))(
        experts.make_step(exchanged, ranks=2)
    )
    lowered = step.lower(experts.of_rank(experts.state(), 0, 2), data[0].chunk(4)[0])
    new, _ = experts.trained(lowered.graph, experts.state(), data)
    assert distance(new, truth) < 1e-12


def test_functions_of_leaves_get_the_shapes_before_the_step_divides_them():
    """Experts are DTensors on `ep`, so a program has half of each."""
    seen: dict[str, set] = {"axis": set(), "where": set(), "dim": set()}

    def lowered(mesh):
        note = lambda name, path, leaf, result: (seen[name].add((path, tuple(leaf.shape))), result)[
            1
        ]
        shard = zt.shard_params(mesh, axis=lambda path, leaf: note("axis", path, leaf, axis(path, leaf)),
                                where=lambda path, leaf: note("where", path, leaf, True),
                                dim=lambda path, leaf: note("dim", path, leaf, experts.inner(path, leaf)))  # fmt: skip
        exchange = lambda x: funcol.all_to_all_single_autograd(
            x.contiguous(), [1, 1], [1, 1], mesh["ep"]
        )
        step = shard(experts.with_dtensors(experts.make_step(exchange, 2)))
        state = experts.divided(experts.state(), mesh["ep"])
        return str(step.lower(state, experts.batches(1)[0])), step.shard(state)["params"][
            "up"
        ].placements

    ((text, placements),) = dtensors.on_ranks([0], lowered, dp=2, ep=2)
    assert "params.up: f64[2,6@dp,10]" in text and "params.dense: f64[6@dp*ep,6]" in text
    assert placements == (Shard(1), Shard(0))
    shapes = set()
    for tree, leaves in experts.state().items():
        shapes.update((f"{tree}.{k}", tuple(p.shape)) for k, p in leaves.items())
    assert seen == dict.fromkeys(seen, shapes)


def gather(x: torch.Tensor) -> torch.Tensor:
    """Gather over `cp` along dim 1."""
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x.movedim(1, 0).contiguous(), 2, "cp"))
    return whole.movedim(0, 1)


def scatter_sum(g: torch.Tensor) -> torch.Tensor:
    mine = c10d.wait_tensor(
        c10d.reduce_scatter_tensor(g.movedim(1, 0).contiguous(), "sum", 2, "cp")
    )
    return mine.movedim(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_attention_over_two_axes_computes_the_same(stage):
    """The sequence is cut over `cp`, keys and values are gathered in the step, and gradients reduced over both axes."""
    step = context_parallel.make_step(context_parallel.gathered(dual(gather, scatter_sum)))
    data = context_parallel.batches(3)
    truth = context_parallel.state()
    new = context_parallel.state()
    shard = zt.chain(
        zt.shard_params(zt.AbstractMesh(dp=2, cp=2), axis=("dp", "cp"), stage=stage), *ALL
    )
    lowered = shard(step).lower(new, *context_parallel.part(data[0], 0, 0))
    for batch in data:
        truth, value = context_parallel.plain_step(truth, *batch)
        new, values = lowered.lockstep(
            new, [context_parallel.part(batch, d, c) for d in range(2) for c in range(2)]
        )
    assert distance(new, truth) < 1e-14 and distance(values[0], value) < 1e-14


def test_experts_cost_what_they_hold():
    """On dp=64, stacked experts [8, 512, 512] that are cut along an inner dim: their own bytes, 63/64 of them."""
    weight = torch.empty(8, 512, 512, device="meta")
    bias = torch.empty(512, device="meta")

    def step(state, x):
        w, b = (p.detach().requires_grad_() for p in state.values())
        value = (torch.einsum("nw,ewi->eni", x, w) + b).square().mean()
        grads = torch.autograd.grad(value, [w, b])
        return {k: p - 0.1 * g for (k, p), g in zip(state.items(), grads)}, value.detach()

    by_leaf = {
        "axis": lambda path, leaf: "dp" if leaf.ndim == 3 else ("dp", "ep"),
        "dim": lambda path, leaf: int(leaf.ndim == 3),
    }
    lowered = zt.shard_params(zt.AbstractMesh(dp=64, ep=2), **by_leaf)(step).lower(
        {"w": weight, "b": bias}, torch.empty(4, 512, device="meta")
    )
    cost = lowered.cost_analysis()
    assert cost.over("dp", "param") == cost.over("dp", "grad") == weight.nbytes * 63 // 64
    assert cost.over("dp*ep", "grad") == bias.nbytes * 127 // 128


HOSTS = zt.AbstractMesh(host=2, dp=2)


def of_hosts(path: str, leaf: torch.Tensor) -> tuple[str, ...]:
    """Each host has its own `params`; all hosts share the other leaves."""
    return ("dp",) if path.startswith("params") else ("host", "dp")


def on_hosts(
    step, stage: int, shared: dict, params: list[dict]
) -> tuple[list[dict], zt.stages.Cost]:
    """The new state of each host, its parts joined, and what the step costs.

    Args:
        shared: the leaves that all hosts share.
        params: the leaves of each host.
    """
    sharded_step = zt.chain(zt.shard_params(HOSTS, axis=of_hosts, stage=stage), *ALL)(step)
    states = [{"params": of_host, **shared} for of_host in params]
    lowered = sharded_step.lower(states[0])
    leaves = [pytree.tree_leaves(state) for state in states]
    inputs = [split_state(lowered.graph, leaves[rank // 2])[rank] for rank in range(4)]
    outputs = lockstep(lowered.graph, inputs)
    new = []
    for host in range(2):
        joined = []
        for k, v in enumerate(lowered.graph.inputs):
            parts = [rank[k] for rank in outputs[2 * host : 2 * host + 2]]
            if v.split is not None and v.split.axis == "host*dp":
                parts = [rank[k] for rank in outputs]
            joined.append(torch.cat(parts) if v.split is not None else parts[0])
        new.append(pytree.tree_unflatten(joined, pytree.tree_structure(states[0])))
    return new, lowered.cost_analysis()


@pytest.mark.parametrize("stage", range(4))
def test_leaves_of_each_host_beside_leaves_of_all_hosts(stage):
    """DiLoCo: an outer step over what all hosts share. A part of a leaf of one host is no part of that of another."""

    def sync(state):
        new = {}
        for k, p in state["params"].items():
            moved = zt.pmean(state["outer"][k] - p, "host")
            momentum = 0.9 * state["momentum"][k] + moved
            new[k] = momentum, state["outer"][k] - 0.7 * (moved + 0.9 * momentum)
        outer = {k: leaf for k, (_, leaf) in new.items()}
        params = {k: leaf.clone() for k, leaf in outer.items()}
        return {
            "params": params,
            "momentum": {k: m for k, (m, _) in new.items()},
            "outer": outer,
        }, None

    torch.manual_seed(0)
    leaves = lambda: {"w": torch.randn(8, 6), "b": torch.randn(5), "scale": torch.randn(())}
    shared = {"momentum": leaves(), "outer": leaves()}
    params = [leaves(), leaves()]
    new, cost = on_hosts(sync, stage, shared, params)
    mean = {k: (params[0][k] + params[1][k]) / 2 for k in params[0]}
    truth, _ = sync({"params": mean, **shared})
    assert distance(new[0], truth) < 1e-6 and distance(new[1], truth) < 1e-6
    scale = 4
    if stage == 0:
        assert cost.over("host", "pmean") == 8 * 6 * 4 + 5 * 4 + scale
    else:
        # The mean is scattered to the four ranks that hold its parts, two rows each. No rank has a whole one.
        assert cost.over("host", "pmean") == scale
        assert cost.over("host*dp", "pmean") == 3 * 2 * (6 + 1) * 4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_whole_value_of_one_host_beside_a_leaf_of_all_hosts(stage):
    """Nothing that the equation reads is cut over an axis along which its result is the same."""

    def step(state):
        own = state["params"]["w"] * 2
        total = state["shared"] * own
        return {"params": {"w": total.sum() + own}, "shared": zt.pmean(total, "host")}, None

    shared = {"shared": torch.arange(1.0, 9.0)}
    params = [{"w": torch.tensor(3.0)}, {"w": torch.tensor(5.0)}]
    new, _ = on_hosts(step, stage, shared, params)
    for host, of_host in enumerate(new):
        assert torch.equal(of_host["shared"], shared["shared"] * 8)
        own = 2 * params[host]["w"]
        assert torch.equal(of_host["params"]["w"], shared["shared"].sum() * own + own)


def trained(state, x):
    w = state["w"].detach().requires_grad_()
    loss = (x @ w).square().mean()
    (g,) = torch.autograd.grad(loss, [w])
    return {"w": state["w"] - 0.1 * g}, loss.detach()


def reduced_over_host(state, x):
    return trained(state, c10d.wait_tensor(c10d.all_reduce(x, "avg", "host")))


def shared_by_hosts(path, leaf):
    return ("host", "dp")


@pytest.mark.parametrize(
    "step, options, warns",
    [
        (trained, {}, True),
        (trained, {"stage": 0}, True),
        (trained, {"replicate_axis": "host"}, False),
        (trained, {"axis": ("host", "dp")}, False),
        (trained, {"axis": shared_by_hosts}, False),
        (trained, {"independent_axis": "host"}, False),
        (reduced_over_host, {}, False),
        (lambda state, x: (state, (x @ state["w"]).sum()), {}, False),
        (lambda state, x: ({"w": state["w"] * 0.9}, None), {}, False),
    ],
)
def test_an_axis_over_which_nothing_is_reduced_is_a_warning(step, options, warns):
    """Not if it is meant, if the step itself reduces over it, or if no rank's batch reaches the state."""
    shard = zt.shard_params(zt.AbstractMesh(host=2, dp=2), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard(step).lower({"w": torch.ones(8, 4)}, torch.ones(2, 8))
    texts = [str(w.message) for w in caught if "train apart" in str(w.message)]
    assert len(texts) == warns
    if warns:
        assert "trained reduces nothing over 'host'" in texts[0]
        assert "replicate_axis='host'" in texts[0] and "independent_axis='host'" in texts[0]


def test_independent_axes_are_axes_of_the_mesh():
    with pytest.raises(ValueError, match="independent_axis='pp' is not an axis of the mesh"):
        zt.shard_params(HOSTS, independent_axis="pp")


def test_a_second_transform_for_other_leaves_is_refused():
    first = zt.shard_params(EXPERTS, axis=("dp", "ep"), where=lambda path, leaf: True)
    second = zt.shard_params(EXPERTS, axis="dp", where=experts.is_expert)
    message = (
        r"(?s)shard_params: applied twice with different options.*axis=lambda path, leaf: \.\.\."
    )
    with pytest.raises(ValueError, match=message):
        zt.chain(first, second)(experts.make_step())


@pytest.mark.parametrize("options, text", [
    ({"axis": ("dp", "tp")}, r"axis=\('dp', 'tp'\) is not an axis of the mesh, which has 'dp', 'ep'"),
    ({"axis": ("dp", "ep"), "replicate_axis": "ep"}, r"replicate_axis is the sharded axis, \('dp', 'ep'\)"),
    ({"axis": lambda path, leaf: "pp"}, r"axis\('params.dense', leaf\)='pp' is not an axis of the mesh"),
])  # fmt: skip
def test_wrong_axes_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        zt.shard_params(EXPERTS, **options)(experts.make_step()).lower(
            experts.state(), experts.batches(1)[0]
        )


def test_a_value_of_one_ranks_experts_does_not_reach_all_ranks():
    """A norm of the experts of one rank would make the dense layers of two ranks differ."""

    def step(state, x):
        new, value = experts.make_step(exchanged, 2)(state, x)
        new["params"]["bias"] = new["params"]["bias"] * new["params"]["up"].square().sum()
        return new, value

    with pytest.raises(
        ValueError, match="a value of leaves that differ reaches state params"
    ) as error:
        of_function(EXPERTS)(step).lower(
            experts.of_rank(experts.state(), 0, 2), experts.batches(1)[0]
        )
    assert "test_leaf_axes.py" in str(error.value) and "zt.psum" in str(error.value)


def test_a_joint_axis_around_another_axis_of_the_leaf_is_refused():
    def shard(mesh):
        step = zt.shard_params(mesh, axis=("dp", "cp"), replicate_axis="host")(
            CASES["mixture"].step
        )
        with pytest.raises(
            ValueError,
            match=r"over 'dp\*cp' and 'host' .*\nPut dp and cp next to each other in the mesh",
        ):
            step.shard(CASES["mixture"].state())

    dtensors.on_ranks([0], shard, dp=2, host=2, cp=2)


def test_a_replicate_axis_is_one_axis_of_the_mesh():
    def shard(mesh):
        mesh["host", "dp"]._flatten("replicas")
        mesh["host"]._flatten("machines")
        with pytest.raises(
            ValueError,
            match=r"replicate_axis='replicas' stands for 'host' and 'dp', and replicas are made over one axis\.\n"
            "Make a mesh in which these are one axis",
        ):
            zt.shard_params(mesh, axis="cp", replicate_axis="replicas")
        by_host = zt.shard_params(mesh, axis="cp", replicate_axis="host")
        assert zt.shard_params(mesh, axis="cp", replicate_axis="machines") == by_host
        with pytest.raises(ValueError, match="replicate_axis is the sharded axis, 'host'"):
            zt.shard_params(mesh, axis="host", replicate_axis="machines")

    dtensors.on_ranks([0], shard, host=2, dp=2, cp=2)


def test_groups_that_a_step_made_are_named_by_their_axes():
    """A flattened mesh, and a group of ranks: their names differ from rank to rank, and the program does not."""

    def lowered(mesh):
        both = mesh["dp", "cp"]._flatten("batch")
        column = None
        for k in range(2):
            ranks = mesh.mesh[k].flatten().tolist()
            group = dist.new_group(ranks)
            column = group if dist.get_rank() in ranks else column

        def step(state, x):
            w = state["w"].detach().requires_grad_()
            seen = funcol.all_reduce(x.sum(), "sum", both) + funcol.all_reduce(
                x.sum(), "max", column
            )
            (g,) = torch.autograd.grad((x @ w).square().mean(), [w])
            return {"w": state["w"] - 0.1 * g}, seen

        assert zt.shard_params(mesh, axis="batch") == zt.shard_params(mesh, axis=("cp", "dp"))
        return str(
            zt.shard_params(mesh, axis="batch", independent_axis="tp")(step).lower(
                {"w": torch.ones(8, 4)}, torch.ones(2, 8)
            )
        )

    first, *others = dtensors.on_ranks(range(8), lowered, tp=2, dp=2, cp=2)
    assert (
        "all_reduce(sum, sum, dp*cp)" in first
        and "max, dp*cp)" in first
        and "output.mean" not in first
    )
    assert all(text == first for text in others)


def test_routing_without_a_capacity_is_refused_at_its_line():
    def as_list(splits):
        return splits.tolist()

    def step(state, x):
        counts = (x[:, 0] > 0).sum().reshape(1)
        received = c10d.wait_tensor(c10d.all_to_all_single(counts, [1], [1], "ep"))
        return state, c10d.all_to_all_single(x, as_list(received), as_list(counts), "ep").sum()

    with pytest.raises(ValueError, match="reads a tensor's value") as error:
        zt.Step.of(step).trace({"w": torch.ones(2)}, torch.ones(4, 2))
    lines, start = inspect.getsourcelines(as_list)
    line = start + next(i for i, text in enumerate(lines) if "splits.tolist" in text)
    assert f"test_leaf_axes.py:{line} in " in str(error.value)
