"""Print the changes of a pass to a program: first a summary, then equation by equation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from .graph import Eqn, Graph
from .printer import HasGraph, counted, entries
from .wire_traffic import WireTraffic, wire_traffic

_LONGEST_RUN = 16  # a longer run of added or removed entries folds
_MOST_PLACES = 24  # more places than these fold

# An opcode of difflib: an action, and the ranges of entries in the old and the new program.
Opcode = tuple[str, int, int, int, int]


def diff(
    before: Graph | HasGraph, after: Graph | HasGraph, context: int = 1, *, full: bool = False
) -> str:
    """The changes from one program to another: a summary, then each place where they differ, as a unified diff.

    Args:
        before, after: two programs, or two stages of a step.
        context: the number of equal entries to show around each place.
        full: show all places, with a line for each member of a bucket. Otherwise long changes fold.

    Returns: The text, empty for equal programs.

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
    old_graph = _graph(before)
    new_graph = _graph(after)
    old = _parts(old_graph, full)
    new = _parts(new_graph, full)
    matcher = SequenceMatcher(None, [part.text for part in old], [part.text for part in new])
    places = list(matcher.get_grouped_opcodes(context))
    if not places:
        return ""

    old_parts: list[_Part] = []
    new_parts: list[_Part] = []
    for place in places:
        for action, i, i_end, j, j_end in place:
            if action != "equal":
                old_parts += old[i:i_end]
                new_parts += new[j:j_end]

    lines = [
        *_summary(old_parts, new_parts),
        *_traffic_lines(wire_traffic(old_graph), wire_traffic(new_graph)),
    ]
    ambiguous = _ambiguous([*old_parts, *new_parts])
    most = len(places) if full else _MOST_PLACES
    for place in places[:most]:
        lines += _place(place, old, new, ambiguous, full)
    if len(places) > most:
        lines.append(f"... {counted(len(places) - most, 'more place')}, with full=True")
    return "\n".join(lines)


def _graph(stage: Graph | HasGraph) -> Graph:
    graph = stage if isinstance(stage, Graph) else getattr(stage, "graph", None)
    if not isinstance(graph, Graph):
        raise TypeError(
            f"diff: got a {type(stage).__name__}; it compares programs: Graph, Traced, Lowered or Compiled."
        )
    return graph


class _Part(NamedTuple):
    """An entry of a program, with the two forms that may print.

    Attributes:
        text: the text to compare.
        short: the lines of the short form.
        long: the lines of the long form, with a line for each member of a bucket.
        eqn: the equation, if the entry is one.
        line: the number of its first line in the printed program.
    """

    text: str
    short: tuple[str, ...]
    long: tuple[str, ...]
    eqn: Eqn | None
    line: int


def _parts(graph: Graph, full: bool) -> list[_Part]:
    parts = []
    line = 1
    for long, short in zip(entries(graph, full=True), entries(graph, full)):
        parts.append(_Part(long.text, short.lines, long.lines, long.eqn, line))
        line += len(short.lines)
    return parts


def _ambiguous(parts: list[_Part]) -> set[tuple[str, ...]]:
    """The short forms that several different entries share."""
    texts_by_form: dict[tuple[str, ...], set[str]] = {}
    for part in parts:
        texts_by_form.setdefault(part.short, set()).add(part.text)
    return {short for short, texts in texts_by_form.items() if len(texts) > 1}


def _place(
    opcodes: Sequence[Opcode],
    old: list[_Part],
    new: list[_Part],
    ambiguous: set[tuple[str, ...]],
    full: bool,
) -> list[str]:
    """One place: its line numbers in the printed programs, then its lines."""
    _, i, _, j, _ = opcodes[0]
    _, _, i_end, _, j_end = opcodes[-1]
    lines = [f"@@ -{_range(old, i, i_end)} +{_range(new, j, j_end)} @@"]
    for action, i, i_end, j, j_end in opcodes:
        if action == "equal":
            for part in old[i:i_end]:
                lines += [f" {line}" for line in part.short]
        else:
            lines += _run("-", old[i:i_end], ambiguous, full)
            lines += _run("+", new[j:j_end], ambiguous, full)
    return lines


def _range(parts: list[_Part], first: int, end: int) -> str:
    """The lines of several entries in the printed program: the number of the first, and their count."""
    return f"{parts[first].line},{sum(len(part.short) for part in parts[first:end])}"


def _run(sign: str, parts: list[_Part], ambiguous: set[tuple[str, ...]], full: bool) -> list[str]:
    """The lines of a run of removed or added entries.

    An entry prints in its long form if the short form would not show its difference.
    """
    shown = parts if full or len(parts) <= _LONGEST_RUN else parts[: _LONGEST_RUN // 2]
    lines: list[str] = []
    for part in shown:
        form = part.long if part.short in ambiguous else part.short
        lines += [sign + line for line in form]
    if len(shown) < len(parts):
        lines.append(f"{sign}  ... {len(parts) - len(shown)} more")
    return lines


def _summary(old_parts: list[_Part], new_parts: list[_Part]) -> list[str]:
    """A line with the numbers of equations that were moved, rewritten, added and removed."""
    old_texts = Counter(part.text for part in old_parts if part.eqn)
    new_texts = Counter(part.text for part in new_parts if part.eqn)
    old = _results(old_parts, new_texts)
    new = _results(new_parts, old_texts)
    counts = {
        "moved": (old_texts & new_texts).total(),
        "rewritten": (old & new).total(),
        "added": (new - old).total(),
        "removed": (old - new).total(),
    }
    verbs = [f"{number} {verb}" for verb, number in counts.items() if number]
    return [f"# equations: {', '.join(verbs)}"] if verbs else []


def _results(parts: Iterable[_Part], known_texts: Counter[str]) -> Counter[tuple[str, ...]]:
    """The names of the results of each equation whose text is not among `known_texts`."""
    names: Counter[tuple[str, ...]] = Counter()
    for part in parts:
        if part.eqn is not None and part.text not in known_texts:
            names[tuple(out.name for out in part.eqn.results)] += 1
    return names


def _traffic_lines(
    old_traffic: dict[tuple[str, str], WireTraffic], new_traffic: dict[tuple[str, str], WireTraffic]
) -> list[str]:
    """A line for the traffic of each mesh axis and role, with an arrow if it differs."""
    lines = []
    for key in sorted({*old_traffic, *new_traffic}):
        old = old_traffic.get(key, WireTraffic())
        new = new_traffic.get(key, WireTraffic())
        change = str(new) if old == new else f"{old} -> {new}"
        lines.append(f"#   {' '.join(key)}: {change}")
    return lines
