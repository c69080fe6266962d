"""Read a state in the layouts that a step needs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ...calling.trees import named_leaves
from ...ir.dependencies import grouped
from ...ir.layout import as_tensor
from ..agreement import agree
from ..failure import rank_names
from ..state import mesh_of_state
from .save import committed, index_of, is_model_file, unfinished, wait_for_saves

State = TypeVar("State")


def load(path: str | os.PathLike[str], like: State, step: Callable) -> State:
    """Read a state, in the layouts that `step` needs. All ranks must call it.

    It waits for a save that runs, and all ranks read the same checkpoint. The number of ranks, the mesh, the axis and
    the stage may differ from those with which it was saved. Each rank reads its own parts only. Values are converted to
    the dtypes of `like`. What the checkpoint has besides is not read.

    Args:
        path: what `zt.save` or `torch.distributed.checkpoint` has written.
        like: a state with the structure, shapes and dtypes to read, such as that of `zt.lift`. It does not change. Its
            tensors may be on meta.
        step: the step that will use the state.

    Returns: The state, a new one, as `step.shard` returns it.

    Raises: FileNotFoundError if there is no complete checkpoint; ValueError if it has not all leaves of `like`, or
        leaves of other shapes, or if `path` is the file of an ordinary model; RuntimeError if ranks find different
        checkpoints.

    >>> import tempfile, ztrans as zt
    >>> folder = Path(tempfile.mkdtemp()) / "checkpoint"
    >>> _ = zt.save(folder, {"params": {"w": torch.ones(2)}, "lr": 0.1}).result()
    >>> zt.load(folder, {"params": {"w": torch.empty(2, device="meta")}, "lr": 0.0}, lambda state: state)
    {'params': {'w': tensor([1., 1.])}, 'lr': 0.1}
    """
    if callable(like) and not callable(step):
        raise TypeError("load: the state comes before the step: zt.load(path, like, step).")
    wait_for_saves()
    checkpoint = _Checkpoint(_complete_folder(Path(path)))
    leaves_by_name = named_leaves(like)
    _check_fits(checkpoint.shapes, path, leaves_by_name)
    leaves, tree = pytree.tree_flatten(like)

    # The step lays out a state without values. Then each rank reads its parts in place.
    blank = pytree.tree_unflatten([_blank(leaf) for leaf in leaves_by_name.values()], tree)
    shard = getattr(step, "shard", None)
    sharded = pytree.tree_leaves(blank if shard is None else shard(blank))
    mesh = mesh_of_state(sharded)
    if mesh is not None:
        agree(mesh, f"load of {str(path)[-80:]}", checkpoint.digest, _different_checkpoints)
    parts = [_allocated(part, leaf) for part, leaf in zip(sharded, leaves)]
    checkpoint.fill({name: part.detach() for name, part in zip(leaves_by_name, parts)})
    new_leaves = [_as_like(x, leaf) for x, leaf in zip(parts, leaves)]
    return pytree.tree_unflatten(new_leaves, tree)


class _Checkpoint:
    """A checkpoint to read: the shapes of its tensors by name, and their values; `digest` differs for each save."""

    def __init__(self, path: Path) -> None:
        self.digest = hashlib.sha256(index_of(path).read_bytes()).hexdigest()
        self._reader = dcp.FileSystemReader(path)
        self._metadata = self._reader.read_metadata()
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, x in self._metadata.state_dict_metadata.items():
            if isinstance(x, TensorStorageMetadata):
                self.shapes[name] = tuple(x.size)

    def fill(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Read this rank's part of each tensor in place. Nothing is communicated."""
        # `dcp.load` would make all ranks plan together. Here each rank is its own coordinator.
        planner = dcp.DefaultLoadPlanner()
        planner.set_up_planner(dict(parts), self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, True)
        (plan,) = planner.create_global_plan([planner.create_local_plan()])
        self._reader.read_data(planner.finish_plan(plan), planner).wait()


def _different_checkpoints(by_rank: Mapping[int, str]) -> str:
    """What an error says about ranks that find checkpoints with different digests."""
    by_digest = grouped((digest, rank) for rank, digest in by_rank.items())
    lines = "".join(
        f"  {rank_names(same)} found {digest[:8]}\n" for digest, same in by_digest.items()
    )
    return (
        f"  They have found different checkpoints:\n{lines}"
        f"The path must be on a file system of all ranks, and no other program may save to it meanwhile."
    )


def _complete_folder(path: Path) -> Path:
    """The folder of a complete checkpoint."""
    folder = committed(path)
    if folder is not None:
        return folder
    if is_model_file(path):
        raise ValueError(
            f"load: {path} is the file of an ordinary model, and load reads the folders that zt.save writes.\n"
            f"Load it into the model before zt.lift: model.load_state_dict(...). If only rank 0 can hold the whole "
            f"model, build it on meta on the other ranks, and call step.shard(state, source=0)."
        )
    begun = " The first save to it has failed, was killed, or runs in another program."
    raise FileNotFoundError(
        f"load: {path} is no checkpoint.{begun if unfinished(path).exists() else ''}\nzt.save writes one."
    )


def _check_fits(
    shapes: Mapping[str, tuple[int, ...]], path: Any, leaves_by_name: Mapping[str, Any]
) -> None:
    missing = [name for name in leaves_by_name if name not in shapes]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ValueError(
            f"load: {path} does not fit the state.\n"
            f"  The checkpoint does not have {', '.join(missing[:4])}{more}.\n"
            f"`like` lists the leaves to read: give it those that the checkpoint has."
        )
    for name, leaf in leaves_by_name.items():
        shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()
        if shapes[name] != shape:
            raise ValueError(
                f"load: {name} has shape {list(shapes[name])} in {path}, and {list(shape)} in the state.\n"
                f"Build the model with the sizes that it was saved with."
            )


def _blank(leaf: Any) -> Any:
    """A leaf without values, for `Step.shard`, which allocates only this rank's part of it."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_like(leaf, device="meta").requires_grad_(leaf.requires_grad)


def _allocated(part: Any, like: Any) -> torch.Tensor:
    """Memory for a part: what `Step.shard` has allocated, or else, without a mesh, a tensor on the device of `like`."""
    if not isinstance(part, torch.Tensor):
        return as_tensor(part)
    if not part.is_meta:
        return part
    device = torch.get_default_device() if like.is_meta else like.device
    memory = torch.empty(part.shape, dtype=part.dtype, device=device)
    return memory.requires_grad_(part.requires_grad)


def _as_like(part: torch.Tensor, like: Any) -> Any:
    """A loaded part; a number where `like` has one and the step has no mesh."""
    is_number = not isinstance(like, torch.Tensor) and not isinstance(part, DTensor)
    return type(like)(part.item()) if is_number else part
