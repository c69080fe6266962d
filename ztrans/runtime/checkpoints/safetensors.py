"""The format of safetensors: the header of a file to write, and the tensors of the files to read.

A file has the length of its header in 8 bytes, the header, which is JSON, and then the bytes of the tensors. Headers
are written here, because the functions of the safetensors library take the tensors of a whole file.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...ir.printer import counted
from . import folder

INDEX_SUFFIX = ".safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """A tensor in a file: its dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def check_dtype_has_name(name: str, dtype: torch.dtype) -> None:
    """Raises: TypeError if the format has no such dtype."""
    if dtype not in _NAMES:
        raise TypeError(
            f"export: {name} is {dtype}, which safetensors does not have.\nConvert it, or leave it out."
        )


def header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file, before the bytes of its tensors, which follow in the order of `entries`.

    >>> header({"w": Entry(torch.float32, (2,))}, {"format": "pt"})[8:].decode().strip()
    '{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in entries.items():
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        fields[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the first tensor is aligned
    return len(text).to_bytes(8, "little") + text


class Files:
    """The safetensors files at a path, to read.

    Attributes:
        entries: the dtype and shape of each tensor, by name.
        names_by_file: the names of the tensors in each file.
    """

    def __init__(self, path: Path) -> None:
        self._library = _library()
        self.entries: dict[str, Entry] = {}
        self.names_by_file: dict[Path, list[str]] = {}
        for file, indexed in _files_at(path).items():
            with self.open(file) as opened:
                names = list(opened.keys())
                missing = [name for name in indexed or () if name not in names]
                if missing:
                    raise ValueError(
                        f"load_weights: the index says that {file} has {missing[0]}, and it has not.\n"
                        f"Download or export the files again."
                    )
                self.names_by_file[file] = names if indexed is None else list(indexed)
                for name in self.names_by_file[file]:
                    part = opened.get_slice(name)
                    self.entries[name] = Entry(_dtype(name, part), tuple(part.get_shape()))

    def open(self, file: Path) -> Any:
        """A file as a context, whose tensors are read as they are asked for.

        Raises: ValueError if it is damaged.
        """
        try:
            return self._library.safe_open(str(file), framework="pt")
        except self._library.SafetensorError as error:
            raise ValueError(
                f"load_weights: {file} cannot be read: {error}\nDownload or export it again."
            ) from error


def _files_at(path: Path) -> dict[Path, Sequence[str] | None]:
    """The files at a path, each with the names that the index gives for it; None without an index.

    Raises: FileNotFoundError or ValueError if it is not clear which files are meant, or one is missing.
    """
    if path.is_file():
        return {path: None}
    where = folder.committed(path, folder.WEIGHTS) or path
    indexes = sorted(where.glob(f"*{INDEX_SUFFIX}"))
    files = sorted(where.glob("*.safetensors"))
    if len(indexes) == 1:
        by_file: dict[Path, list[str]] = {}
        for name, file in json.loads(indexes[0].read_text())["weight_map"].items():
            by_file.setdefault(where / file, []).append(name)
        for file in by_file:
            if not file.is_file():
                raise FileNotFoundError(
                    f"load_weights: {file}, which {indexes[0].name} names, is missing.\n"
                    f"Download or export the files again."
                )
        return dict(by_file)
    if not indexes and len(files) == 1:
        return {files[0]: None}
    if not files:
        raise FileNotFoundError(
            f"load_weights: {path} has no safetensors files.\n"
            f"Pass such a file, or the folder of an export. zt.load reads the checkpoints of zt.save."
        )
    raise ValueError(
        f"load_weights: {path} has {counted(len(files), 'safetensors file')} and "
        f"{counted(len(indexes), 'index', 'indexes')}.\nPass one of the files."
    )


def _dtype(name: str, part: Any) -> torch.dtype:
    kind = part.get_dtype()
    if kind not in _DTYPES:
        raise ValueError(f"load_weights: {name} is {kind}, which has no dtype in PyTorch.")
    return _DTYPES[kind]


def _library() -> Any:
    try:
        return importlib.import_module("safetensors")
    except ImportError:
        raise ImportError(
            "load_weights: safetensors is not installed.\npip install safetensors, or ztrans[safetensors]."
        ) from None
