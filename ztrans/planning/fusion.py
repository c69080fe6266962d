"""fusion: which equations a compiler makes one kernel of, and what that kernel reads and writes.

TorchInductor fuses elementwise equations, reductions, casts and copies with the equations that make their inputs. A
kernel reads each value from outside once, and writes only what something outside reads; the values in between have no
memory. Two equations share a kernel if one reads a result of the other, and the same number of matrix products,
collectives and other equations that do not fuse comes before both. So no path leaves a kernel and returns to it. An
equation that only one later kernel reads belongs to that kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir.donation import is_constant
from ..ir.graph import Eqn, Graph, Primitive, Var, variables
from ..ir.liveness import liveness
from ..ir.op_facts import is_view, op_facts
from ..ir.relations import grouped
from .buffers import local_bytes

IsCompiled = Callable[[Eqn], bool]


@dataclass(frozen=True, eq=False)
class Kernel:
    """Equations that run as one kernel, the bytes that it reads and writes, and the values that need no memory."""

    eqns: tuple[Eqn, ...]
    traffic: int
    inside: tuple[Var, ...]


def kernels(graph: Graph, is_compiled: IsCompiled) -> list[Kernel]:
    """The kernels that a compiler makes of the equations that `is_compiled` chooses; others stay as they are."""
    root = liveness(graph).root
    kernel_of = _by_level(graph, is_compiled, root)
    if not kernel_of:
        return []
    readers = _move_to_readers(graph, kernel_of, root)
    size = local_bytes(graph)
    every = []
    for number, eqns in grouped((kernel_of[e], e) for e in graph.eqns if e in kernel_of).items():
        read = {root[v] for e in eqns for v in e.ins}
        made = {root[v] for e in eqns for v in e.results}
        inside = [v for v in made if readers.get(v, set()) <= {number}]
        moved = sum(map(size, read - made)) + sum(map(size, made.difference(inside)))
        every.append(Kernel(tuple(eqns), moved, tuple(inside)))
    return every


def _move_to_readers(
    graph: Graph, kernel_of: dict[Eqn, int], root: dict[Var, Var]
) -> dict[Var, set[int | None]]:
    """Move equations that only one kernel reads to that kernel.

    Returns, by storage, the kernels that read it; None stands for everything else.
    """
    readers: dict[Var, set[int | None]] = {}
    for v in variables(graph.outputs):
        readers.setdefault(root[v], set()).add(None)
    for e in reversed(graph.eqns):
        if is_view(e):
            continue
        later = {number for v in e.results for number in readers.get(root[v], ())}
        only = later.pop() if len(later) == 1 else None
        if e in kernel_of and only is not None:
            kernel_of[e] = only
        for v in e.ins:
            readers.setdefault(root[v], set()).add(kernel_of.get(e))
    return readers


class _Groups:
    """Numbers that are joined into groups, each of which is known by one of them."""

    def __init__(self) -> None:
        self.parent: list[int] = []

    def new(self) -> int:
        """A number in a group of its own."""
        self.parent.append(len(self.parent))
        return self.parent[-1]

    def first(self, number: int) -> int:
        """The number by which the group of a number is known."""
        while self.parent[number] != number:
            self.parent[number] = self.parent[self.parent[number]]
            number = self.parent[number]
        return number

    def join(self, one: int, other: int) -> None:
        self.parent[self.first(one)] = self.first(other)


def _by_level(graph: Graph, is_compiled: IsCompiled, root: dict[Var, Var]) -> dict[Eqn, int]:
    """The kernel of each equation that fuses, by number: of those that are connected on one level."""
    depth: dict[Var, int] = {}  # of a storage: how many equations that do not fuse come before it
    maker: dict[Var, int] = {}  # of a storage: the number of the equation that fuses and makes it
    groups = _Groups()
    number_of: dict[Eqn, int] = {}
    for e in graph.eqns:
        if is_view(e):
            continue
        sources = {root[v] for v in e.ins}
        level = max((depth.get(v, 0) for v in sources), default=0)
        if not (_fuses(e) and is_compiled(e)):
            depth.update((root[v], level + 1) for v in e.results)
            continue
        number = number_of[e] = groups.new()
        for v in sources & maker.keys():
            if depth[v] == level:
                groups.join(maker[v], number)
        for v in e.results:
            depth[root[v]] = level
            maker[root[v]] = number
    return {e: groups.first(number) for e, number in number_of.items()}


def _fuses(e: Eqn) -> bool:
    if isinstance(e.op, Primitive) or is_constant(e):
        return False
    facts = op_facts(e.op)
    return (facts.elementwise or facts.reduction or facts.fuses) and not facts.fused_update
