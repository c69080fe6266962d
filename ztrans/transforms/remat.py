"""Recompute activations in backward, instead of keeping them from forward."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from ..ir.graph import Demand, Eqn, Graph, Var, producers
from ..ir.liveness import liveness
from ..ir.op_facts import is_matmul
from ..rewrites.cheap_values import cheap_values
from ..rewrites.keep_on_host import values_for_backward
from ..rewrites.recompute import originals, recompute, repeatable, without_repeats
from .base import Transform, byte_count, constructor, is_from

Saves = Callable[[Eqn], bool]  # whether to keep the results of an equation of forward for backward
Lines = Mapping[str, Demand]  # the demand of each line, such as "net.py:14"
# After the policies of jax.checkpoint: dots_saveable, nothing_saveable and everything_saveable.
_POLICIES: Mapping[str, Saves] = {
    "save_matmuls": is_matmul,
    "save_nothing": lambda e: False,
    "save_everything": lambda e: True,
}


@constructor
def remat(
    *,
    memory: int | float | Literal["auto"] | None = None,
    save: str | Saves | Lines | None = None,
    at_least: int | float = 1 << 16,
) -> Transform:
    """Recompute activations in backward instead of keeping them: less memory, the same bits.

    Without `memory` and `save`, it recomputes values that cost no memory and almost no time: elementwise results,
    casts, copies and layer norms whose inputs are live in backward anyway. A recomputed value may live until another
    one is recomputed from it, which very seldom raises the peak. Matrix products, attention and random draws are never
    repeated.

    With `memory`, the plan may recompute any result of forward, including matrix products and attention. It chooses the
    fastest step within the limit, and divides the memory between kept values and messages. Random draws, results of the
    step's own collectives, and values that the update reads are always kept. Checkpoints of the step become
    preferences, except for MUST_SAVE and MUST_RECOMPUTE. Each value is recomputed right before backward first reads it.
    With `offload(memory=...)` values may wait on the host instead.

    With `save` alone, backward recomputes everything that the policy does not save.

    Rewrites:
        a = gelu(h); y = mm(a, w)               a = gelu(h); y = mm(a, w)
        ...                              -->    ...
        dw = mm(dy, a)                          a' = gelu(h); dw = mm(dy, a')
        dh = gelu_backward(da, h)               dh = gelu_backward(da, h)

    Args:
        memory: the greatest number of bytes that may be live on a rank, a hard limit on the whole step. "auto" is the
            limit that the step already has: the limit of another transform, or the memory of the device. On CPUs there
            may be none; then "auto" means the same as leaving `memory` out.
        save: the values that are kept in any case. "save_matmuls" keeps the results of matrix products and attention;
            "save_everything" and "save_nothing" do what their names say. A function of an equation decides whether its
            results are kept. A dict decides for lines of the step: `{"net.py:14": "save", "net.py:20": "recompute"}`;
            on other lines only checkpoints recompute values. With "host" the results of a line wait in the memory of
            the host until backward reads them, as with MUST_CPU_OFFLOAD of a selective checkpoint.
        at_least: the least size in bytes of a recomputed value.

    Raises: ValueError if `memory` or `at_least` is not a number of bytes, or a policy is unknown. When the step is
        lowered, ValueError if a line has no equation of forward, or if nothing fits the limit.

    Source: PyTorch's min-cut partitioner; Chen et al., "Training deep nets with sublinear memory cost", 2016; the
    policies of jax.checkpoint.

    >>> remat(), remat(memory=40 << 30, save="save_matmuls")
    (remat(), remat(memory=42949672960, save='save_matmuls'))
    """
    limit = byte_count("remat: memory", memory, 1, "auto", None)
    least = byte_count("remat: at_least", at_least, 0)
    _check_policy(save)
    policy = tuple(save.items()) if isinstance(save, Mapping) else save
    return _Remat(limit, policy, least)


def _check_policy(save: object) -> None:
    """Raises: ValueError for an unknown policy."""
    if isinstance(save, Mapping):
        for line, demand in save.items():
            if demand not in get_args(Demand):
                raise ValueError(
                    f"remat: save={{{line!r}: {demand!r}}}; a line is 'save', 'recompute' or 'host'."
                )
    elif save is not None and not callable(save) and save not in _POLICIES:
        policies = ", ".join(map(repr, _POLICIES))
        raise ValueError(
            f"remat: save={save!r}; there are {policies}, a function of an equation, and a dict of lines."
        )


@dataclass(frozen=True)
class _Remat(Transform):
    memory: int | str | None = None
    save: str | Saves | tuple[tuple[str, Demand], ...] | None = None
    at_least: int = 1 << 16

    phase: ClassVar[float] = 0

    @property
    def memory_limit(self) -> int | None:
        return self.memory if isinstance(self.memory, int) else None

    def within(self, limit: int) -> Transform:
        return self if self.memory is None else dataclasses.replace(self, memory=limit)

    def rewrite(self, graph: Graph) -> Graph:
        if self._is_limited(graph):
            # The plan chooses the values to recompute. Only the demands of checkpoints bind it.
            plain = self._with_demands(without_repeats(graph))
            return plain.with_hints(recompute_at_least=self.at_least)
        if self.save is None:
            return recompute(graph, cheap_values(graph, self.at_least))
        names_lines = isinstance(self.save, tuple)
        demanded = self._with_demands(graph)
        return _recompute_unsaved(demanded, None if names_lines else self.at_least)

    def _is_limited(self, graph: Graph) -> bool:
        """Whether the option `memory` sets a limit. With "auto" there may be none."""
        if self.memory is None:
            return False
        return self.memory_limit is not None or graph.hints.memory_limit is not None

    def _with_demands(self, graph: Graph) -> Graph:
        """The program with the policy's demands on equations of forward. Demands of checkpoints take precedence.

        Raises: ValueError if a line has no equation of forward.
        """
        if self.save is None:
            return graph
        if isinstance(self.save, tuple):
            demand_of = _demands_of_lines(graph, dict(self.save))
        else:
            policy = _POLICIES[self.save] if isinstance(self.save, str) else self.save
            demand_of = {}
            for e in graph.eqns:
                if e.region == "forward" and policy(e):
                    demand_of[e] = "save"
        eqns = []
        for e in graph.eqns:
            if e in demand_of and e.demand is None:
                e = e.replace(demand=demand_of[e])
            eqns.append(e)
        return graph.replace(eqns=tuple(eqns))


def _demands_of_lines(graph: Graph, lines: Lines) -> dict[Eqn, Demand]:
    """The demand on each equation of forward that comes from one of the lines.

    Raises: ValueError if a line has no equation of forward, or demands "host" and none of its values can wait there.
    """
    demand_of: dict[Eqn, Demand] = {}
    lines_of_forward: set[str] = set()
    unused = set(lines)
    for e in graph.eqns:
        if e.region != "forward" or e.source is None:
            continue
        lines_of_forward.add(f"{os.path.basename(e.source.file)}:{e.source.line}")
        for line, demand in lines.items():
            if is_from(e, line):
                demand_of[e] = demand
                unused.discard(line)
    for line in lines:
        if line in unused:
            raise ValueError(
                f"remat: save names {line}, and no equation of forward in {graph.name} comes from there.\n"
                f"Its lines are {', '.join(sorted(lines_of_forward))}."
            )
        if lines[line] == "host":
            _check_host_line(graph, line, demand_of)
    return demand_of


def _check_host_line(graph: Graph, line: str, demand_of: Mapping[Eqn, Demand]) -> None:
    """Raises: ValueError if no result of a line can wait on the host."""
    results: set[Var] = set()
    for e, demand in demand_of.items():
        if demand == "host" and is_from(e, line):
            results.update(e.results)
    movable = values_for_backward(graph)
    if results and not any(v in movable for v in results):
        raise ValueError(
            f"remat: save moves the values of {line} to the host, and none of them can be there until backward: it "
            f"does not read them, or the update reads them too, or the step returns them.\n"
            f"Name another line, or leave this one out."
        )


def _recompute_unsaved(graph: Graph, at_least: int | None) -> Graph:
    """Recompute the values that lines and checkpoints demand, and all other values of at least `at_least` bytes.

    If `at_least` is None, only the demanded values are recomputed. A value that the policy saves is never recomputed,
    even within a checkpoint.
    """
    plain = without_repeats(graph)
    root = liveness(plain).root
    makers = producers(plain.eqns)
    values = set()
    # Only owners of storage are chosen: their views are recomputed with them.
    for v in originals(graph).values():
        if root[v] is v and makers[v].demand != "save":
            values.add(v)
    for v, e in repeatable(plain).items():
        is_large = at_least is not None and v.nbytes >= at_least
        if e.demand == "recompute" or (is_large and e.demand is None):
            values.add(v)
    return recompute(plain, values)
