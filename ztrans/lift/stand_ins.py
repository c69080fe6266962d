"""Stand-ins: the tensors that a lifted loop step trains in place of its module's own parameters.

While the loop step is traced, the module and its optimizers hold tensors of the state. A parameter that was taken from
the module before, for example into a list, is not one of them, and changing it has no effect on the program. So using
such a parameter is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..ir.relations import tensors_in
from ..ir.source import Source, user_source, where
from ..tracing.errors import TraceError

# Properties of the module's own parameters that a loop step may read, because the stand-ins have the same.
_METADATA = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "__hash__", "__len__"),
)


class StandIns(TorchFunctionMode):
    """Refuse uses of the module's `own` parameters while stand-ins replace them. `own` maps their ids to names."""

    def __init__(self, stand_ins: Mapping[str, torch.Tensor], own: Mapping[int, str]) -> None:
        super().__init__()
        self.own, self.stand_ins = own, stand_ins
        self._trained = {name: p.requires_grad for name, p in stand_ins.items()}
        self._names = {id(p): name for name, p in stand_ins.items()}
        self._computed_with: set[str] = set()
        self._set_first: set[str] = (
            set()
        )  # parameters whose requires_grad was set before any operation used them

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = (
            getattr(getattr(func, "__self__", None), "__name__", "")
            if name in ("__get__", "__set__")
            else ""
        )
        tensors = tensors_in((args, kwargs))
        harmless = name in _METADATA or (name == "__get__" and attribute != "grad")
        taken = next((self.own[id(x)] for x in tensors if id(x) in self.own), None)
        if taken is not None and not harmless:
            raise _from_outside(taken, f".{attribute}" if attribute else name, user_source(2))
        result = func(*args, **kwargs)
        self._note(
            {self._names[id(x)] for x in tensors if id(x) in self._names}, name, attribute, result
        )
        return result

    def _note(self, used: set[str], name: str, attribute: str, result: Any) -> None:
        """Record that an operation, or the access to an attribute, has used these stand-ins."""
        if name == "requires_grad_" or (name == "__set__" and attribute == "requires_grad"):
            self._set_first |= used - self._computed_with
        elif used and attribute != "grad" and tensors_in(result):
            self._computed_with |= used

    def check(self) -> None:
        """Raises: ValueError if requires_grad of a parameter differs from that at the start of the call."""
        for name, p in self.stand_ins.items():
            if p.requires_grad != self._trained[name] and name not in self._set_first:
                raise TraceError(
                    f"lift: the loop step leaves requires_grad={p.requires_grad} on {name}, where it was "
                    f"{self._trained[name]}; the next call would start from {self._trained[name]} again.\n"
                    f"Set it at the beginning of the loop step, or outside of it: the step is then traced anew."
                )


def _from_outside(name: str, use: str, source: Source | None) -> TraceError:
    return TraceError(
        f"lift: the loop step uses {name} as it was taken from the module before ({use}). While the loop runs another "
        f"tensor stands in for it, and this one has no effect.\n"
        f"  at {where(source)}\n"
        f"Take parameters from the module inside the loop step: model.parameters()."
    )
