"""The tensors of an ordinary model in a file of torch.save, or in files of safetensors."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Set
from pathlib import Path
from types import ModuleType

import torch
from torch.distributed.tensor import DTensor

from ...calling.trees import named_leaves
from ..leaves import cut_as
from .folder import partial, sync

_TORCH, _SAFE = (".pt", ".pth", ".bin"), ".safetensors"


def is_model_file(path: Path) -> bool:
    """Whether the suffix of a path is that of a file with tensors."""
    return path.suffix in (*_TORCH, _SAFE)


def is_model(path: Path) -> bool:
    """Whether a path is a file with tensors, or a folder with files of safetensors."""
    return is_model_file(path) or next(path.glob(f"*{_SAFE}"), None) is not None


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors by name. The file is replaced as a whole.

    Raises: ImportError if it is a file of safetensors, and safetensors is not installed.
    """
    part = partial(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.suffix == _SAFE:
            _safetensors().save_file(
                {name: x.contiguous() for name, x in tensors.items()}, part, {"format": "pt"}
            )
        else:
            torch.save(dict(tensors), part)
        sync(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class ModelFile:
    """Files to read: the shapes of their tensors by name, and their values, which are read where they are used."""

    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob(f"*{_SAFE}")) if path.is_dir() else [path]:
            self._tensors |= _read(file)
        self.shapes = {name: tuple(x.shape) for name, x in self._tensors.items()}

    def fill(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of each tensor in place. Nothing is communicated."""
        for name, leaf in parts.items():
            local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            local.detach().copy_(cut_as(self._tensors[name], leaf))

    def others(self, used: Set[str]) -> list[str]:
        """The names of the tensors that are not used. A second name of a used tensor is not among them."""
        at = lambda x: (x.data_ptr(), x.shape, x.stride(), x.dtype)
        known = {at(self._tensors[name]) for name in used}
        return [
            name for name, x in self._tensors.items() if name not in used and at(x) not in known
        ]


def _read(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, mapped into memory."""
    if file.suffix == _SAFE:
        return _safetensors().load_file(file)
    leaves = named_leaves(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
    return {
        name: torch.as_tensor(x)
        for name, x in leaves.items()
        if isinstance(x, torch.Tensor | int | float)
    }


def _safetensors() -> ModuleType:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(f"{error}\nA file {_SAFE} needs it: pip install safetensors.") from None
