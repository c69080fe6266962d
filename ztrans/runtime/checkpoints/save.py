"""save: write a state while steps go on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ...calling.trees import named_leaves
from ...ir.axes import members_of
from ...ir.layout import as_tensor, mesh_axes
from ..agreement import agree, different_leaf, different_steps, digest
from ..failure import check_whole, steps_of
from ..process_groups import process_groups
from ..state import mesh_of_state
from .files import FolderWriter, is_model_file, write_model_file

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

    Raises: TypeError if a leaf is neither a tensor nor a number; RuntimeError if the state is half updated, the ranks
        do not all call it, or copies of a leaf differ: a checkpoint has only one of them.

    >>> import tempfile, ztrans as zt
    >>> folder = Path(tempfile.mkdtemp()) / "checkpoint"
    >>> state = {"params": {"w": torch.ones(2)}, "lr": 0.1}
    >>> zt.save(folder, state).result() == folder
    True
    """
    target = Path(path)
    named = named_leaves(state)
    leaves = list(named.values())
    tensors = {name: _tensor(name, leaf) for name, leaf in named.items()}
    check_whole(leaves, "save")
    mesh = mesh_of_state(leaves)
    if mesh is not None:
        _agree_on_save(target, tensors, steps_of(leaves), mesh)
    if is_model_file(target):
        return _write_model_file(target, tensors, mesh)
    wait(_running)  # so that there is one copy of the state at a time
    writer = FolderWriter(target)
    staged = writer.stage(tensors)
    executor = ThreadPoolExecutor(1, "ztrans-save")
    future = executor.submit(_write_folder, writer, staged, _group(mesh))
    executor.shutdown(wait=False)
    _running[:] = [future]
    return future


def _tensor(name: str, leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor | Real) or isinstance(leaf, bool):
        raise TypeError(f"save: state {name} is {leaf!r}; a state holds tensors and numbers.")
    tensor = as_tensor(leaf).detach()
    # FolderWriter.stage copies no DTensor without dims, in torch 2.13. These are whole on every rank.
    return tensor.to_local() if isinstance(tensor, DTensor) and not tensor.ndim else tensor


def _agree_on_save(
    target: Path, tensors: Mapping[str, torch.Tensor], steps: int, mesh: DeviceMesh
) -> None:
    """Check that all ranks save the same state, in which copies of a leaf have the same values."""
    axes = [_copied_axes(x, mesh) for x in tensors.values()]
    digests = []
    for x, copied_axes in zip(tensors.values(), axes):
        local = x.to_local() if isinstance(x, DTensor) else x
        digests.append(digest(local) if copied_axes else None)

    def explain(by_rank: Mapping[int, tuple[int, Sequence]]) -> str:
        all_steps = {rank: count for rank, (count, _) in by_rank.items()}
        if len(set(all_steps.values())) > 1:
            return different_steps(all_steps)
        different = different_leaf(mesh, axes, {rank: each for rank, (_, each) in by_rank.items()})
        if different is None:
            return ""
        k, first, rank = different
        return (
            f"  {list(tensors)[k]} has other values on rank {rank} than on rank {first}, although the layout says "
            f"that they have copies. With tensor or expert parallelism, cut the leaf over its axis as a DTensor."
        )

    agree(mesh, f"save to {str(target)[-80:]}", (steps, digests), explain)


def _copied_axes(x: torch.Tensor, mesh: DeviceMesh) -> list[str]:
    """The axes of the mesh over which ranks have copies of a leaf. The leaf may live on some of them only."""
    cut: list[str] = []
    if isinstance(x, DTensor):
        for (axis, _), placement in zip(mesh_axes(x.device_mesh), x.placements):
            if not isinstance(placement, Replicate):
                cut.append(axis)
    return [axis for axis, size in mesh_axes(mesh) if size > 1 and axis not in members_of(cut)]


def _group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    if mesh is None or process_groups(mesh).is_alone:
        return None
    return process_groups(mesh).channel(None, "saves", lasting=True).group


def _write_folder(
    writer: FolderWriter,
    staged: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> Path:
    try:
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
    if is_first:
        try:
            write_model_file(target, whole)
        except Exception as error:
            problem = f"{target} was not written. {_causes(error)}"
    if mesh is not None:
        agree(mesh, "save", problem, lambda problems: "".join(problems.values()))
    elif problem:
        raise RuntimeError(f"save: {problem}")
    done: Future[Path] = Future()
    done.set_result(target)
    return done
