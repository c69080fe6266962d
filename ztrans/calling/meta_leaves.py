"""What leaves on the meta device hold when `shard` gives them memory.

Some values are known: the moments and step counts of a new optimizer are zeros. `ValuesOfMeta` notes them while the
optimizer makes its state. Every other leaf is filled with NaN, and a whole number or a bool with zeros, and it is
marked. The first step refuses a marked leaf to which nobody has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..ir.printer import first_names

aten = torch.ops.aten
Number = float | int | bool

_values = WeakIdKeyDictionary()  # a meta tensor -> the number that all of its elements are
_unwritten = WeakIdKeyDictionary()  # a leaf with a fill in its memory -> the version of that memory

# Of operations that make a tensor of equal elements: the number, from the arguments of the call.
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
    """Note the values of the meta tensors of equal elements that are made in this context.

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
    """The number that all elements of a meta tensor are, or None if it is not known."""
    return _values.get(leaf)


def fill_of(leaf: torch.Tensor) -> Number:
    """What the memory of a meta leaf is filled with: its value if that is known, else NaN where there is one."""
    value = value_of_meta(leaf)
    if value is not None:
        return value
    return float("nan") if leaf.is_floating_point() or leaf.is_complex() else 0


def mark_unwritten(leaf: torch.Tensor, of_meta: Any) -> None:
    """Mark a leaf that has got memory for the meta tensor `of_meta`, unless the value of that is known."""
    if isinstance(of_meta, torch.Tensor) and of_meta.is_meta and value_of_meta(of_meta) is None:
        _unwritten[leaf] = _memory(leaf)._version


def check_written(name: str, paths: Iterable[str], leaves: Iterable[Any]) -> None:
    """Check that each leaf of a state has been written to since `shard` has given it memory.

    A step asks once for each leaf: what has been written needs no mark any more.

    Raises: ValueError that names the leaves to which nobody has written.
    """
    if not _unwritten:
        return
    unwritten = []
    for path, leaf in zip(paths, leaves):
        version = _unwritten.get(leaf) if isinstance(leaf, torch.Tensor) else None
        if version is None:
            continue
        if _is_unwritten(_memory(leaf), version):
            unwritten.append(path)
        else:
            del _unwritten[leaf]
    if unwritten:
        raise ValueError(
            f"{name}: nobody has written to {first_names(unwritten)} since shard has given memory to this meta "
            f"state.\n"
            f"Fill each leaf in place before the first step: torch.nn.init.normal_(leaf), leaf.zero_(), or load a "
            f"checkpoint, zt.load(path, state)."
        )


def _memory(leaf: torch.Tensor) -> torch.Tensor:
    """The tensor whose version says whether this rank's part of a leaf has been written."""
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def _is_unwritten(memory: torch.Tensor, version: int) -> bool:
    """Whether a leaf still has the memory and the elements that `shard` gave it.

    A write through `leaf.data` does not count in the version, so the elements are compared too.
    """
    if memory._version != version or not memory.numel():
        return False
    return bool(
        (memory.isnan() if memory.is_floating_point() or memory.is_complex() else memory == 0).all()
    )
