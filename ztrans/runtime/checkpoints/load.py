"""load: read a state in the layouts that a step needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ...calling.trees import named_leaves, none_as_empty, state_leaves
from ...ir.layout import as_tensor
from ..state import copied
from .files import Folder, ModelFile, committed, is_model, partial

State = TypeVar("State")
_OF_MODULES = ("params", "buffers")  # the entries of a state that an ordinary model's file has


def load(path: str | os.PathLike[str], step: Callable, like: State) -> State:
    """Read a state, in the layouts that `step` needs. All ranks must call it.

    The number of ranks, the mesh, the axis and the stage may differ from those with which it was saved. Each rank reads
    its own parts only. Values are converted to the dtypes of `like`. What the checkpoint has besides is not read.

    `path` may also be an ordinary model's: a file of `torch.save(model.state_dict(), ...)` (.pt, .pth or .bin), a file
    .safetensors, or a folder of these. It fills `params` and `buffers`, and must have all of `params`. Other leaves
    have the values that they have in `like`.

    Args:
        path: what `zt.save` or `torch.distributed.checkpoint` has written, or an ordinary model's file or folder.
        step: the step that will use the state.
        like: a state with the structure, shapes and dtypes to read, such as that of `zt.lift`. It does not change. Its
            tensors may be on meta.

    Returns: The state, a new one, as `step.shard` returns it.

    Raises: FileNotFoundError if there is no complete checkpoint. ValueError if it has not all leaves of `like`, or
        leaves of other shapes, or if an ordinary model's file has tensors which are not in `like`.

    >>> import tempfile, ztrans as zt
    >>> folder = Path(tempfile.mkdtemp()) / "checkpoint"
    >>> _ = zt.save(folder, {"params": {"w": torch.ones(2)}, "lr": 0.1}).result()
    >>> zt.load(folder, lambda state: state, {"params": {"w": torch.empty(2, device="meta")}, "lr": 0.0})
    {'params': {'w': tensor([1., 1.])}, 'lr': 0.1}
    """
    path, named = Path(path), named_leaves(like)
    checkpoint = _opened(path)
    names = _names(checkpoint, path, named)
    _check_shapes(checkpoint, path, names, named)
    leaves, tree = pytree.tree_flatten(none_as_empty(like))
    blank = [
        _blank(leaf) if name in names else _kept(path, name, leaf) for name, leaf in named.items()
    ]
    state = pytree.tree_unflatten(blank, tree)
    sharded = state_leaves((getattr(step, "shard", None) or (lambda whole: whole))(state))
    parts = dict(zip(named, map(_allocated, sharded, leaves)))
    checkpoint.fill({names[name]: part.detach() for name, part in parts.items() if name in names})
    return pytree.tree_unflatten(list(map(_as_like, parts.values(), leaves)), tree)


def _opened(path: Path) -> Folder | ModelFile:
    folder = committed(path)
    if folder is not None:
        return Folder(folder)
    if path.exists() and is_model(path):
        return ModelFile(path)
    begun = partial(path).exists()
    hint = (
        " The first save to it is not complete: call .result() of a save that runs."
        if begun
        else ""
    )
    raise FileNotFoundError(
        f"load: {path} is no checkpoint.{hint}\n"
        f"zt.save writes one. The files of an ordinary model end in .pt, .pth, .bin or .safetensors."
    )


def _names(checkpoint: Folder | ModelFile, path: Path, named: Mapping[str, Any]) -> dict[str, str]:
    """The names in the checkpoint of the leaves that it fills, by their names in the state."""
    stored = checkpoint.shapes.keys()
    if isinstance(checkpoint, Folder) or not named.keys().isdisjoint(stored):
        required = names = {name: name for name in named}
        others: list[str] = []
    else:
        inner = {name: name.partition(".") for name in named}
        names = {
            name: rest
            for name, (entry, _, rest) in inner.items()
            if entry in _OF_MODULES and rest in stored
        }
        required = {
            name: rest for name, (entry, _, rest) in inner.items() if entry == _OF_MODULES[0]
        }
        others = checkpoint.others({*names.values()})
    missing = [name for name, key in required.items() if key not in stored]
    if missing or others:
        raise ValueError(
            f"load: {path} does not fit the state.\n"
            f"{_listed('The checkpoint does not have', missing)}{_listed('The state does not have', others)}"
            f"`like` lists the leaves to read: give it those that the checkpoint has. Load an ordinary model's file "
            f"that has other names into the model itself, before zt.lift: model.load_state_dict(...)."
        )
    return names


def _listed(head: str, names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"  {head} {', '.join(names[:4])}{more}.\n" if names else ""


def _check_shapes(
    checkpoint: Folder | ModelFile, path: Path, names: Mapping[str, str], named: Mapping[str, Any]
) -> None:
    for name, key in names.items():
        shape = tuple(named[name].shape) if isinstance(named[name], torch.Tensor) else ()
        if checkpoint.shapes[key] != shape:
            raise ValueError(
                f"load: {name} has shape {list(checkpoint.shapes[key])} in {path}, and {list(shape)} in the state.\n"
                f"Build the model with the sizes that it was saved with."
            )


def _kept(path: Path, name: str, leaf: Any) -> Any:
    """A copy of a leaf that the checkpoint does not have."""
    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
        raise ValueError(
            f"load: {path} does not have {name}, so it would have its value in `like`, but that is on meta.\n"
            f"Give `like` a value: torch.zeros_like(x, device='cpu')."
        )
    return copied(leaf) if isinstance(leaf, torch.Tensor) else leaf


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
    return torch.empty(part.shape, dtype=part.dtype, device=device).requires_grad_(
        part.requires_grad
    )


def _as_like(part: torch.Tensor, like: Any) -> Any:
    """A loaded part; a number where `like` has one and the step has no mesh."""
    is_number = not isinstance(like, torch.Tensor) and not isinstance(part, DTensor)
    return type(like)(part.item()) if is_number else part
