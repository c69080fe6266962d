"""Which equations TorchInductor makes one kernel of, and what that kernel reads and writes.

It fuses elementwise equations, reductions, casts and copies with the equations that make their inputs. A kernel reads
each value from outside once, and writes only what something outside reads; the values in between have no memory. Two
equations share a kernel if one reads a result of the other, and the same number of matrix products, collectives and
other equations that do not fuse comes before both. So no path leaves a kernel and returns to it. An equation that only
one later kernel reads belongs to that kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from networkx.utils import UnionFind

from ztrans.ir.dependencies import grouped
from ztrans.ir.donation import is_constant
from ztrans.ir.graph import Eqn, Graph, Primitive, Var, variables
from ztrans.ir.liveness import liveness
from ztrans.ir.op_facts import is_view, op_facts
from ztrans.planning.buffers import local_bytes
from ztrans.planning.cluster import Cluster
from ztrans.planning.durations import equation_seconds
from ztrans.planning.roofline import memory_seconds, queue_seconds

IsCompiled = Callable[[Eqn], bool]


@dataclass(frozen=True, eq=False)
class FusedKernel:
    """Equations that run as one kernel, the bytes that it reads and writes, and the values that need no memory."""

    eqns: tuple[Eqn, ...]
    traffic: int
    inside: tuple[Var, ...]


def fused_seconds(graph: Graph, cluster: Cluster, is_compiled: IsCompiled) -> list[float]:
    """The time that each equation takes of the compute queue. The first one of a kernel takes that of all of it."""
    duration = dict(zip(graph.eqns, equation_seconds(graph, cluster)))
    device = cluster.device
    for kernel in fused_kernels(graph, is_compiled):
        duration.update(dict.fromkeys(kernel.eqns, 0.0))
        duration[kernel.eqns[0]] = queue_seconds(device, 1, memory_seconds(kernel.traffic, device))
    return [duration[e] for e in graph.eqns]


def fused_kernels(graph: Graph, is_compiled: IsCompiled) -> list[FusedKernel]:
    """The kernels that a compiler makes of the equations that `is_compiled` chooses; others stay as they are."""
    root = liveness(graph).root
    kernel_of = _by_level(graph, is_compiled, root)
    if not kernel_of:
        return []
    readers = _move_to_readers(graph, kernel_of, root)
    size = local_bytes(graph)
    every = []
    for first, eqns in grouped((kernel_of[e], e) for e in graph.eqns if e in kernel_of).items():
        read = {root[v] for e in eqns for v in e.ins}
        made = {root[v] for e in eqns for v in e.results}
        inside = [v for v in made if readers.get(v, set()) <= {first}]
        moved = sum(map(size, read - made)) + sum(map(size, made.difference(inside)))
        every.append(FusedKernel(tuple(eqns), moved, tuple(inside)))
    return every


def _by_level(graph: Graph, is_compiled: IsCompiled, root: dict[Var, Var]) -> dict[Eqn, Eqn]:
    """For each equation that fuses, one that stands for its kernel: of those that are connected on one level."""
    depth: dict[Var, int] = {}  # of a storage: how many equations that do not fuse come before it
    maker: dict[Var, Eqn] = {}  # of a storage: the equation that fuses and makes it
    connected = UnionFind()
    for e in graph.eqns:
        if is_view(e):
            continue
        sources = {root[v] for v in e.ins}
        level = max((depth.get(v, 0) for v in sources), default=0)
        if not (_fuses(e) and is_compiled(e)):
            depth.update((root[v], level + 1) for v in e.results)
            continue
        neighbours = [maker[v] for v in sources & maker.keys() if depth[v] == level]
        connected.union(e, *neighbours)
        for v in e.results:
            depth[root[v]] = level
            maker[root[v]] = e
    return {e: connected[e] for e in connected}


def _move_to_readers(
    graph: Graph, kernel_of: dict[Eqn, Eqn], root: dict[Var, Var]
) -> dict[Var, set[Eqn | None]]:
    """Move equations that only one kernel reads to that kernel.

    Returns, by storage, the kernels that read it; None stands for everything else.
    """
    readers: dict[Var, set[Eqn | None]] = {}
    for v in variables(graph.outputs):
        readers.setdefault(root[v], set()).add(None)
    for e in reversed(graph.eqns):
        if is_view(e):
            continue
        later = {kernel for v in e.results for kernel in readers.get(root[v], ())}
        only = later.pop() if len(later) == 1 else None
        if e in kernel_of and only is not None:
            kernel_of[e] = only
        for v in e.ins:
            readers.setdefault(root[v], set()).add(kernel_of.get(e))
    return readers


def _fuses(e: Eqn) -> bool:
    if isinstance(e.op, Primitive) or is_constant(e):
        return False
    facts = op_facts(e.op)
    return (facts.elementwise or facts.reduction or facts.fuses) and not facts.fused_update
