"""What a search has found: a table of settings, the fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from torch.distributed.device_mesh import DeviceMesh

from ..ir.layout import AbstractMesh
from ..ir.printer import format_bytes, format_seconds
from ..planning.cluster import Cluster
from ..report.table import columns
from ..stages import Lowered, Traced
from ..step import Step
from ..transforms.base import Transform, mesh_of
from .knobs import Values, described

HEAD = ["", "step", "samples/s", "peak", "host", "bytes", "bound", "", "layers planned", "setting"]


@dataclass(frozen=True, eq=False)
class Row:
    """A step that was planned.

    Attributes:
        step: the step with its transforms.
        cluster: the devices and links that it was planned for.
        values: (name of a knob, its value).
        seconds: the simulated seconds of a step.
        samples_per_second: rows of the batch a second, on all ranks.
        peak, host: the most bytes that are live on the device of a rank, and in its part of the host's memory.
        received: the bytes that a rank receives in a step.
        bound: seconds that no order of the same collectives beats, with any amount of memory.
        binds: what sets the bound: compute or wire.
        layers: the layers that were planned; the figures of the step follow from theirs.
        is_pareto: whether no other row is faster and has a lower peak too.
    """

    step: Step[..., Any]
    cluster: Cluster
    values: Values
    seconds: float
    samples_per_second: float
    peak: int
    host: int
    received: int
    bound: float
    binds: str
    layers: str
    traced: Traced = field(repr=False)
    is_pareto: bool = False

    def lower(self) -> Lowered:
        """The program of the whole step. Only micro-batches are traced again."""
        return self.traced.with_transforms(self.step.transforms).lower(cluster=self.cluster)

    @property
    def setting(self) -> str:
        """The values of the knobs as text."""
        return described(self.values) or "as it is"

    def code(self) -> str:
        """The step as Python: its mesh, and the chain of its transforms."""
        mesh = mesh_of(self.step.transforms)
        lines = []
        if isinstance(mesh, AbstractMesh):
            lines.append(f"mesh = zt.{mesh!r}")
        elif isinstance(mesh, DeviceMesh):
            sizes = zip(mesh.mesh_dim_names or (), mesh.shape)
            axes = ", ".join(f"{axis}={size}" for axis, size in sizes)
            lines.append(f"mesh = zt.make_mesh({mesh.device_type!r}, {axes})")
        lines.append("step = zt.chain(")
        lines += [f"    {_as_code(t)}," for t in self.step.transforms]
        lines.append(f")({self.step.__name__})")
        return "\n".join(lines)

    def cells(self) -> list[str]:
        return [
            "*" if self.is_pareto else "",
            format_seconds(self.seconds),
            f"{self.samples_per_second:,.4g}",
            format_bytes(self.peak),
            format_bytes(self.host) if self.host else "",
            format_bytes(self.received),
            f"{self.seconds / self.bound:.2f}x",
            self.binds,
            self.layers,
            self.setting,
        ]


def _as_code(t: Transform) -> str:
    """A transform as the call that makes it; one of the user's own as its repr."""
    text = repr(t)
    if t.mesh is not None:
        name, _, options = text.partition("(")
        text = f"{name}(mesh, {options}"
    return (
        f"zt.{text}" if type(t).__module__.startswith(f"{__package__.partition('.')[0]}.") else text
    )


@dataclass(frozen=True)
class Found(Sequence[Row]):
    """The steps that a search has planned, the fastest first. Printing it prints a table, then the notes.

    Attributes:
        rows: the steps.
        notes: what was not planned, and why; what more memory or faster links would bring.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def code(self) -> str:
        """The fastest step as Python (see `Row.code`)."""
        return self.rows[0].code()

    def __str__(self) -> str:
        words = tuple(HEAD.index(name) for name in ("layers planned", "setting"))
        table = columns([HEAD, *(row.cells() for row in self.rows)], left_aligned=(0, 7, *words))
        return "\n".join([table, "* no other row is faster and smaller", *self.notes])
