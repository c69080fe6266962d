"""Load weights from safetensors files into a state, each rank its own part."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...calling.inputs import local_part
from ...ir.printer import first_names
from ..named_weights import Weights
from ..session import leave_if_cut_off
from ..whole_leaves import Box
from .load import check_range, is_integral
from .safetensors import Files
from .together import agreed, failing_together

State = TypeVar("State")


def load_weights(weights: State, path: str | os.PathLike[str], *, strict: bool = True) -> State:
    """Read safetensors files into weights, in place. All ranks must call it; each rank reads its own parts.

    No rank holds more than its shards: the files are mapped, and parts are copied from there. So a model on meta is
    lifted, sharded, and filled from the files of Hugging Face. Other leaves of the state, such as moments, stay as they
    are.

    Args:
        weights: tensors or DTensors by name, such as `zt.state_dict(model, state)` of a lifted loop, or a state without
            buffers, whose `params` are filled. Values are converted to their dtypes.
        path: a folder with one safetensors file, or with several and an index; or a file.
        strict: whether files and weights must have the same names. If not, weights that the files do not have stay as
            they are, and other tensors of the files are not read. A tied weight needs one of its names.

    Returns: `weights`.

    Raises: ImportError if safetensors is not installed; FileNotFoundError if there are no files; ValueError if names,
        shapes or kinds of dtypes do not fit, if a file is damaged, or if a weight is on meta; RuntimeError if the state
        is half updated, if ranks find different files, or if another rank cannot read.

    >>> import tempfile, ztrans as zt
    >>> folder = zt.export(Path(tempfile.mkdtemp()) / "out", {"up.weight": torch.ones(2)})
    >>> zt.load_weights({"up": {"weight": torch.zeros(2)}}, folder)
    {'up': {'weight': tensor([1., 1.])}}
    >>> zt.load_weights({"up.weigth": torch.zeros(2)}, folder)
    Traceback (most recent call last):
        ...
    ValueError: load_weights: .../out does not have up.weigth. The nearest name in it is up.weight.
    Pass weights by the names of the files, or strict=False to keep what the files do not have.
    """
    path = Path(path).absolute()
    named = Weights.of(weights, "load_weights")
    named.agree("load_weights", strict)

    def found() -> tuple[Files, dict[str, str]]:
        files = Files(path)
        return files, _sources(named, files, path, strict)

    try:
        files, sources = agreed(found, lambda x: _digest(x[0]), named.mesh, "load_weights")
        firsts = {source: first for first, source in sources.items()}
        with failing_together(named.mesh, "load_weights"), torch.no_grad():
            for file, names in files.names_by_file.items():
                with files.open(file) as opened:
                    for name in names:
                        if name in firsts:
                            _read(opened, name, named.tensors[firsts[name]])
        return weights
    except BaseException as error:
        leave_if_cut_off(named.mesh, "load_weights", error)
        raise


def _read(opened: Any, name: str, x: torch.Tensor) -> None:
    """Read this rank's part of a tensor."""
    box = Box.of(x)
    part = local_part(x)
    if 0 in box.shape:
        return
    values = box(opened.get_slice(name)) if box.shape else opened.get_tensor(name)
    if is_integral(values.dtype) and is_integral(part.dtype) and values.dtype != part.dtype:
        check_range(name, values, part.dtype)
    part.copy_(values)


def _sources(named: Weights, files: Files, path: Path, strict: bool) -> dict[str, str]:
    """For each weight, by its first name, the name that it has in the files.

    Raises: ValueError if names, shapes or dtypes do not fit.
    """
    sources = {}
    missing = []
    for first, names in named.names.items():
        source = next((name for name in names if name in files.entries), None)
        if source is None:
            missing.append(first)
        else:
            sources[first] = source
    all_names = {name for names in named.names.values() for name in names}
    extra = [name for name in files.entries if name not in all_names]
    if strict and missing:
        raise ValueError(
            f"load_weights: {path} does not have {first_names(missing)}.{_nearest(missing[0], extra, 'in it')}\n"
            f"Pass weights by the names of the files, or strict=False to keep what the files do not have."
        )
    if strict and extra:
        raise ValueError(
            f"load_weights: {path} has {first_names(extra)}, which the weights do not have."
            f"{_nearest(extra[0], all_names, 'of a weight')}\n"
            f"Pass all weights, or strict=False to leave out what only the files have."
        )
    for first, source in sources.items():
        x = named.tensors[first]
        dtype, shape = files.entries[source]
        if shape != tuple(x.shape):
            raise ValueError(
                f"load_weights: {source} has shape {list(shape)} in {path}, and {list(x.shape)} in the state.\n"
                f"Build the model with the sizes that it was saved with."
            )
        if not torch.can_cast(dtype, x.dtype):
            raise ValueError(
                f"load_weights: {source} is {dtype} in {path}, and {x.dtype} in the state, which cannot hold its "
                f"values.\nBuild the model with a weight of {dtype}."
            )
    return sources


def _nearest(name: str, candidates: Collection[str], where: str) -> str:
    """A sentence with the candidate that is most like a name; empty if none is."""
    nearest = difflib.get_close_matches(name, candidates, 1)
    return f" The nearest name {where} is {nearest[0]}." if nearest else ""


def _digest(files: Files) -> str:
    """A digest of what files have, without the bytes of their tensors."""
    described = sorted((name, str(entry)) for name, entry in files.entries.items())
    sizes = [(file.name, file.stat().st_size) for file in files.names_by_file]
    return hashlib.sha256(repr((described, sizes)).encode()).hexdigest()
