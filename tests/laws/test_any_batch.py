"""Any batch, with messages of codes: ranks with batches of different sizes compute data parallelism by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.quantized import ROW, batch, new_state, rounded, updated
from tests.support.worlds import ALL
from ztrans.ir.collectives import rules
from ztrans.ir.graph import Graph, substitute
from ztrans.ir.interpreter import join_state, on_rank
from ztrans.ir.layout import localize

SIZES = [(5, 3, 8), (1, 8, 2)]  # the samples of each rank, by step


def loss_fn(params, x, y):
    h = torch.relu(x @ params["up"].T + params["bias"])
    return (h @ params["down"].T - y).square().mean()


def step(state, x, y):
    grads, loss = grad_and_value(loss_fn)(state["params"], x, y)
    return updated(state, grads), loss


def lockstep(graphs: Sequence[Graph], ranks: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The results of ranks that run programs for batches of different sizes: the same equations with other shapes."""
    values = [dict(zip(graph.inputs, inputs)) for graph, inputs in zip(graphs, ranks)]
    for eqns in zip(*(graph.eqns for graph in graphs), strict=True):
        assert len({str(eqn.op) for eqn in eqns}) == 1
        if rules(eqns[0]).axis(eqns[0]) is None:
            results = []
            for r, eqn in enumerate(eqns):
                local = localize(eqn, graphs[r].axes, {"dp": r})
                results += rules(eqn).meaning([local], [values[r]])
        else:  # it has the same type on all ranks, and on each another value
            local_eqns = [localize(eqns[0], graphs[0].axes, {"dp": r}) for r in range(len(ranks))]
            members = [[env[v] for v in eqn.ins] for eqn, env in zip(eqns, values)]
            envs = [dict(zip(eqns[0].ins, each)) for each in members]
            results = rules(eqns[0]).meaning(local_eqns, envs)
        for eqn, env, own in zip(eqns, values, results):
            env.update(zip(eqn.outs, own))
    return [list(substitute(g.outputs, env.__getitem__)) for g, env in zip(graphs, values)]


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_other_batches_send_the_same_codes(stage):
    codes = zt.quantize_gathers(8, ROW), zt.quantize_grads(8, ROW)
    ranks = len(SIZES[0])
    shard = zt.shard_params(zt.AbstractMesh(dp=ranks), stage=stage)
    sharded = zt.chain(shard, *codes, *ALL)(step)
    state = truth = new_state()
    tree = pytree.tree_structure(state)
    sharded = sharded.with_plan(sharded.lower(state, *batch(4)).plan)
    for k, sizes in enumerate(SIZES):
        parts = [batch(n, seed=10 * k + r) for r, n in enumerate(sizes)]
        programs = [sharded.lower(state, *part) for part in parts]
        graphs = [lowered.graph for lowered in programs]
        inputs = []
        for r, (lowered, part) in enumerate(zip(programs, parts)):
            leaves = pytree.tree_leaves(state)
            inputs.append([*on_rank(lowered.graph, leaves, {"dp": r}), *part])
        state = pytree.tree_unflatten(join_state(graphs[0], lockstep(graphs, inputs)), tree)

        sent = {name: rounded(w, 8) for name, w in truth["params"].items()}
        grads = [grad_and_value(loss_fn)(sent, *part)[0] for part in parts]
        means = {name: sum(rounded(g[name], 8) for g in grads) / ranks for name in sent}
        truth = updated(truth, means)
        for mine, true in zip(pytree.tree_leaves(state), pytree.tree_leaves(truth), strict=True):
            torch.testing.assert_close(mine, true, rtol=0, atol=1e-6)
