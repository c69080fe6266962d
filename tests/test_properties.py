"""Random programs, shapes, worlds and options against the plain step: nobody chose these by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad_and_value
from torch.utils import _pytree as pytree
from worlds import Case, default_dtype, distance, plain, sharded, slices

import ztrans as zt
from ztrans.collectives import ALL_GATHER, WAIT, is_start, received_bytes

SIZES = st.integers(1, 9)


@st.composite
def layers(draw, width: int):
    """One layer: its parameters' shapes and what it computes of a [n, width] input; returns also the new width."""
    kind = draw(st.sampled_from(["linear", "scale", "shift", "tanh", "norm", "gate", "low_rank", "sum_rows", "gather"]))
    out = draw(SIZES)
    if kind == "linear":
        shapes, f = [(out, width), (out,)], lambda x, w, b: F.linear(x, w, b)
    elif kind == "scale":
        shapes, f, out = [(width,)], lambda x, w: x * w, width
    elif kind == "shift":
        shapes, f, out = [()], lambda x, w: x + w, width
    elif kind == "tanh":
        shapes, f, out = [], torch.tanh, width
    elif kind == "norm":
        shapes, f, out = [(width,), (width,)], lambda x, w, b: F.layer_norm(x, (x.shape[1],), w, b), width
    elif kind == "gate":
        shapes, f = [(width, 2 * out)], lambda x, w: F.glu(x @ w)
    elif kind == "low_rank":
        rank = draw(st.integers(1, 3))
        shapes, f = [(rank, width), (out, rank)], lambda x, a, b: x @ a.T @ b.T
    elif kind == "sum_rows":
        rows = draw(SIZES)
        shapes, f, out = [(rows, width)], lambda x, w: x + w.sum(0) / (1 + w.square().sum()), width
    else:
        rows = draw(SIZES)
        shapes = [(rows, width)]
        f, out = lambda x, w: x + w[torch.arange(x.shape[1]) % w.shape[0]].diagonal().tanh(), width
    return shapes, f, out


def elementwise(draw):
    rate = draw(st.sampled_from([0.1, 0.01]))
    return lambda p, m, g: (p - rate * (g + 0.1 * m), 0.9 * m + g)


def adam_like(draw):
    power = draw(st.sampled_from([0.5, 1.0]))
    return lambda p, m, g: (p - 0.01 * g / (m.abs() + 0.1) ** power, 0.5 * m + 0.5 * g.square())


def normed(draw):
    order = draw(st.sampled_from([1, 2, float("inf")]))

    def update(p, m, g):
        size = torch.linalg.vector_norm(g, order)
        return p - 0.05 * g / (1 + size), m * 0.9 + g.mean() + g.amax()

    return update


def blended(draw):
    weight = draw(st.floats(0.1, 0.9))
    return lambda p, m, g: (torch.where(p > 0, p - 0.01 * g, p - 0.02 * g), torch.lerp(m, g, weight))


@st.composite
def cases(draw) -> Case:
    """A random chain of layers, maybe with a tied one, a regulariser, clipping and micro-batches."""
    width = first = draw(SIZES)
    chain = []
    for _ in range(draw(st.integers(1, 5))):
        shapes, f, width = draw(layers(width))
        chain.append((shapes, f))
    tied = draw(st.booleans())
    regularised, clipped = draw(st.booleans()), draw(st.booleans())
    micro = draw(st.sampled_from([1, 2, 3]))
    update = draw(st.sampled_from([elementwise, adam_like, normed, blended]))(draw)
    frozen = draw(st.booleans())

    def loss(params, fixed, x):
        flat = {**params, **fixed}
        for i, (shapes, f) in enumerate(chain):
            x = f(x, *(flat[f"{i}.{j}"] for j in range(len(shapes))))
        value = x.square().mean() + x.mean()
        if tied and params:
            value = value + (x.sum(1).tanh() * next(iter(params.values())).sum().tanh()).mean()
        if regularised:
            value = value + 0.01 * sum(p.square().sum() for p in params.values())
        return value

    def step(state, x):
        grads, total = None, 0.0
        for part in x.chunk(micro):
            g, value = grad_and_value(loss)(state["params"], state["fixed"], part)
            grads = g if grads is None else {k: grads[k] + g[k] for k in g}
            total = total + value / micro
        if clipped and grads:
            norm = torch.stack([g.norm() for g in grads.values()]).norm()
            grads = {k: g * torch.clamp(1 / (norm + 1e-6), max=1.0) for k, g in grads.items()}
        new = {k: update(p, state["m"][k], grads[k]) for k, p in state["params"].items()}
        params, m = {k: p for k, (p, _) in new.items()}, {k: m for k, (_, m) in new.items()}
        return {"params": params, "m": m, "fixed": state["fixed"]}, total

    def state():
        torch.manual_seed(0)
        flat = {f"{i}.{j}": 0.5 * torch.randn(s) for i, (shapes, _) in enumerate(chain) for j, s in enumerate(shapes)}
        names = list(flat)
        held = set(names[::3]) if frozen and len(names) > 3 else set()
        params = {k: v for k, v in flat.items() if k not in held}
        return {
            "params": params,
            "m": {k: torch.zeros_like(p) for k, p in params.items()},
            "fixed": {k: flat[k] for k in held},
        }

    return Case("random", step, state, lambda n: (torch.randn(n, first),), samples=144)


TRANSFORMS = st.lists(
    st.sampled_from([zt.overlap_grads(), zt.prefetch(), zt.prefetch(max_in_flight=0), zt.fuse_cast_gather()]),
    max_size=3,
).map(lambda ts: tuple({t.name: t for t in ts}.values()))


@settings(max_examples=60)
@given(cases(), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([0, 1, 2, 3]), TRANSFORMS)
def test_random_programs_are_sharded_right(case, ranks, stage, transforms):
    with default_dtype(torch.float64):
        if not case.state()["params"]:
            return  # nothing to train
        truth, outputs = plain(case, 2)
        state, each, lowered = sharded(case, ranks, stage, 2, transforms)
    # A gradient that is zero but for rounding has no relative error worth the name: hence the floor.
    assert distance(state, truth, floor=1e-3) <= 1e-10
    assert distance([o[0] for o in each], outputs, floor=1e-3) <= 1e-10
    assert len({len(o) for o in each}) == 1
    no_use_before_wait(lowered.graph)


def no_use_before_wait(graph: zt.Graph) -> None:
    """Every future is waited for before its value is read, and every wait follows its start."""
    started, waited = set(), set()
    for e in graph.eqns:
        if is_start(e):
            started.update(e.outs)
        elif e.op is WAIT:
            assert e.args[0] in started
            waited.add(e.args[0])
    assert started == waited


@settings(max_examples=25)
@given(cases(), st.sampled_from([2, 3, 4]), st.sampled_from([1, 2, 3]))
def test_schedules_and_fusion_change_no_bit(case, ranks, stage):
    with default_dtype(torch.float32):
        if not case.state()["params"]:
            return
        a, _, plainly = sharded(case, ranks, stage, 1, ())
        b, _, scheduled = sharded(case, ranks, stage, 1)
    assert all(torch.equal(x, y) for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b)))
    waits = lambda lowered: sum(e.op is WAIT for e in lowered.graph.eqns)
    assert waits(scheduled) == waits(plainly) - len(scheduled.plan.dropped)


@settings(max_examples=25)
@given(cases(), st.integers(0, 4096))
def test_prefetch_stays_within_its_bytes(case, bound):
    with default_dtype(torch.float32):
        if not case.state()["params"]:
            return
        _, _, lowered = sharded(case, 4, 3, 1, (zt.prefetch(max_in_flight=bound),))
    graph, under_way = lowered.graph, {}
    received = lambda e: [received_bytes(e, k, graph.axes) for k in range(len(e.outs))]
    largest = max((n for e in graph.eqns if e.op is ALL_GATHER for n in received(e)), default=0)
    for e in graph.eqns:
        if e.op is ALL_GATHER:
            under_way[e] = sum(received(e))
        elif e.op is WAIT:  # all of a bucket has come when its first member is waited for
            under_way = {bucket: n for bucket, n in under_way.items() if e.args[0] not in bucket.outs}
        elif not is_start(e):
            assert sum(under_way.values()) <= max(bound, largest), "while an operation runs"


@settings(max_examples=40)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 9))
def test_cutting_and_joining_are_inverse(shape, ranks):
    from ztrans.evaluate import join, scatter
    from ztrans.graph import Split, Var

    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    v = Var("x", x.dtype, tuple(shape), (Split("dp", 0),))
    graph = zt.Graph("f", (v,), (), (v,), 1, mesh=(("dp", ranks),))
    parts = scatter(graph, [x])
    chunks = torch.chunk(x, ranks)
    for r, (part,) in enumerate(parts):
        assert part.shape[0] == (chunks[r].shape[0] if r < len(chunks) else 0)  # as torch.chunk and DTensor cut
    assert torch.equal(join(graph, parts)[0], x)
    assert [s[0].shape for s in slices((x,), 1)] == [x.shape]
