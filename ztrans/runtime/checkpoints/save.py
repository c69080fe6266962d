"""save: write a state while steps go on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...calling.trees import named_leaves
from ...ir.layout import as_tensor
from ..failure import check_whole, steps_of
from ..meeting import Call, everywhere, meet
from ..process_groups import process_groups
from ..sharded_state import mesh_of_state
from . import model_file
from .copies import check_copies
from .folder import FolderWriter

_running: list[Future[Path]] = []  # the save in progress


def save(path: str | os.PathLike[str], state: Any) -> Future[Path]:
    """Write a state. All ranks must call it.

    The parts of this rank are copied; then the call returns, and a thread writes the copies, so steps may go on. The
    ranks write together into a folder, in the format of torch.distributed.checkpoint, which has to be on a file system
    of all ranks. It takes the name `path` when it is complete; a checkpoint that had this name is deleted. A save waits
    for the one before.

    If `path` ends in .pt, .pth, .bin or .safetensors, the first rank writes a single file for programs without ztrans,
    of whole tensors by name, before the call returns. `{**state["params"], **state["buffers"]}` of a lifted loop has
    the names of `model.state_dict()`.

    Args:
        path: the folder, or the file.
        state: a pytree of DTensors, tensors and numbers, as the state of a step is.

    Returns: A future; its `result()` waits until the checkpoint is complete, and is its path. If the save fails, it
        raises RuntimeError, and a warning tells so at once.

    Raises: TypeError if a leaf is neither a tensor nor a number; RuntimeError if the state is half updated, or the
        ranks do not all call it.

    >>> import tempfile, ztrans as zt
    >>> folder = Path(tempfile.mkdtemp()) / "checkpoint"
    >>> state = {"params": {"w": torch.ones(2)}, "lr": 0.1}
    >>> zt.save(folder, state).result() == folder
    True
    """
    target, named = Path(path), named_leaves(state)
    tensors, leaves = (
        {name: _tensor(name, leaf) for name, leaf in named.items()},
        list(named.values()),
    )
    check_whole(leaves, "save")
    mesh = mesh_of_state(leaves)
    if mesh is not None:
        meet(mesh, Call(f"save to {str(target)[-80:]}", steps=steps_of(leaves)))
    if model_file.is_model_file(target):
        return _write_model_file(target, tensors, mesh)
    wait(_running)  # so that there is one copy of the state at a time
    writer = FolderWriter(target)
    staged = writer.stage(tensors)
    executor = ThreadPoolExecutor(1, "ztrans-save")
    future = executor.submit(_write_folder, writer, staged, mesh, _group(mesh))
    executor.shutdown(wait=False)
    _running[:] = [future]
    return future


def _tensor(name: str, leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor | Real) or isinstance(leaf, bool):
        raise TypeError(f"save: state {name} is {leaf!r}; a state holds tensors and numbers.")
    tensor = as_tensor(leaf).detach()
    # FolderWriter.stage copies no DTensor without dims, in torch 2.13. These are whole on every rank.
    return tensor.to_local() if isinstance(tensor, DTensor) and not tensor.ndim else tensor


def _group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    if mesh is None or process_groups(mesh).is_alone:
        return None
    return process_groups(mesh).channel(None, "saves", lasting=True).group


def _write_folder(
    writer: FolderWriter,
    staged: Mapping[str, torch.Tensor],
    mesh: DeviceMesh | None,
    group: dist.ProcessGroup | None,
) -> Path:
    try:
        if mesh is not None and group is not None:
            check_copies(staged, mesh, group)
        writer.write(staged, group)
    except BaseException as error:
        if group is None or group.rank() == 0:
            writer.discard()
        text = f"save: {writer.target} was not written. {_causes(error)}\nA checkpoint that it had before is whole."
        warnings.warn(text, stacklevel=1)
        raise RuntimeError(text) from error
    return writer.target


def _causes(error: BaseException) -> str:
    """What went wrong, by rank."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}."
    failures = error.failures.items()
    return " ".join(
        f"Rank {rank}: {type(cause).__name__}: {cause}." for rank, (cause, _) in failures
    )


def _write_model_file(
    target: Path, tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh | None
) -> Future[Path]:
    is_first = mesh is None or dist.get_rank() == process_groups(mesh).ranks[0]
    whole: dict[str, torch.Tensor] = {}
    for name, x in tensors.items():
        full = x.full_tensor() if isinstance(x, DTensor) else x
        if is_first:
            whole[name] = full.cpu()
    problem = ""
    try:
        if is_first:
            model_file.write(target, whole)
    except Exception as error:
        problem = f"save: {target} was not written. {_causes(error)}"
    problem = next(filter(None, everywhere(problem, mesh) if mesh is not None else [problem]), "")
    if problem:
        raise RuntimeError(problem)
    done: Future[Path] = Future()
    done.set_result(target)
    return done
