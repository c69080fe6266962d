"""Load a state from a checkpoint, in the layouts that a step needs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ...calling.leaf_records import RECORDS
from ...calling.meta_leaves import mark_written
from ...calling.trees import named_leaves
from ...ir.dependencies import grouped
from ...ir.layout import as_tensor
from ...ir.printer import first_names
from ...ops import MOMENTS
from ..session import leave_if_cut_off
from ..state import equal_rows, mesh_of_state, with_replicas
from . import folder
from .extras import is_record, record_names, restore
from .save import is_model_file, wait_for_saves
from .together import agreed, failing_together

State = TypeVar("State")


def load(
    path: str | os.PathLike[str],
    like: State,
    step: Callable,
    *,
    extras: MutableMapping[str, Any] | None = None,
) -> State:
    """Load a state in the layouts that `step` needs. All ranks must call it.

    It first waits for a save in progress. All ranks read the same checkpoint, each rank only its own parts, and verify
    the checksums that `zt.save` stored. The number of ranks, the mesh, the axis and the stage may have changed since
    the save. Values are converted to the dtypes of `like`. Leaves that `like` does not have are not read. Replicas that
    train apart (`independent_axis`) load from as many replicas, or all of them from a leaf that has none.

    Args:
        path: a checkpoint of `zt.save` or `torch.distributed.checkpoint`.
        like: a state with the structure, shapes and dtypes to load, such as the one from `zt.lift`. It does not change.
            Its tensors may be on meta.
        step: the step that will use the state.
        extras: what else to read, by the names under which `zt.save` has saved it. Once the state has been read,
            objects get their values by `load_state_dict`, and all other values are replaced in this dict. What was the
            same on all ranks loads in any world, and what differed, like every generator, on the same number of ranks.

    Returns: A new state, as `step.shard` returns it.

    Raises: FileNotFoundError if there is no complete checkpoint; ValueError if the checkpoint lacks a leaf of `like`,
        has a leaf of another shape, or values that `like` cannot hold, such as complex ones in a real leaf or 300 in an
        int8, if it lacks an extra, if a file is damaged, or if `path` is the file of an ordinary model; RuntimeError if
        ranks find different checkpoints, or another rank cannot load its part.

    >>> import tempfile, ztrans as zt
    >>> folder = Path(tempfile.mkdtemp()) / "checkpoint"
    >>> _ = zt.save(folder, {"params": {"w": torch.ones(2)}, "lr": 0.1}).result()
    >>> zt.load(folder, {"params": {"w": torch.empty(2, device="meta")}, "lr": 0.0}, lambda state: state)
    {'params': {'w': tensor([1., 1.])}, 'lr': 0.1}
    """
    if callable(like) and not callable(step):
        raise TypeError("load: the state comes before the step: zt.load(path, like, step).")
    path = Path(path).absolute()
    like_by_name = named_leaves(like)
    try:
        wait_for_saves()
        # The step lays out a state without values, into which each rank then reads its parts. It also has the leaves
        # that transforms keep.
        shard = getattr(step, "shard", None)
        blank = pytree.tree_map(_blank, like)
        laid_out = blank if shard is None else shard(blank)
        sharded, tree = pytree.tree_flatten(laid_out)
        leaves_by_name = {**named_leaves(laid_out), **like_by_name}
        leaves = list(leaves_by_name.values())
        mesh = mesh_of_state(sharded)
        # Collective, so before anything that one rank alone may raise.
        stacked = _with_replicas(leaves_by_name, sharded)
        rows = {
            name: RECORDS.of(x).rows for name, x in zip(leaves_by_name, sharded) if _has_rows(x)
        }
        replicas = {name: x.shape[0] for name, x in stacked.items()}
        checkpoint, names = _agreed_checkpoint(
            path, leaves_by_name, replicas, rows, extras or {}, mesh
        )
        with failing_together(mesh, "load"):
            device = _device_of(like_by_name.values())
            parts = [_memory_for(part, leaf, device) for part, leaf in zip(sharded, leaves)]
            by_name = dict(zip(leaves_by_name, parts))
            _check_moments(checkpoint.kinds, path, by_name)
            records = _fill(checkpoint, by_name, stacked, rows, list(names.values()))
            for part in parts:
                mark_written(part)
            if extras is not None:
                restore(extras, {name: records[record] for name, record in names.items()})
        new_leaves = [_as_like(x, leaf) for x, leaf in zip(parts, leaves)]
        return pytree.tree_unflatten(new_leaves, tree)
    except BaseException as error:
        leave_if_cut_off(getattr(step, "mesh", None), "load", error)
        raise


def _with_replicas(names: Iterable[str], leaves: Iterable[Any]) -> dict[str, DTensor]:
    """The leaves of replicas that train apart, by name, with a dim of the replicas. All ranks must call it."""
    stacked = {}
    for name, leaf in zip(names, leaves):
        whole = with_replicas(leaf) if isinstance(leaf, DTensor) else leaf
        if whole is not leaf:
            stacked[name] = whole
    return stacked


def _has_rows(leaf: Any) -> bool:
    """Whether each rank has a row of a leaf that a transform keeps."""
    return isinstance(leaf, torch.Tensor) and RECORDS.of(leaf).rows > 0


def _fill(
    checkpoint: _Checkpoint,
    parts: Mapping[str, torch.Tensor],
    stacked: Mapping[str, torch.Tensor],
    rows: Mapping[str, int],
    records: Sequence[str],
) -> dict[str, bytes]:
    """Read this rank's part of each leaf, and return some records of extras. Nothing is sent.

    Args:
        checkpoint: the checkpoint.
        parts: the memory of this rank's parts, by the names of their leaves.
        stacked: the parts of leaves of replicas that train apart, with a dim of the replicas.
        rows: the number of rows of the leaves that have one for each rank.
        records: the names of the records.
    """
    targets = {}
    in_other_rows = {}
    for name, part in parts.items():
        saved_shape, _ = checkpoint.kinds[name]
        if name in rows and saved_shape[0] != rows[name]:
            in_other_rows[name] = part.detach()
        elif name in stacked and saved_shape == stacked[name].shape:
            targets[name] = stacked[name].detach()
        else:
            targets[name] = part.detach()
    found = checkpoint.fill(targets, records)
    for name, part in in_other_rows.items():
        checkpoint.fill_rows(name, part, rows[name])
    return found


class _Checkpoint:
    """A checkpoint to load.

    Attributes:
        digest: a hash of the index, which differs for each save.
        kinds: the shape and dtype of each tensor, by name.
        extras: the names of the records of extras.
    """

    def __init__(self, path: Path) -> None:
        index = folder.index_of(path)
        with _errors_about(index):
            self._reader = _Reader(path)
            self.digest = hashlib.sha256(index.read_bytes()).hexdigest()
            self._metadata = self._reader.read_metadata()
        self.kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.extras: set[str] = set()
        for name, entry in self._metadata.state_dict_metadata.items():
            if is_record(name):
                self.extras.add(name)
            elif isinstance(entry, TensorStorageMetadata):
                self.kinds[name] = tuple(entry.size), entry.properties.dtype

    def fill(self, parts: Mapping[str, torch.Tensor], records: Sequence[str]) -> dict[str, bytes]:
        """Read this rank's part of each tensor into `parts`, and return some records of extras. Nothing is sent.

        Raises: ValueError if an integer does not fit the dtype of its part.
        """
        # A copy into a narrower integer dtype would drop the upper bits, so read such parts in the dtype of the file
        # first, and check their range.
        as_saved = dict(parts)
        for name, part in parts.items():
            saved = self.kinds[name][1]
            if is_integral(saved) and is_integral(part.dtype) and saved != part.dtype:
                as_saved[name] = torch.empty_like(part, dtype=saved)
        read: dict[str, Any] = {**as_saved, **dict.fromkeys(records)}
        self._read(read)
        for name, part in parts.items():
            if as_saved[name] is not part:
                check_range(name, as_saved[name], part.dtype)
                part.copy_(as_saved[name])
        return {name: read[name] for name in records}

    def fill_rows(self, name: str, part: torch.Tensor, count: int) -> None:
        """Fill this rank's row with its part of the sum of all rows, which another number of ranks have saved."""
        shape, dtype = self.kinds[name]
        rows = torch.empty(shape, dtype=dtype, device="cpu")
        self._read({name: rows})
        local = part.to_local() if isinstance(part, DTensor) else part
        local.copy_(equal_rows(rows, count)[: len(local)])

    def _read(self, parts: dict[str, Any]) -> None:
        # `dcp.load` would make all ranks plan together. Here each rank is its own coordinator.
        planner = dcp.DefaultLoadPlanner()
        planner.set_up_planner(parts, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, True)
        (plan,) = planner.create_global_plan([planner.create_local_plan()])
        self._reader.read_data(planner.finish_plan(plan), planner).wait()


class _Reader(dcp.FileSystemReader):
    """Reads a checkpoint, and verifies the checksum of each record. Checkpoints written by DCP itself have none."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path
        self._checksums = folder.read_checksums(path)

    def read_metadata(self, *args: Any, **options: Any) -> Any:
        """Read the index."""
        self._check(folder.index_of(self._folder).name)
        return super().read_metadata(*args, **options)

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        """Read the parts of a plan, file by file. The records of a file are checked before it is read."""
        records = [(self.storage_data[item.storage_index], item) for item in plan.items]
        by_file = grouped((record.relative_path, (record.offset, item)) for record, item in records)
        for name, parts in by_file.items():
            with _errors_about(self._folder / name):
                self._check(name, {offset for offset, _ in parts})
                items = [item for _, item in parts]
                super().read_data(dataclasses.replace(plan, items=items), planner).wait()
        finished: torch.futures.Future[None] = torch.futures.Future()
        finished.set_result(None)
        return finished

    def _check(self, name: str, offsets: set[int] | None = None) -> None:
        if self._checksums:
            folder.check_file(self._folder, name, self._checksums, offsets)


def _agreed_checkpoint(
    path: Path,
    leaves_by_name: Mapping[str, Any],
    replicas: Mapping[str, int],
    rows: Collection[str],
    extras: Mapping[str, Any],
    mesh: DeviceMesh | None,
) -> tuple[_Checkpoint, dict[str, str]]:
    """The checkpoint at a path, and the record of each extra on this rank.

    It has these leaves and extras, and all ranks have found the same one.
    """

    def found() -> tuple[_Checkpoint, dict[str, str]]:
        checkpoint = _Checkpoint(_complete_folder(path))
        _check_fits(checkpoint.kinds, path, leaves_by_name, replicas, rows)
        return checkpoint, record_names(extras, checkpoint.extras, path, mesh)

    return agreed(found, lambda x: x[0].digest, mesh, "load")


@contextlib.contextmanager
def _errors_about(file: Path) -> Iterator[None]:
    """Turn every error inside into a ValueError that names the file."""
    try:
        yield
    except folder.Damaged as error:
        raise ValueError(f"load: {error}\nLoad another checkpoint.") from error
    except Exception as error:
        raise ValueError(
            f"load: {file} cannot be read: {type(error).__name__}: {error}\nLoad another checkpoint."
        ) from error


def _complete_folder(path: Path) -> Path:
    """The folder of the complete checkpoint at a path.

    Raises: FileNotFoundError or ValueError if there is none.
    """
    complete = folder.committed(path)
    if complete is not None:
        return complete
    if is_model_file(path):
        advice = (
            "Load it into the model before zt.lift: model.load_state_dict(...). If only rank 0 can hold the whole "
            "model, build it on meta on the other ranks, and call step.shard(state, source=0)."
        )
        if path.suffix == ".safetensors":
            advice = (
                "Shard the state, and read the file into it, each rank its own part: "
                "zt.load_weights(zt.state_dict(model, state), path)."
            )
        raise ValueError(
            f"load: {path} is the file of an ordinary model, and load reads the folders that zt.save writes.\n{advice}"
        )
    hint = " The first save to it has failed, was killed, or runs in another program."
    raise FileNotFoundError(
        f"load: {path} is not a checkpoint.{hint if folder.has_unfinished(path) else ''}\nzt.save writes one."
    )


def _check_fits(
    kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    path: Path,
    leaves_by_name: Mapping[str, Any],
    replicas: Mapping[str, int],
    rows: Collection[str],
) -> None:
    """Check that a checkpoint has these leaves.

    `replicas` has the number of replicas of leaves that train apart. Those in `rows` have a row for each rank, and may
    have been saved by another number of ranks.

    Raises: ValueError if leaves are missing, have another shape, or a dtype that cannot hold the saved values.
    """
    missing = [name for name in leaves_by_name if name not in kinds]
    if missing:
        raise ValueError(
            f"load: {path} does not fit the state.\n"
            f"  The checkpoint does not have {first_names(missing)}.\n"
            f"`like` lists the leaves to read: leave out what the checkpoint does not have. If a transform of the step "
            f"keeps it, load without that transform, and start it: state = step.init(zt.load(path, like, other_step))."
        )
    for name, leaf in leaves_by_name.items():
        saved_shape, saved_dtype = kinds[name]
        shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()
        fitting = [shape, (replicas[name], *shape)] if name in replicas else [shape]
        has_other_rows = name in rows and saved_shape[1:] == shape[1:]
        if saved_shape not in fitting and not has_other_rows:
            advice = "Build the model with the sizes that it was saved with."
            if saved_shape[1:] == shape:
                advice = (
                    f"If these are {saved_shape[0]} replicas that train apart (independent_axis), load them into a "
                    f"step with as many, average them there by zt.pmean(p, axis), and take one: step.unshard(state)."
                )
            raise ValueError(
                f"load: {name} has shape {list(saved_shape)} in {path}, and {list(fitting[-1])} in the state.\n{advice}"
            )
        dtype = leaf.dtype if isinstance(leaf, torch.Tensor) else as_tensor(leaf).dtype
        if not torch.can_cast(saved_dtype, dtype):
            raise ValueError(
                f"load: {name} is {saved_dtype} in {path}, and {dtype} in the state, which cannot hold its values.\n"
                f"Give `like` a leaf of {saved_dtype}, and convert it after the load."
            )


def _check_moments(
    kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    path: Path,
    parts: Mapping[str, torch.Tensor],
) -> None:
    """Raises: ValueError if a leaf is a float on one side and the codes of a moment in 8 bits on the other."""
    for name, part in parts.items():
        _, saved = kinds[name]
        if saved != part.dtype and (
            (saved in MOMENTS and part.is_floating_point())
            or (part.dtype in MOMENTS and saved.is_floating_point)
        ):
            raise ValueError(
                f"load: {name} is {saved} in {path}, and {part.dtype} between steps: one of them is a moment in 8 "
                f"bits.\n"
                f"Load it into a step with the store(...) that it was saved with, and convert the state: "
                f"other_step.shard(step.unshard(state))."
            )


def is_integral(dtype: torch.dtype) -> bool:
    """Whether the values of a dtype are integers."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def check_range(name: str, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises: ValueError if one of these integers, which are loaded into a leaf of `dtype`, does not fit it."""
    local = values.to_local() if isinstance(values, DTensor) else values
    # In NumPy, because torch has no minimum of unsigned dtypes wider than a byte.
    array = local.cpu().numpy()
    limits = torch.iinfo(dtype)
    if array.size and not limits.min <= int(array.min()) <= int(array.max()) <= limits.max:
        raise ValueError(
            f"load: {name} has integers from {array.min()} to {array.max()}, which {dtype} in the state cannot hold.\n"
            f"Give `like` a leaf of {values.dtype}, and convert it after the load."
        )


def _blank(leaf: Any) -> Any:
    """A leaf without values, so that `Step.shard` allocates only this rank's part of it."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_like(leaf, device="meta").requires_grad_(leaf.requires_grad)


def _device_of(leaves: Iterable[Any]) -> torch.device:
    """The device of the first tensor with dims that is not on meta; without one, the default device."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.ndim and not leaf.is_meta:
            return leaf.device
    return torch.get_default_device()


def _memory_for(part: Any, like: Any, device_of_meta: torch.device) -> torch.Tensor:
    """Memory for a part: as `Step.shard` allocated it, or without a mesh a new tensor on the device of `like`."""
    if not isinstance(part, torch.Tensor):
        return as_tensor(part)
    if not part.is_meta:
        return part
    device = device_of_meta if like.is_meta else like.device
    memory = torch.empty(part.shape, dtype=part.dtype, device=device)
    return memory.requires_grad_(part.requires_grad)


def _as_like(part: torch.Tensor, like: Any) -> Any:
    """A loaded part, as a number if `like` is a number and the step has no mesh."""
    is_number = not isinstance(like, torch.Tensor) and not isinstance(part, DTensor)
    return type(like)(part.item()) if is_number else part
