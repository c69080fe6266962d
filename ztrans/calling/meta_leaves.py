"""The values that `shard` gives to meta leaves when it allocates memory for them.

Some values are known: the moments and step counts of a new optimizer are zeros. `ValuesOfMeta` records them while the
optimizer makes its state. `shard` fills every other leaf with NaN (zeros if it holds integers or bools) and records it
as unwritten. The first step refuses a leaf that is still unwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..ir.printer import first_names
from .leaf_records import RECORDS

aten = torch.ops.aten
Number = float | int | bool

_values = WeakIdKeyDictionary()  # a meta tensor -> the value of all of its elements

# Operations that make a tensor of equal elements, and the value of these by the arguments.
_NUMBERS: Mapping[Any, Callable[[Sequence[Any]], Number]] = {
    aten.zeros: lambda args: 0,
    aten.zeros_like: lambda args: 0,
    aten.new_zeros: lambda args: 0,
    aten.ones: lambda args: 1,
    aten.ones_like: lambda args: 1,
    aten.new_ones: lambda args: 1,
    aten.full: lambda args: args[1],
    aten.full_like: lambda args: args[1],
    aten.new_full: lambda args: args[2],
}


class ValuesOfMeta(TorchDispatchMode):
    """Records the values of meta tensors that are created with equal elements inside the context.

    >>> with ValuesOfMeta():
    ...     moments = torch.zeros_like(torch.empty(2, device="meta"))
    >>> value_of_meta(moments), value_of_meta(torch.zeros(2, device="meta"))
    (0, None)
    """

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        number = _NUMBERS.get(op.overloadpacket)
        if number is not None and result.is_meta:
            _values[result] = number(args)
        return result


def value_of_meta(leaf: torch.Tensor) -> Number | None:
    """The value of all elements of a meta tensor; None if it is not known."""
    return _values.get(leaf)


def fill_of(leaf: torch.Tensor) -> Number:
    """The number that `shard` fills a meta leaf with: its value if known, else NaN, or 0 in dtypes without NaN."""
    value = value_of_meta(leaf)
    if value is not None:
        return value
    return float("nan") if leaf.is_floating_point() or leaf.is_complex() else 0


def mark_unwritten(leaf: torch.Tensor, of_meta: Any) -> None:
    """Record a leaf as unwritten if it was allocated for a meta tensor, `of_meta`, of unknown value."""
    if isinstance(of_meta, torch.Tensor) and of_meta.is_meta and value_of_meta(of_meta) is None:
        RECORDS.refusals += 1
        RECORDS.of(leaf).fill_version = _memory(leaf)._version


def mark_unwritten_copy(copy: torch.Tensor, leaf: torch.Tensor) -> None:
    """Record a copy of a leaf as unwritten if nobody has written to the leaf."""
    version = RECORDS.of(leaf).fill_version if RECORDS.refusals else None
    if version is not None and _still_has_fill(_memory(leaf), version):
        RECORDS.refusals += 1
        RECORDS.of(copy).fill_version = _memory(copy)._version


def mark_written(leaf: torch.Tensor) -> None:
    """Record a leaf as written, by a writer that does not count in the version of its memory."""
    RECORDS.of(leaf).fill_version = None


def check_written(name: str, paths: Iterable[str], leaves: Iterable[Any]) -> None:
    """Check that somebody has written to each leaf of a state since `shard` allocated it.

    A written leaf is no longer recorded, so it is examined once.

    Raises: ValueError that names the unwritten leaves.
    """
    if not RECORDS.refusals:
        return
    unwritten = []
    for path, leaf in zip(paths, leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        record = RECORDS.of(leaf)
        if record.fill_version is None:
            continue
        if _still_has_fill(_memory(leaf), record.fill_version):
            unwritten.append(path)
        else:
            record.fill_version = None
    if unwritten:
        raise ValueError(
            f"{name}: nobody has written to {first_names(unwritten)} since shard allocated this meta state.\n"
            f"Fill each leaf in place before the first step: torch.nn.init.normal_(leaf), leaf.zero_(), or load a "
            f"checkpoint, zt.load(path, state). If the module was lifted before, pass the state that has its weights, "
            f"or call zt.write_back before you lift it again. Then start what transforms keep: "
            f"state = step.init(state)."
        )


def _memory(leaf: torch.Tensor) -> torch.Tensor:
    """This rank's part of a leaf. Its version counts the writes."""
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def _still_has_fill(memory: torch.Tensor, version: int) -> bool:
    """Whether a leaf still has the elements that `shard` filled it with.

    A write through `leaf.data` does not change the version, so the elements are compared too.
    """
    if memory._version != version or not memory.numel():
        return False
    if memory.is_floating_point() or memory.is_complex():
        return bool(memory.isnan().all())
    return bool((memory == 0).all())
