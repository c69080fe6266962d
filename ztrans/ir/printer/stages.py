"""stages: how a stage of a step prints, which is as its program."""

from __future__ import annotations

from typing import Protocol

from ..graph import Graph
from .notebook import html
from .programs import program


class HasGraph(Protocol):
    """A stage of a step: `Traced`, `Lowered` or `Compiled`."""

    @property
    def graph(self) -> Graph: ...


class Printed:
    """What all stages share: each prints as its program."""

    def as_text(self: HasGraph, *, full: bool = False) -> str:
        """The program as text; a long bucket folds, or with `full` has a line for each member."""
        return program(self.graph, full)

    def __str__(self: HasGraph) -> str:
        return program(self.graph)

    def _repr_html_(self: HasGraph) -> str:
        return html(self.graph)
