"""Copies between the memories of the device and its host, as equations.

    f = to_host(v)            device memory -> host memory
    f = to_host(v, over=h)    the same, into the storage of `h`, which nothing reads afterwards
    f = to_device(h)          host memory -> device memory
    x = wait(f)               the copy has ended

Like a collective, a copy runs in parallel with compute between its start and its wait, but it involves no other rank.
Copies in the same direction share a queue. A copy reads its source until the wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from .graph import Eqn, MemoryKind, Primitive, Provenance, Var, value_of_future
from .layout import bytes_on_first_rank
from .rules import Kind, Memberwise, Sizes, Wait

# A copy has this in its provenance and in the name of its queue, where a collective has its mesh axis.
LINK = "host"


class Copy(Memberwise):
    """Rules of to_host and to_device: the result is a future of the same value in the other memory.

    Attributes:
        source, target: the memories that it copies from and to.
    """

    starts = True
    copies = True
    source: ClassVar[MemoryKind]
    target: ClassVar[MemoryKind]

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        value, future = eqn.ins[0], eqn.outs[0]
        if future is None or not future.future or eqn.provenance is None:
            return "a copy has a provenance, and a future as its result"
        if (value.memory, future.memory) != (self.source, self.target):
            return f"{value} is copied from the {self.source} to the {self.target}"
        if not dataclasses.replace(value, memory=self.target).is_like(future):
            return f"a copy changes the type of {value}"
        over = eqn.kwargs.get("over")
        if over is not None and not over.is_like(future):
            return f"a copy does not fit into the storage of {over}"
        return None

    def stays_in_buffer(self, eqn: Eqn, index: int) -> bool:
        return True

    def sends_without_copy(self, eqn: Eqn, index: int, sizes: Sizes) -> bool:
        return True

    def received_bytes(self, eqn: Eqn, index: int, sizes: Sizes) -> int:
        return bytes_on_first_rank(eqn.results[index], sizes)

    def wire_bytes(self, eqn: Eqn, sizes: Sizes) -> int:
        return self.received_bytes(eqn, 0, sizes)


class ToHost(Copy):
    """Rules of to_host."""

    kind = Kind("to_host", touched=1.0)  # it reads the memory of the device
    lane = "out"
    source: ClassVar[MemoryKind] = "device"
    target: ClassVar[MemoryKind] = "host"


class ToDevice(Copy):
    """Rules of to_device."""

    kind = Kind("to_device", touched=1.0)  # it writes the memory of the device
    lane = "in"
    source: ClassVar[MemoryKind] = "host"
    target: ClassVar[MemoryKind] = "device"


class CopyWait(Wait):
    """Rules of the wait for a copy. It prints like the wait for a collective, but no other rank takes part."""

    copies = True


TO_HOST = Primitive("to_host", ToHost())
TO_DEVICE = Primitive("to_device", ToDevice())
COPY_WAIT = Primitive("wait_for_copy", CopyWait())


def to_host(
    value: Var, name: str, paths: tuple[str, ...] = (), over: Var | None = None, **eqn: Any
) -> Eqn:
    """Start a copy of `value` to the host, into the storage of `over` or a new one. `paths` are leaves of the state.

    >>> import torch
    >>> print(to_host(Var("m", torch.float32, (4,)), "m.host").out)
    m.host': f32<host>[4]!
    """
    kwargs = {} if over is None else {"over": over}
    return _copy(TO_HOST, value, name, paths, kwargs, eqn)


def to_device(value: Var, name: str, paths: tuple[str, ...] = (), **eqn: Any) -> Eqn:
    """Start a copy of `value` from the host to the device. `paths` are leaves of the state."""
    return _copy(TO_DEVICE, value, name, paths, {}, eqn)


def wait_for_copy(future: Var, **eqn: Any) -> Eqn:
    """Wait for the `future` of a copy; its value has the future's name without the quote."""
    return Eqn(COPY_WAIT, (future,), (value_of_future(future),), **eqn)


def is_copy(eqn: Eqn) -> bool:
    """Whether the equation starts a copy between two memories."""
    return isinstance(eqn.op, Primitive) and isinstance(eqn.op.rules, Copy)


def _copy(
    op: Primitive,
    value: Var,
    name: str,
    paths: tuple[str, ...],
    kwargs: Mapping[str, Any],
    eqn: Mapping[str, Any],
) -> Eqn:
    target: MemoryKind = "host" if op is TO_HOST else "device"
    future = dataclasses.replace(value, name=f"{name}'", future=True, memory=target)
    provenance = Provenance("offload", paths, LINK)
    return Eqn(op, (value,), (future,), kwargs, provenance=provenance, **eqn)
