"""Count the bytes of tensors that are live while a function runs, real or fake ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the memory of all tensors that operations inside the context make or read, but for `known` ones.

    Mapped files are not counted: they are pages of the file that the system may drop.

    Attributes:
        live: the bytes that are live now.
        peak: the most bytes that were live at one time.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: weakref.WeakSet = weakref.WeakSet(x.untyped_storage() for x in known)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        for x in pytree.tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor):
                self._see(x.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage in self._storages:
            return
        self._storages.add(storage)
        if storage.device.type == "cpu" and _is_of_file(storage.data_ptr()):
            return
        nbytes = storage.nbytes()
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, nbytes)

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes


def _is_of_file(address: int) -> bool:
    """Whether an address is in a file of tensors that is mapped into memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                return True
    return False
