"""The kinds of bars of a timeline, and their colours.

Compute has cool colours, by region; recomputation in backward has a colour of its own. Communication has warm colours,
by the role of the collective. Copies between the device and the host count as communication, with the role "offload".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..ir.graph import MemoryKind
from .event import COMPUTE, Event

if TYPE_CHECKING:  # `timeline` imports this module
    from .timeline import Timeline

# For each kind, its colours on a light and on a dark background.
COLOURS = {
    "forward": ("#86afd9", "#8db4de"),
    "backward": ("#3f6ba6", "#4d7bb8"),
    "recomputed": ("#9184d6", "#9d91e0"),
    "update": ("#4ea399", "#52a89e"),
    "param": ("#e5ab4e", "#dea64c"),
    "grad": ("#c8593e", "#d2684d"),
    "output": ("#a487ac", "#ab90b3"),
    "pmean": ("#7d5f86", "#92739c"),
    "state": ("#98a1ad", "#8d97a5"),
    "update messages": ("#b3a444", "#bbac4e"),
    "user": ("#6f8f5a", "#7f9f69"),
    "offload": ("#c9719b", "#d27fa6"),
}
# The colours of the curve of each memory.
MEMORY_COLOURS: dict[MemoryKind, tuple[str, str]] = {
    "device": ("#8b8f96", "#868b93"),
    "host": COLOURS["offload"],
}


def kind_of(event: Event) -> str:
    """The kind of a bar, a key of `COLOURS`: by the region of an operation, or by the role of a message.

    >>> from ztrans.ir.graph import Eqn
    >>> kind_of(Event("compute", 0.0, 1.0, Eqn(None, (), (), region="backward")))
    'backward'
    """
    if event.lane == COMPUTE:
        return event.eqn.region if event.eqn.repeats is None else "recomputed"
    if event.eqn.provenance is None:
        return "user"
    role = event.eqn.provenance.role
    return "update messages" if role == "update" else role


def used_kinds(timelines: Iterable[Timeline]) -> list[str]:
    """The kinds of the bars of some timelines, in the order of `COLOURS`."""
    kinds: set[str] = set()
    for timeline in timelines:
        kinds.update(map(kind_of, timeline.events))
    return [kind for kind in COLOURS if kind in kinds]
