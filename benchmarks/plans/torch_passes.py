"""Run PyTorch's own FSDP bucketing and overlap scheduling on a ztrans program.

    torch_passes(graph, mesh, cluster).graph                  # the whole step
    torch_passes(graph, mesh, cluster, update=False).graph    # forward and backward; the update follows unchanged

The program of one rank is exported to FX with `_c10d_functional` operations, rewritten by `torch._inductor.fx_passes`,
and imported again. A bucket is imported as the copies and the collective that PyTorch generates for it. Costs come from
the cost model of ztrans, so both planners see the same costs, and no GPU is needed.

Private torch APIs; checked on torch 2.13.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from ztrans.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SHARD, WAIT, is_start
from ztrans.ir.graph import Eqn, Graph, Names, Provenance, Split, Var, dce, substitute, variables
from ztrans.ir.layout import local_shape, localize, part
from ztrans.ir.user_collectives import by_group
from ztrans.planning.cluster import Cluster
from ztrans.planning.durations import equation_seconds, messages

c10d, aten = torch.ops._c10d_functional, torch.ops.aten
GATHERS = (c10d.all_gather_into_tensor.default, c10d.all_gather_into_tensor_out.default)
KINDS = {**dict.fromkeys(GATHERS, ALL_GATHER), c10d.reduce_scatter_tensor.default: REDUCE_SCATTER,
         c10d.all_reduce.default: ALL_REDUCE}  # fmt: skip
REDUCE = {"mean": "avg"}
CAP = 100.0  # MiB in a bucket: the value in PyTorch's own table for 16 ranks of H100 machines


@dataclass(frozen=True)
class Result:
    """The new program, the seconds that the passes took, and the error of the scheduling pass if it failed.

    If it failed, the program has the buckets of the first pass, but is not reordered.
    """

    graph: Graph
    seconds: float
    error: str = ""


def torch_passes(
    graph: Graph, mesh: DeviceMesh, cluster: Cluster, update: bool = True, **options: Any
) -> Result:
    """The program with PyTorch's buckets and order. `options` are passed to `schedule_overlap_bucketing`."""
    given, rest = cast_first(graph), ()
    if not update:
        rest = tuple(e for e in given.eqns if e.region == "update")
        first = tuple(e for e in given.eqns if e.region != "update")
        produced = {o for e in first for o in e.outs}
        wanted = dict.fromkeys(
            v for v in variables([*(e.ins for e in rest), *given.outputs]) if v in produced
        )
        given = dce(given.replace(eqns=first, outputs=tuple(wanted)))
    gm, error, start = export(given, mesh), "", time.perf_counter()
    bucket(gm)
    bucketing, milliseconds = time.perf_counter() - start, estimate(gm, given, mesh, cluster)
    start = time.perf_counter()
    try:
        schedule(gm, milliseconds, options)
    except (
        RecursionError,
        RuntimeError,
    ) as failed:  # errors of the pass: waits with a cycle, orders with a cycle
        error = f"{type(failed).__name__}: {failed}".split("\n")[0]
    taken = bucketing + time.perf_counter() - start
    if error:
        gm = export(given, mesh)
        bucket(gm)
    return Result(
        graph.replace(eqns=(*(eqn for _, eqn in back(gm, given, mesh)), *rest)), taken, error
    )


def cast_first(graph: Graph) -> Graph:
    """The program with the cast of each gather as an equation of its own."""
    eqns = []
    for e in graph.eqns:
        if e.op is ALL_GATHER and e.kwargs["dtype"] not in (None, e.ins[0].dtype):
            (member,), dtype = e.ins, e.kwargs["dtype"]
            cast = dataclasses.replace(
                member, name=f"{e.outs[0].name.removesuffix(chr(39))}.cast", dtype=dtype
            )
            eqns.append(
                Eqn(aten._to_copy.default, (member,), (cast,), {"dtype": dtype}, e.region, e.source)
            )
            e = e.replace(args=([cast],), kwargs={**e.kwargs, "dtype": None})
        eqns.append(e)
    return graph.replace(eqns=tuple(eqns))


def export(graph: Graph, mesh: DeviceMesh) -> fx.GraphModule:
    """The program of rank 0 as FX. Each node has its equation, and a fake value.

    The values are on "meta", as the passes count memory there, but not on "cpu".
    """
    sizes, at, out = graph.axes, dict.fromkeys(graph.axes, 0), fx.Graph()
    env: dict[Var, fx.Node] = {}
    mode = FakeTensorMode()

    def call(target: Any, args: tuple, kwargs: dict | None = None, **meta: Any) -> fx.Node:
        node = out.call_function(target, args, kwargs or {})
        read = lambda tree: fx.node.map_arg(tree, lambda n: n.meta["val"])
        node.meta.update(meta, val=target(*read(args), **read(kwargs or {})))
        return node

    with mode, torch.no_grad():
        for v in graph.inputs:
            node = env[v] = out.placeholder("".join(c if c.isalnum() else "_" for c in v.name))
            node.meta.update(
                var=v, val=torch.empty(local_shape(v, sizes, at), dtype=v.dtype, device="meta")
            )
        for e, bound in zip(graph.eqns, by_group(graph, mesh).eqns):
            if is_start(e) or e.op in (WAIT, SHARD):
                args, kwargs = _collective(e, sizes, mesh, env), {}
                target = args[0]
                args = args[1:]
            else:
                bound = localize(bound, sizes, at)
                args, kwargs = (
                    substitute(x, env.__getitem__) for x in (bound.args, dict(bound.kwargs))
                )
                target = e.op
                kwargs.update({"device": torch.device("meta")} if kwargs.get("device") else {})
            node = call(target, args, kwargs, eqn=e)
            if isinstance(node.meta["val"], (tuple, list)):
                for k, v in enumerate(e.outs):
                    if v is not None:
                        env[v] = call(operator.getitem, (node, k), var=v)
            else:
                env[e.outs[0]] = node
    out.output([substitute(o, env.__getitem__) for o in graph.outputs])
    out.output_node().meta["vars"] = list(variables(graph.outputs))
    gm = fx.GraphModule(torch.nn.Module(), out)
    gm.meta["origin"] = {node.name: node.meta["eqn"] for node in out.nodes if "eqn" in node.meta}
    return gm


def _collective(e: Eqn, sizes: dict[str, int], mesh: DeviceMesh, env: dict[Var, fx.Node]) -> tuple:
    """The FX call of a collective equation: target and arguments."""
    x = env[e.ins[0]]
    if e.op is WAIT:
        return c10d.wait_tensor.default, x
    axis = e.kwargs["axis"]
    if e.op is SHARD:
        start, rows = part(e.ins[0].shape[e.args[1]], sizes[axis], 0)
        return aten.slice.Tensor, x, e.args[1], start, start + rows
    (member,), group = e.ins, mesh.get_group(axis).group_name
    cut = member.split or e.outs[0].split
    assert cut is None or (cut.dim == 0 and member.shape[0] % sizes[axis] == 0), (
        f"{member}: padded parts"
    )
    if e.op is ALL_GATHER:
        return GATHERS[0], x, sizes[axis], group
    op = REDUCE.get(e.kwargs["op"], e.kwargs["op"])
    if e.op is ALL_REDUCE:
        return c10d.all_reduce.default, x, op, group
    return c10d.reduce_scatter_tensor.default, x, op, sizes[axis], group


def bucket(gm: fx.GraphModule) -> None:
    """PyTorch's first pass, in place: buckets of adjacent collectives, of `CAP` at most."""
    from torch._inductor.fx_passes.fsdp import pre_bucket_fsdp_collectives
    from torch._inductor.pattern_matcher import stable_topological_sort

    with torch.no_grad():
        pre_bucket_fsdp_collectives(gm, mode="default", bucket_cap_mb=CAP)
    stable_topological_sort(gm.graph)  # the pass puts a bucket after readers of its first members


def schedule(gm: fx.GraphModule, milliseconds: dict[fx.Node, float], options: dict) -> None:
    """PyTorch's second pass, in place: it reorders the program, and then forms more buckets that keep this order."""
    from torch._inductor import config
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

    autofix = config.patch(
        {"aten_distributed_optimizations.overlap_scheduling_autofix_cycles": True}
    )
    with _triton(), autofix, torch.no_grad():
        schedule_overlap_bucketing(
            gm,
            collective_bucketing=True,
            pre_bucketing_fsdp_collectives=False,
            custom_runtime_estimation=lambda node, size: milliseconds.get(node, 0.0),
            collective_estimator="analytical",
            compute_estimator="analytical",
            **options,
        )


def estimate(
    gm: fx.GraphModule, graph: Graph, mesh: DeviceMesh, cluster: Cluster
) -> dict[fx.Node, float]:
    """The milliseconds of every operation, and of every collective on its link."""
    pairs = back(gm, graph, mesh)
    given = graph.replace(eqns=tuple(eqn for _, eqn in pairs))
    nodes = {eqn: node for node, eqn in pairs}
    milliseconds = {node: 1e3 * s for (node, _), s in zip(pairs, equation_seconds(given, cluster))}
    milliseconds.update(
        (nodes[e], 1e3 * (m.latency + m.seconds)) for e, m, _ in messages(given, cluster)
    )
    return milliseconds


@contextlib.contextmanager
def _triton() -> Iterator[None]:
    """A stand-in for `triton.testing`: PyTorch's estimator asks it for a GPU's bandwidth, even if it is not used."""
    if torch.cuda.is_available():
        yield
        return
    try:
        import triton  # noqa: F401
    except ImportError:
        stubs = {"triton": types.ModuleType("triton")}
    else:
        stubs = {}
    stubs["triton.testing"] = types.ModuleType("triton.testing")
    stubs["triton.testing"].get_dram_gbps = lambda: 1.0
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def back(gm: fx.GraphModule, graph: Graph, mesh: DeviceMesh) -> list[tuple[fx.Node, Eqn]]:
    """The nodes as equations. A node of an equation becomes that equation again.

    A value of a bucket gets the name of the value that it replaces.
    """
    return _Back(gm, graph, mesh).run()


class _Back:
    def __init__(self, gm: fx.GraphModule, graph: Graph, mesh: DeviceMesh) -> None:
        self.nodes, self.sizes = list(gm.graph.nodes), graph.axes
        self.axis = {mesh.get_group(a).group_name: a for a in graph.axes}
        self.names = Names(
            [v.name for v in graph.inputs] + [o.name for e in graph.eqns for o in e.outs if o]
        )
        self.origin = gm.meta["origin"]  # name of an exported node -> its equation
        self.pairs: list[tuple[fx.Node, Eqn]] = []
        self.env: dict[fx.Node, Any] = {}
        self.called: dict[fx.Node, Var] = {}  # variables of the values of new nodes

    def run(self) -> list[tuple[fx.Node, Eqn]]:
        for node in self.nodes:
            self.expect(node)
        for node in self.nodes:
            if "var" in node.meta:
                self.env[node] = node.meta["var"]
            elif "eqn" in node.meta:
                eqn = node.meta["eqn"]
                self.pairs.append((node, eqn))
                self.env[node] = eqn.outs[0]
            elif node.op == "call_function":
                self.new(node)
        return self.pairs

    def expect(self, node: fx.Node) -> None:
        """Record the variables that an equation reads from each node. The value that a gather sends is a shard."""
        read: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), read.append)
        if "eqn" in node.meta:
            self.called.update(zip(read, node.meta["eqn"].ins))
        elif node.op == "output":
            self.called.update(zip(read, node.meta["vars"]))
        elif node.target is GATHERS[1]:
            self.sent(node)

    def sent(self, gather: fx.Node) -> None:
        """Record the variable that a bucket sends: the result of its `cat`, or of the copy after it if that casts."""
        packed = gather.args[0]
        while packed.target is aten.copy_.default and not self.casts(packed):
            packed = packed.args[1]
        self.called[packed] = self.var(gather, gather.meta["val"], f"{gather.name}.sent", cut=True)

    def casts(self, copy: fx.Node) -> bool:
        return copy.args[0].meta["val"].dtype != copy.args[1].meta["val"].dtype

    def var(
        self,
        node: fx.Node,
        value: torch.Tensor,
        name: str = "",
        cut: bool = False,
        future: bool = False,
    ) -> Var:
        layout = (Split(self.axis_of(node)),) if cut else ()
        return Var(
            self.names.fresh(name or node.name), value.dtype, tuple(value.shape), layout, future
        )

    def axis_of(self, start: fx.Node) -> str:
        return self.axis[next(a for a in start.args if a in self.axis)]

    def new(self, node: fx.Node) -> None:
        """Import a node that a bucket has added."""
        if node.target in KINDS:
            self.start(node)
        elif node.target is c10d.wait_tensor.default:
            future = self.env[node.args[0]]
            out = dataclasses.replace(future, name=future.name.removesuffix("'"), future=False)
            self.add(node, WAIT, (future,), (out,), {})
        elif node.target is operator.getitem:
            self.env[node] = self.env[node.args[0]][node.args[1]]
        elif node.target is aten.copy_.default and self.casts(node):
            out = self.called.get(node) or self.var(node, node.meta["val"])
            self.add(
                node, aten._to_copy.default, (self.env[node.args[1]],), (out,), {"dtype": out.dtype}
            )
        elif node.target is aten.copy_.default:
            self.env[node] = self.env[node.args[1]]
        elif node.target not in (
            aten.empty.memory_format,
            aten.slice.Tensor,
        ):  # these belong to the receive buffer
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.env[n])
            value = node.meta["val"]
            if isinstance(value, (tuple, list)):
                item = {user.args[1]: user for user in node.users}
                outs = tuple(
                    self.called.get(item.get(k)) or self.var(node, v) for k, v in enumerate(value)
                )
            else:
                outs = (self.called.get(node) or self.var(node, value),)
            self.add(node, node.target, args, outs, kwargs)

    def add(
        self, node: fx.Node, op: Any, args: tuple, outs: tuple[Var, ...], kwargs: dict, **more: Any
    ) -> None:
        self.pairs.append((node, Eqn(op, args, outs, kwargs, self.members(node)[0].region, **more)))
        self.env[node] = outs if isinstance(node.meta["val"], (tuple, list)) else outs[0]

    def start(self, node: fx.Node) -> None:
        op, axis, sent, value = (
            KINDS[node.target],
            self.axis_of(node),
            self.env[node.args[0]],
            node.meta["val"],
        )
        whole = sent.numel if op is not ALL_GATHER else value.numel()
        layout = (Split(axis),) if op is REDUCE_SCATTER else ()
        future = Var(self.names.fresh(node.name) + "'", value.dtype, (whole,), layout, True)
        members = self.members(node)
        paths = tuple(p for e in members for p in (e.provenance.paths if e.provenance else ("",)))
        role = members[0].provenance.role if members[0].provenance else "user"
        reduce = {} if op is ALL_GATHER else {"op": {"avg": "mean"}.get(node.args[1], node.args[1])}
        kwargs = {**reduce, "dtype": None, "axis": axis}
        self.add(node, op, ([sent],), (future,), kwargs, provenance=Provenance(role, paths, axis))

    def members(self, node: fx.Node) -> list[Eqn]:
        """The collectives that a node of a bucket replaces."""

        def leaves(source: Any) -> Iterator[Eqn]:
            if source.name in self.origin:
                yield self.origin[source.name]
            else:
                for s in source.from_node:
                    yield from leaves(s)

        return [e for s in node.meta["from_node"] for e in leaves(s)]
