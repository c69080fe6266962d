"""Find the equation that makes the first value which is not finite and reaches the results of a step.

A program runs equation by equation, without overwriting its state, and the range of each value is recorded. A value
that is not finite may be meant: a mask of -inf does no harm if nothing that is not finite follows from it. So the
search begins at the results, the new state and the outputs, and follows values that are not finite back to the first
that is at fault. All ranks search together, because a collective passes such values on.

An infinity that the step writes itself, such as the -inf of `masked_fill`, or that the state or the batch brings, is
not at fault, nor is an infinity that follows from one, but the first NaN that follows is. If only such infinities reach
a loss or the state, the first of them is reported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..ir.collectives import rules
from ..ir.graph import DTYPES, Eqn, Graph, Var, producers
from ..ir.micro_batches import Carry, micro_batch_programs
from ..ir.pairing import pair
from ..ir.printer import equation, first_names
from ..ir.source import where
from ..runtime.agreement import everywhere
from ..runtime.codegen import to_fx
from ..runtime.collectives import wait
from ..runtime.runner import Runner


@dataclass(frozen=True)
class Range:
    """The numbers in a tensor of one rank.

    `finite` has the least, the greatest and the mean magnitude of the finite ones; None if there are none.

    >>> print(Range.of("x", torch.tensor([[1.0, -3.0], [math.inf, math.nan]])))
    x  f32[2,2]  -3 to 1, mean magnitude 2, 1 inf, 1 NaN
    """

    name: str
    type: str
    finite: tuple[float, float, float] | None
    inf: int
    nan: int

    @staticmethod
    def of(name: str, x: torch.Tensor) -> Range:
        """The range of a tensor; of a complex one, that of its real and imaginary parts."""
        kind = f"{DTYPES.get(x.dtype, x.dtype)}[{','.join(map(str, x.shape))}]"
        numbers = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        # Not all operations exist for fp8, and sums of half precision overflow.
        numbers = numbers.detach().to(torch.float64 if numbers.itemsize > 4 else torch.float32)
        nan = int(numbers.isnan().sum())
        inf = int(numbers.isinf().sum())
        if nan + inf:
            numbers = numbers[numbers.isfinite()]
        if not numbers.numel():
            return Range(name, kind, None, inf, nan)
        least, greatest = torch.aminmax(numbers)
        magnitude = numbers.abs().mean(dtype=torch.float64)
        return Range(name, kind, (float(least), float(greatest), float(magnitude)), inf, nan)

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite."""
        return not (self.inf or self.nan)

    @property
    def fault(self) -> str:
        """The numbers that are not finite, as text."""
        counts = [
            f"{count} {kind}" for count, kind in ((self.inf, "inf"), (self.nan, "NaN")) if count
        ]
        return ", ".join(counts)

    def __str__(self) -> str:
        parts = []
        if self.finite is not None:
            least, greatest, magnitude = self.finite
            parts.append(f"{least:.4g} to {greatest:.4g}, mean magnitude {magnitude:.4g}")
        if not self.is_finite:
            parts.append(self.fault)
        if not parts:
            parts.append("empty")
        return f"{self.name}  {self.type}  {', '.join(parts)}"


@dataclass(frozen=True)
class NonFinite:
    """The first value that is not finite in a step, and that reaches its results. The same on all ranks.

    Attributes:
        step: the name of the step.
        rank, ranks: the rank that has it, of how many.
        equation: the equation that makes it, as the program prints it; empty if it is an input of the step.
        region: forward, backward or update.
        where: the user's file, line and function.
        operands, results: the ranges of the values that the equation reads and makes, on that rank.
        micro_batch: the number of the micro-batch, from 0; None if the step has one.
        first_nan: if the results are infinite, the equation with the first NaN that follows, and its line.
        inputs: the inputs of the step that were not finite before, and lead there.
        reaches: the leaves of the new state, and the outputs, that are not finite on some rank.
    """

    step: str
    rank: int
    ranks: int
    equation: str
    region: str
    where: str
    operands: tuple[Range, ...]
    results: tuple[Range, ...]
    micro_batch: int | None = None
    first_nan: str = ""
    inputs: tuple[Range, ...] = ()
    reaches: tuple[str, ...] = ()

    def __str__(self) -> str:
        rank = f" on rank {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        part = f", micro-batch {self.micro_batch}" if self.micro_batch is not None else ""
        faults = "; ".join(f"{x.name} has {x.fault}" for x in self.results if not x.is_finite)
        if self.equation:
            lines = [f"{self.step}: {faults}{rank}, in {self.region}{part}.", f"  at {self.where}"]
            lines.append(f"  {self.equation}")
            lines += [f"    {x}" for x in (*self.operands, *self.results)]
        else:
            lines = [f"{self.step}: {faults}{rank} before the step{part}."]
            lines += [f"    {x}" for x in self.results]
        if self.first_nan:
            lines.append(f"The first NaN that follows is in {self.first_nan}")
        before = [x for x in self.inputs if x not in self.results]
        if before:
            lines.append("Before the step:")
            lines += [f"    {x}" for x in before]
        lines.append(f"It reaches {first_names(self.reaches)}.")
        return "\n".join(lines)


Key = tuple[int, str]  # of a value: the micro-batch and the name


class Trail(NamedTuple):
    """A value of one rank that is not finite, as the ranks tell each other.

    Attributes:
        place: the micro-batch, and the position of its equation; -1 for an input.
        has_nan: whether it has a NaN, or else only infinities.
        is_meant: whether its equation has an infinite literal, or it is an input without a NaN.
        reads: the values that it may come from.
        is_exchanged: whether these values are those of all ranks.
        reaches: its name among the results of the step if it is one whose numbers must be finite.
        may_be_meant: whether it is a result that may have infinities that are meant.
    """

    place: tuple[int, int]
    has_nan: bool
    is_meant: bool
    reads: tuple[Key, ...]
    is_exchanged: bool = False
    reaches: str = ""
    may_be_meant: bool = False


Trails = Mapping[Key, Trail]
Node = tuple[int, Key]  # a value on a rank


class Found(NamedTuple):
    """What the ranks have found: the value at fault, the first NaN after it, the inputs before it, and the results."""

    culprit: Node
    first_nan: Node | None
    inputs: tuple[Node, ...]
    reaches: tuple[str, ...]


def find(by_rank: Sequence[Trails]) -> Found | None:
    """The value at fault, from the values of all ranks that are not finite; None if none reaches the results."""
    trails = {(rank, key): t for rank, own in enumerate(by_rank) for key, t in own.items()}
    sources = _sources(trails, len(by_rank))
    bad, faults = _faults(trails, sources)
    roots = [x for x, t in trails.items() if t.reaches and (x in bad or not t.may_be_meant)]
    if not roots:
        return None
    before = _ancestors(roots, sources)
    # If only infinities that are meant have reached the results, the first of them.
    candidates = before & faults or {node for node in before if not sources[node]}
    culprit = _in_order(candidates, trails)[0]
    first_nan = None
    if not trails[culprit].has_nan:
        nans = [node for node in before if trails[node].has_nan]
        first_nan = next(iter(_in_order(nans, trails)), None)
    inputs = [x for x in _ancestors([culprit], sources) if trails[x].place == (0, -1)]
    reaches = dict.fromkeys(trails[node].reaches for node in roots)
    return Found(culprit, first_nan, tuple(_in_order(inputs, trails)), tuple(reaches))


def _sources(trails: Mapping[Node, Trail], ranks: int) -> dict[Node, list[Node]]:
    """For each value that is not finite, those that it comes from."""
    sources: dict[Node, list[Node]] = {}
    for node, trail in trails.items():
        sources[node] = []
        for rank in range(ranks) if trail.is_exchanged else (node[0],):
            sources[node] += [(rank, key) for key in trail.reads if (rank, key) in trails]
    return sources


def _in_order(nodes: Iterable[Node], trails: Mapping[Node, Trail]) -> list[Node]:
    """Values in the order in which the program makes them, and in rank order."""
    return sorted(nodes, key=lambda node: (trails[node].place, node))


def _faults(
    trails: Mapping[Node, Trail], sources: Mapping[Node, Sequence[Node]]
) -> tuple[set[Node], set[Node]]:
    """The values that are not finite and not meant to be, and those of them with which it begins."""
    bad: set[Node] = set()
    faults: set[Node] = set()
    for node in TopologicalSorter(sources).static_order():
        trail = trails[node]
        if any(source in bad for source in sources[node]):
            bad.add(node)
        elif trail.has_nan or not (trail.is_meant or sources[node]):
            bad.add(node)
            faults.add(node)
    return bad, faults


def _ancestors(nodes: Iterable[Node], sources: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """These values, and those that they come from."""
    seen: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += sources[node]
    return seen


@dataclass
class _Watch:
    """The ranges of all values of one rank, and the trails of those that are not finite.

    `names` has the name of each leaf of the new state, and of each output.
    """

    graph: Graph
    names: Sequence[str]
    trails: dict[Key, Trail] = field(default_factory=dict)
    ranges: dict[Key, Range] = field(default_factory=dict)
    makers: dict[Key, Eqn] = field(default_factory=dict)

    def inputs(self, micro: int, program: Graph, tensors: Sequence[Any]) -> None:
        """Record the inputs of a micro-batch."""
        batch = set(program.batch)
        # Values of earlier micro-batches come from the results of any of them.
        earlier = tuple(key for key in self.trails if key[0] < micro)
        for v, x in zip(program.inputs, tensors):
            reads = earlier if micro and v not in batch else ()
            self.record(micro, -1, v, x, reads, is_meant=not reads)

    def value(
        self, micro: int, position: int, v: Var, x: Any, maker: Eqn, reads: Iterable[Var]
    ) -> None:
        """Record a value.

        Args:
            micro: the micro-batch.
            position: the position of `maker` in the program; -1 if it ran in the previous step.
            v, x: the value.
            maker: its equation, or the start of the collective or the copy that brings it.
            reads: what it comes from.
        """
        self.makers[micro, v.name] = maker
        names = [read.name for read in reads]
        if position < 0:  # a gather of the old state
            old = {new.name: old.name for old, new in self.graph.leaves if isinstance(new, Var)}
            names = [old.get(name, name) for name in names]
        is_exchanged = rules(maker).axis(maker) is not None
        has_literal = any(map(_is_infinite, _literals((maker.args, maker.kwargs))))
        keys = tuple((micro, name) for name in names)
        self.record(micro, position, v, x, keys, has_literal, is_exchanged)

    def record(
        self,
        micro: int,
        position: int,
        v: Var,
        x: Any,
        reads: tuple[Key, ...],
        is_meant: bool,
        is_exchanged: bool = False,
    ) -> None:
        if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
            return
        key = micro, v.name
        numbers = self.ranges[key] = Range.of(v.name, x)
        if not numbers.is_finite:
            place = micro, position
            self.trails[key] = Trail(place, numbers.nan > 0, is_meant, reads, is_exchanged)

    def results(self, micro: int, program: Graph) -> None:
        """Note which of the values of the last micro-batch are results of the step."""
        n = program.num_state
        for i, (v, name) in enumerate(zip(program.outputs, self.names)):
            trail = self.trails.get((micro, v.name)) if isinstance(v, Var) else None
            if trail is None:
                continue
            if i < n:
                old = program.inputs[i]
                if v is old:
                    continue  # the step has not changed it
                before = self.ranges.get((0, old.name))
                may_be_meant = before is not None and not before.is_finite
            else:
                may_be_meant = bool(v.shape)  # such as logits with a mask
            self.trails[micro, v.name] = trail._replace(reaches=name, may_be_meant=may_be_meant)

    def told(self, key: Key, ranks: int) -> NonFinite:
        """The report on a value of this rank."""
        micro, _ = key
        eqn = self.makers.get(key)
        results = (self.ranges[key],)
        operands: list[Range] = []
        if eqn is not None:
            for read in dict.fromkeys((micro, v.name) for v in eqn.ins):
                if read in self.ranges:
                    operands.append(self.ranges[read])
        return NonFinite(
            step=self.graph.name,
            rank=0,
            ranks=ranks,
            equation=equation(eqn) if eqn is not None else "",
            region=eqn.region if eqn is not None else "",
            where=where(eqn.source if eqn is not None else None),
            operands=tuple(operands),
            results=results,
            micro_batch=micro if self.graph.micro > 1 else None,
        )


class _Interpreter(fx.Interpreter):
    """Runs the code of a program node by node, and shows each value to a watch."""

    def __init__(self, module: fx.GraphModule, program: Graph, micro: int, watch: _Watch) -> None:
        super().__init__(module)
        self._micro = micro
        self._watch = watch
        self._makers = producers(program.eqns)
        self._positions = {eqn: i for i, eqn in enumerate(program.eqns)}
        self._pairs = pair(program, include_user=True, include_copies=True)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for v in n.meta.get("values", ()):
            eqn = self._makers.get(v)
            # A started collective has no value yet.
            if eqn is None or eqn in self._pairs.starts:
                continue
            maker, position, reads = eqn, self._positions[eqn], eqn.ins
            if eqn in self._pairs.waits:
                waited = self._pairs.waits[eqn]
                maker, position, reads = waited.start, waited.started.index, waited.start.ins
                if len(reads) == len(maker.results):  # each member comes from its own argument
                    reads = (reads[waited.member],)
            self._watch.value(self._micro, position, v, result, maker, reads)
        return result


def first_non_finite(
    graph: Graph,
    runner: Runner,
    mesh: DeviceMesh | None,
    inputs: Sequence[torch.Tensor],
    names: Sequence[str],
) -> NonFinite | None:
    """Run a program once without changing its inputs, and report the first value at fault, or None.

    All ranks must call it.

    Args:
        graph: the program as it runs on this rank.
        runner: what runs it in a step.
        mesh: its mesh.
        inputs: its flat inputs on this rank.
        names: the names of the leaves of the state, and of the outputs.
    """
    watch = _Watch(graph, names)
    programs = micro_batch_programs(graph)
    carry = Carry(graph, programs, inputs)
    device = next((x.device for x in inputs if x.is_cuda), None)
    devices = [device] if device is not None else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        for micro, program in enumerate(programs.in_order):
            is_last = micro == programs.micro - 1
            tensors = carry.inputs()
            if is_last:
                tensors = [*tensors, *runner.start_carried(tensors)]
            watch.inputs(micro, program, tensors)
            program = _without_storage(program)
            code = to_fx(program, mesh, device=device)
            outputs = _Interpreter(code, program, micro, watch).run(*tensors)
            if not is_last:
                carry.take(outputs)
        # No next step uses the gathers that the program has started for it.
        for member in outputs[len(outputs) - graph.carried :]:
            wait(member)
    watch.results(programs.micro - 1, programs.last)
    by_rank = [watch.trails] if mesh is None else everywhere(watch.trails, mesh)
    found = find(by_rank)
    if found is None:
        return None
    return _report(found, watch, mesh, len(by_rank))


def _report(found: Found, watch: _Watch, mesh: DeviceMesh | None, ranks: int) -> NonFinite:
    """The report on what was found. Each rank adds what it knows."""
    here = 0 if mesh is None else mesh.mesh.flatten().tolist().index(mesh.get_rank())
    nodes = {found.culprit, *found.inputs}
    if found.first_nan is not None:
        nodes.add(found.first_nan)
    told = {node: watch.told(node[1], ranks) for node in nodes if node[0] == here}
    if mesh is not None:
        for others in everywhere(told, mesh):
            told.update(others)
    report = told[found.culprit]
    first_nan = ""
    if found.first_nan is not None:
        nan = told[found.first_nan]
        first_nan = f"{nan.equation}  at {nan.where}"
    inputs = [told[node].results[0] for node in found.inputs]
    return dataclasses.replace(
        report,
        rank=found.culprit[0],
        first_nan=first_nan,
        inputs=tuple(inputs),
        reaches=found.reaches,
    )


def _without_storage(program: Graph) -> Graph:
    """A program whose copies to the host do not overwrite the state."""
    eqns = []
    for e in program.eqns:
        if "over" in e.kwargs and rules(e).copies:
            e = e.replace(kwargs={key: x for key, x in e.kwargs.items() if key != "over"})
        eqns.append(e)
    return program.replace(eqns=tuple(eqns))


def _literals(arguments: Any) -> Iterator[Any]:
    """The literals among the arguments of an equation."""
    if isinstance(arguments, Mapping):
        arguments = tuple(arguments.values())
    if isinstance(arguments, list | tuple):
        for x in arguments:
            yield from _literals(x)
    else:
        yield arguments


def _is_infinite(literal: Any) -> bool:
    """Whether a literal has an infinity, and no NaN."""
    if isinstance(literal, torch.Tensor):
        if not literal.is_floating_point():
            return False
        return bool(literal.isinf().any()) and not bool(literal.isnan().any())
    return isinstance(literal, float) and math.isinf(literal)
