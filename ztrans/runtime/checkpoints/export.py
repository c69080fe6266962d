"""Export weights as safetensors, in the files that transformers reads, from all ranks.

The files of torch.distributed.checkpoint's HuggingFaceStorageWriter are no use here: it holds the tensors of a whole
file, and their bytes a second time, or writes parts that one rank then reads and writes again (torch 2.13). Here each
file has one writer. It receives its leaves one after the other, and writes each at the end of the file, which every
file system can do. The folder replaces an earlier one at once, as that of a checkpoint does (see `folder`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from ..agreement import from_first
from ..named_weights import Weights, check_dtype
from ..session import leave_if_cut_off
from ..whole_leaves import Leaf, Ranks, located, whole_leaves
from . import folder
from .safetensors import INDEX_SUFFIX, Entry, check_dtype_has_name, header
from .save import is_model_file
from .together import failing_together


@dataclass(frozen=True)
class _File:
    """A file to write: its leaves in their order, and the rank that writes it."""

    name: str
    leaves: Sequence[Leaf]
    writer: int

    def header(self, metadata: Mapping[str, str]) -> bytes:
        return header({leaf.name: Entry(leaf.dtype, leaf.shape) for leaf in self.leaves}, metadata)


def export(
    path: str | os.PathLike[str],
    weights: Any,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> Path:
    """Write weights as safetensors, which `from_pretrained` of transformers reads. All ranks must call it.

    The files are `model.safetensors`, or `model-00001-of-00004.safetensors` and so on with the index
    `model.safetensors.index.json`, in a folder on a file system of all ranks. All ranks write, each its own files, the
    largest leaves first. A rank holds at most its shards and one leaf. A tied weight is written once, by its first
    name, as transformers does.

    Args:
        path: the folder. It must not exist, be empty, or be an export. Other files in it, such as config.json, stay.
        weights: tensors or DTensors by name, such as `zt.state_dict(model, state)` of a lifted loop, or a state without
            buffers: its `params`.
        dtype: the dtype of floats in the files; by default their own. A shard is cast before it is sent.
        max_file_bytes: the most bytes of the tensors in a file, unless one tensor alone has more.

    Returns: The absolute path of the folder.

    Raises: TypeError for weights that are not tensors, or of a dtype that safetensors does not have; ValueError for
        weights on meta, copies of a weight that differ, or a path to a file; RuntimeError if the state is half updated,
        if not all ranks make the same call, or if a rank cannot write. An earlier export is intact then.

    >>> import tempfile, ztrans as zt
    >>> written = zt.export(Path(tempfile.mkdtemp()) / "out", {"w": torch.ones(2)}, dtype=torch.bfloat16)
    >>> zt.load_weights({"w": torch.zeros(2)}, written)
    {'w': tensor([1., 1.])}
    """
    target = Path(path).absolute()
    if is_model_file(target):
        raise ValueError(
            f"export: {target} has the name of a file, and export writes a folder with one file or several.\n"
            f"Name a folder: zt.export({str(target.with_suffix(''))!r}, ...)."
        )
    check_dtype(dtype, "export")
    named = Weights.of(weights, "export")
    named.agree("export", target, dtype, max_file_bytes)
    try:
        _export(target, named, dtype, max_file_bytes)
    except BaseException as error:
        leave_if_cut_off(named.mesh, "export", error)
        raise
    return target


def _export(path: Path, named: Weights, dtype: torch.dtype | None, max_file_bytes: int) -> None:
    mesh, session = named.mesh, named.session
    leaves = located(named.tensors, dtype, session, "export")
    for leaf in leaves:
        check_dtype_has_name(leaf.name, leaf.dtype)
    nonce = secrets.token_hex(4)
    target = folder.real_path(path)
    unfinished = folder.unfinished_name(target, nonce if mesh is None else from_first(nonce, mesh))
    ranks = Ranks.of(session)
    files = _files(leaves, len(ranks.hosts), max_file_bytes)
    try:
        with failing_together(mesh, "export"):
            if ranks.own == 0:
                folder.check_replaceable(target, folder.WEIGHTS)
                folder.make(unfinished)
        _write(unfinished, files, named, ranks)
        with failing_together(mesh, "export"):
            if ranks.own == 0:
                _finish(unfinished, target, files, named)
    except BaseException:
        if ranks.own == 0:
            folder.delete(unfinished)
        raise


def _files(leaves: Sequence[Leaf], ranks: int, max_bytes: int) -> list[_File]:
    """Distribute leaves over files, the largest first, and files over ranks."""
    groups: list[list[Leaf]] = []
    size = 0
    for leaf in sorted(leaves, key=lambda leaf: -leaf.nbytes):
        if not groups or size + leaf.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(leaf)
        size += leaf.nbytes
    spread = max(1, ranks // len(groups))  # over hosts, if there are fewer files than ranks
    files = []
    for i, group in enumerate(groups):
        many = f"-{i + 1:05}-of-{len(groups):05}" if len(groups) > 1 else ""
        # The elements of a tensor are aligned if those of larger dtypes come before it.
        group.sort(key=lambda leaf: -leaf.dtype.itemsize)
        files.append(_File(f"model{many}.safetensors", group, i * spread % ranks))
    return files


def _write(unfinished: Path, files: Sequence[_File], named: Weights, ranks: Ranks) -> None:
    """Gather all leaves, and write the files of this rank.

    Raises: the error of this rank, or RuntimeError, on all ranks.
    """
    order: list[Leaf] = []
    file_of: dict[Leaf, _File] = {}
    size = len(ranks.hosts)
    for first in range(0, len(files), size):  # all ranks write at the same time
        at_once = files[first : first + size]
        file_of.update((leaf, file) for file in at_once for leaf in file.leaves)
        for leaves in zip_longest(*(file.leaves for file in at_once)):
            order += [leaf for leaf in leaves if leaf is not None]
    receivers = [[file_of[leaf].writer] for leaf in order]
    largest = max(leaf.nbytes for leaf in order)
    error: Exception | None = None
    session = named.session
    with session.leaving("export") if session is not None else contextlib.nullcontext():
        for leaf, whole in whole_leaves(order, receivers, ranks, largest):
            if whole is None or error is not None:
                continue
            # A rank that cannot write goes on to send what the others wait for.
            try:
                file = file_of[leaf]
                is_first = leaf is file.leaves[0]
                with (unfinished / file.name).open("wb" if is_first else "ab") as output:
                    if is_first:
                        output.write(file.header(_metadata(named)))
                    output.write(whole.cpu().view(-1).view(torch.uint8).numpy().data)
                    del whole  # before the next one is received
                    output.flush()
                    if leaf is file.leaves[-1]:
                        os.fsync(output.fileno())
            except Exception as own_error:
                error = own_error
    with failing_together(named.mesh, "export"):
        if error is not None:
            raise error


def _metadata(named: Weights) -> dict[str, str]:
    """What a file says about itself. As `safetensors.torch.save_model`, it has the other names of tied weights."""
    metadata = {"format": "pt"}
    for first, names in named.names.items():
        metadata.update(dict.fromkeys(names[1:], first))
    return metadata


def _finish(unfinished: Path, target: Path, files: Sequence[_File], named: Weights) -> None:
    """Check that all files are complete, write the index, and give the folder its name. Runs on the first rank."""
    weight_map: dict[str, str] = {}
    nbytes = 0
    for file in files:
        data = sum(leaf.nbytes for leaf in file.leaves)
        expected = len(file.header(_metadata(named))) + data
        path = unfinished / file.name
        if not path.exists() or path.stat().st_size != expected:
            raise FileNotFoundError(
                f"{path}, which rank {file.writer} of the mesh has written, is not complete here. The folder must be "
                f"on a file system of all ranks"
            )
        weight_map.update(dict.fromkeys((leaf.name for leaf in file.leaves), file.name))
        nbytes += data
    if len(files) > 1:
        index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        with (unfinished / f"model{INDEX_SUFFIX}").open("w") as output:
            json.dump(index, output, indent=2)
            output.flush()
            os.fsync(output.fileno())
    folder.replace(target, unfinished, folder.WEIGHTS)
