"""differences: print what a pass changed in a program, a summary first, then equation by equation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import accumulate, chain
from typing import NamedTuple

from ..collectives import is_start, rules
from ..graph import Eqn, Graph
from ..micro_batches import in_order
from .programs import entries
from .stages import HasGraph
from .units import format_bytes

_RUN = 16  # a longer run of added or removed entries folds
_PLACES = 24  # the places that print; more of them fold

Code = tuple[
    str, int, int, int, int
]  # of difflib: an action, and the ranges of entries in the old and the new program


class Traffic(NamedTuple):
    """The traffic of a mesh axis and role: the numbers of collectives and of values, and the bytes a rank receives."""

    collectives: int = 0
    values: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        return f"{_count(self.collectives, 'collective')} of {_count(self.values, 'value')}, {format_bytes(self.bytes)}"


def traffic(graph: Graph) -> dict[tuple[str, str], Traffic]:
    """The traffic of a program, by mesh axis and role."""
    totals: dict[tuple[str, str], Traffic] = {}
    for eqn in (e for program in in_order(graph) for e in program.eqns if is_start(e)):
        key = eqn.kwargs["axis"], eqn.provenance.role if eqn.provenance else "user"
        collectives, values, total = totals.get(key, Traffic())
        received = rules(eqn).wire_bytes(eqn, graph.axes)
        totals[key] = Traffic(collectives + 1, values + len(eqn.outs), total + received)
    return dict(sorted(totals.items()))


def diff(
    before: Graph | HasGraph, after: Graph | HasGraph, context: int = 1, *, full: bool = False
) -> str:
    """Print what a pass changed: a summary, then each place where the programs differ, as a unified diff.

    Args:
        before, after: two programs, or two stages of a step.
        context: the number of equal entries to show around each place.
        full: show all places, and a line for each member of a bucket. Otherwise long changes fold.

    Returns: The text; empty for equal programs.

    Raises: TypeError if an argument is neither a program nor a stage.

    >>> import torch
    >>> from ztrans.ir.graph import Var
    >>> x, y = Var("x", torch.float32, (4,)), Var("y", torch.float32, (4,))
    >>> relu, neg = (Eqn(op, (x,), (y,)) for op in (torch.ops.aten.relu.default, torch.ops.aten.neg.default))
    >>> print(diff(*(Graph("f", (x,), (eqn,), (y,), 0) for eqn in (relu, neg))))
    # equations: 1 rewritten
    @@ -5,3 +5,3 @@
       # forward
    -  y: f32[4] = relu(x)
    +  y: f32[4] = neg(x)
       return y
    """
    graphs = [_graph(stage) for stage in (before, after)]
    old, new = (_parts(graph, full) for graph in graphs)
    matcher = SequenceMatcher(None, [part.text for part in old], [part.text for part in new])
    places = list(matcher.get_grouped_opcodes(context))
    if not places:
        return ""
    codes = [code for code in chain(*places) if code[0] != "equal"]
    removed = list(chain(*(old[i:end] for _, i, end, _, _ in codes)))
    added = list(chain(*(new[j:end] for _, _, _, j, end in codes)))
    alike = _alike([*removed, *added])
    shown = places if full or len(places) <= _PLACES else places[:_PLACES]
    lines = [*_summary(removed, added), *_sent(*map(traffic, graphs))]
    lines += chain(*(_place(place, old, new, alike, full) for place in shown))
    if shown is not places:
        lines.append(f"... {len(places) - len(shown)} more places, with full=True")
    return "\n".join(lines)


def _graph(stage: Graph | HasGraph) -> Graph:
    graph = stage if isinstance(stage, Graph) else getattr(stage, "graph", None)
    if not isinstance(graph, Graph):
        kind = type(stage).__name__
        raise TypeError(
            f"diff: got a {kind}; it compares programs: Graph, Traced, Lowered or Compiled."
        )
    return graph


class _Part(NamedTuple):
    """An entry of a program, with the two forms in which it may print."""

    text: str
    short: tuple[str, ...]  # the lines of the short form
    long: tuple[str, ...]  # the lines of the long form, one for each member of a bucket
    eqn: Eqn | None
    line: int  # the number of its first line in the printed program


def _parts(graph: Graph, full: bool) -> list[_Part]:
    long = list(entries(graph, full=True))
    short = long if full else list(entries(graph))
    numbers = accumulate((len(entry.lines) for entry in short), initial=1)
    return [
        _Part(a.text, b.lines, a.lines, a.eqn, number) for a, b, number in zip(long, short, numbers)
    ]


def _alike(parts: list[_Part]) -> set[tuple[str, ...]]:
    """The short forms that several entries share although they differ."""
    forms = Counter(short for short, _ in {(part.short, part.text) for part in parts})
    return {short for short, texts in forms.items() if texts > 1}


def _place(
    codes: Sequence[Code],
    old: list[_Part],
    new: list[_Part],
    alike: set[tuple[str, ...]],
    full: bool,
) -> list[str]:
    """One place: its line numbers in the printed programs, then its lines."""
    (_, i, _, j, _), (_, _, i_end, _, j_end) = codes[0], codes[-1]
    lines = [f"@@ -{_range(old, i, i_end)} +{_range(new, j, j_end)} @@"]
    for action, i, i_end, j, j_end in codes:
        if action == "equal":
            lines += [f" {line}" for part in old[i:i_end] for line in part.short]
        else:
            lines += _run("-", old[i:i_end], alike, full)
            lines += _run("+", new[j:j_end], alike, full)
    return lines


def _range(parts: list[_Part], first: int, end: int) -> str:
    """The lines of some entries in the printed program: the number of the first, and how many there are."""
    return f"{parts[first].line},{sum(len(part.short) for part in parts[first:end])}"


def _run(sign: str, parts: list[_Part], alike: set[tuple[str, ...]], full: bool) -> list[str]:
    """The lines of a run of entries that are removed, or added.

    An entry prints in its long form if the short one would not show how it differs.
    """
    few = parts if full or len(parts) <= _RUN else parts[: _RUN // 2]
    lines = [
        sign + line for part in few for line in (part.long if part.short in alike else part.short)
    ]
    return lines if few is parts else [*lines, f"{sign}  ... {len(parts) - len(few)} more"]


def _summary(removed: list[_Part], added: list[_Part]) -> list[str]:
    """How many equations were moved, rewritten, added and removed."""
    old_texts, new_texts = (
        Counter(part.text for part in parts if part.eqn) for parts in (removed, added)
    )
    names = lambda parts, others: Counter(
        tuple(out.name for out in part.eqn.results)
        for part in parts
        if part.eqn and part.text not in others
    )
    old, new = names(removed, new_texts), names(added, old_texts)
    counts = {
        "moved": (old_texts & new_texts).total(),
        "rewritten": (old & new).total(),
        "added": (new - old).total(),
        "removed": (old - new).total(),
    }
    verbs = [f"{number} {verb}" for verb, number in counts.items() if number]
    return [f"# equations: {', '.join(verbs)}"] if verbs else []


def _sent(
    before: dict[tuple[str, str], Traffic], after: dict[tuple[str, str], Traffic]
) -> list[str]:
    """A line for the traffic of each mesh axis and role, with an arrow if the two programs differ in it."""
    lines = []
    for key in sorted({*before, *after}):
        old, new = (str(sent.get(key, Traffic())) for sent in (before, after))
        lines.append(f"#   {' '.join(key)}: {new if old == new else f'{old} -> {new}'}")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
