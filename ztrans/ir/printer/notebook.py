"""notebook: print a program as HTML, for a cell of a notebook.

The HTML has no script, no picture and no style sheet. It loads nothing, and changes nothing outside of the cell.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby

from ..graph import Graph
from .programs import Entry, entries

_MOST = 400  # the most equations of a region that are shown
_TEXT = (
    "font: 12px/1.5 ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre"
)
_EDGES = {
    "forward": "#86afd9",
    "backward": "#3f6ba6",
    "update": "#4ea399",
}  # as in the figure of a timeline


def html(graph: Graph) -> str:
    """A program as HTML: a block for each region, which the reader can fold, with the user's lines paler than the rest.

    A long region ends after 400 equations; `print` shows all of them.

    >>> import torch
    >>> from ztrans.ir.graph import Eqn, Var
    >>> x, y = Var("x", torch.float32, (4,)), Var("<y>", torch.float32, (4,))
    >>> cell = html(Graph("f", (x,), (Eqn(torch.ops.aten.relu.default, (x,), (y,)),), (y,), 0))
    >>> "&lt;y&gt;: f32[4] = relu(x)" in cell, "<y>" in cell
    (True, False)
    """
    blocks = (
        _block(region, list(block))
        for region, block in groupby(entries(graph), lambda entry: entry.region)
    )
    return f'<div style="overflow-x: auto">{"".join(blocks)}</div>'


def _block(region: str | None, block: list[Entry]) -> str:
    if region is None:
        return f'<pre style="margin: 0; {_TEXT}">{_text(block)}</pre>'
    equations = block[1:]  # after the heading
    more = f"\n  ... {len(equations) - _MOST:,} more" if len(equations) > _MOST else ""
    edge = f"margin: 0; padding-left: 8px; border-left: 3px solid {_EDGES.get(region, 'grey')}"
    return (
        f'<details open style="margin: 4px 0"><summary>{escape(region)}, {len(equations):,} equations</summary>'
        f'<pre style="{edge}; {_TEXT}">{_text(equations[:_MOST])}{more}</pre></details>'
    )


def _text(block: Iterable[Entry]) -> str:
    return "\n".join(_line(line, entry) for entry in block for line in entry.lines)


def _line(line: str, entry: Entry) -> str:
    text, mark, comment = line.rpartition("  # ")
    if not mark or entry.eqn is None or entry.eqn.source is None:
        return escape(line)
    return f'{escape(text)}<span style="opacity: .55">{escape(mark + comment)}</span>'
