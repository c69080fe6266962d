"""Copies between the memory of the device and another memory, such as its host's, as equations.

    f = to_host(v)            device memory -> host memory
    f = to_host(v, over=h)    the same, into the storage of `h`, which nothing reads afterwards
    f = to_device(h)          another memory -> device memory
    x = wait(f)               the copy has ended

Like a collective, a copy runs in parallel with compute between its start and its wait, but it involves no other rank.
Copies from or to one memory in the same direction share a queue. A copy reads its source until the wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from .graph import Eqn, MemoryKind, Primitive, Provenance, Var, value_of_future
from .layout import bytes_on_first_rank
from .rules import Kind, Memberwise, Sizes, Wait


class Copy(Memberwise):
    """Rules of a copy to one of the memories: the result is a future of the same value there.

    Attributes:
        target: the memory that it copies to: from the device, or to the device from any other memory.
    """

    starts = True
    copies = True

    def __init__(self, target: MemoryKind) -> None:
        self.target = target
        self.kind = Kind(f"to_{target}", touched=1.0)  # it reads or writes the memory of the device
        self.lane = "in" if target == "device" else "out"

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        value, future = eqn.ins[0], eqn.outs[0]
        if future is None or not future.future or eqn.provenance is None:
            return "a copy has a provenance, and a future as its result"
        source = eqn.provenance.axis if self.target == "device" else "device"
        if (value.memory, future.memory) != (source, self.target):
            return f"{value} is copied from the {source} to the {self.target}"
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


class CopyWait(Wait):
    """Rules of the wait for a copy. It prints like the wait for a collective, but no other rank takes part."""

    copies = True


COPIES: Mapping[MemoryKind, Primitive] = {
    kind: Primitive(f"to_{kind}", Copy(kind)) for kind in get_args(MemoryKind)
}
TO_HOST = COPIES["host"]
TO_DEVICE = COPIES["device"]
COPY_WAIT = Primitive("wait_for_copy", CopyWait())


def copy_to(
    target: MemoryKind,
    value: Var,
    name: str,
    paths: tuple[str, ...] = (),
    over: Var | None = None,
    **eqn: Any,
) -> Eqn:
    """Start a copy of `value` to a memory, into the storage of `over` or a new one. `paths` are leaves of the state.

    The axis of its provenance is the other memory, from or to which the device copies. `ir.check` refuses a copy within
    one memory, and into a storage of another type.

    >>> import torch
    >>> print(copy_to("host", Var("m", torch.float32, (4,)), "m.host").out)
    m.host': f32<host>[4]!
    """
    future = dataclasses.replace(value, name=f"{name}'", future=True, memory=target)
    other = value.memory if target == "device" else target
    kwargs = {} if over is None else {"over": over}
    provenance = Provenance("offload", paths, other)
    return Eqn(COPIES[target], (value,), (future,), kwargs, provenance=provenance, **eqn)


def to_host(
    value: Var, name: str, paths: tuple[str, ...] = (), over: Var | None = None, **eqn: Any
) -> Eqn:
    """Start a copy of `value` to the memory of the host (see `copy_to`).

        f32[32@dp]   -->   f32<host>[32@dp]!

    >>> import torch
    >>> print(to_host(Var("m", torch.float32, (4,)), "m.host").out)
    m.host': f32<host>[4]!
    """
    return copy_to("host", value, name, paths, over, **eqn)


def to_device(value: Var, name: str, paths: tuple[str, ...] = (), **eqn: Any) -> Eqn:
    """Start a copy of `value` to the memory of the device (see `copy_to`).

        f32<host>[32@dp]   -->   f32[32@dp]!

    >>> import torch
    >>> print(to_device(Var("m", torch.float32, (4,), memory="host"), "m.device").out)
    m.device': f32[4]!
    """
    return copy_to("device", value, name, paths, **eqn)


def wait_for_copy(future: Var, **eqn: Any) -> Eqn:
    """Wait for the `future` of a copy; its value has the future's name without the quote.

        f32<host>[32@dp]!   -->   f32<host>[32@dp]

    >>> import torch
    >>> print(wait_for_copy(Var("m.host'", torch.float32, (4,), future=True, memory="host")).out)
    m.host: f32<host>[4]
    """
    return Eqn(COPY_WAIT, (future,), (value_of_future(future),), **eqn)


def is_copy(eqn: Eqn) -> bool:
    """Whether the equation starts a copy between two memories."""
    return isinstance(eqn.op, Primitive) and isinstance(eqn.op.rules, Copy)


def other_memory(copy: Eqn) -> MemoryKind:
    """The memory that is not the device's, from or to which a copy goes."""
    source = copy.ins[0].memory
    return copy.out.memory if source == "device" else source


def returns_to_device(eqn: Eqn) -> bool:
    """Whether the equation copies a value to the device that the program has computed, and not a leaf of the state."""
    return (
        is_copy(eqn)
        and eqn.out.memory == "device"
        and not (eqn.provenance and eqn.provenance.paths)
    )
