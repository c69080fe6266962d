"""What a checkpoint holds beside the state: schedulers, data loaders, random generators, counters.

`save` takes the value of each extra when it is called, and writes it as a record, the bytes of `torch.save`: one for
all ranks if it is the same on all of them, and otherwise one for each rank. Generators always have one for each rank,
since ranks that draw the same numbers train on the same noise.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import random
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from typing import Any, NamedTuple

import numpy
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from ...calling.reads import is_constant
from ...ir.printer import first_names
from ..agreement import everywhere
from ..session import rank_names

_PREFIX = "extras/"  # of the names of records


class GlobalRng:
    """The global random generators of this process, as an extra of a checkpoint.

    They are Python's `random`, `numpy.random`, and PyTorch's on the CPU and, if it is in use, on the current GPU.

    >>> rng = GlobalRng()
    >>> states = rng.state_dict()
    >>> drawn = torch.rand(3)
    >>> rng.load_state_dict(states)
    >>> torch.equal(torch.rand(3), drawn)
    True
    """

    def state_dict(self) -> dict[str, Any]:
        """The states of the generators."""
        states = {
            "random": random.getstate(),
            "numpy": numpy.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Set the generators to these states."""
        random.setstate(states["random"])
        numpy.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])


class _Kind(NamedTuple):
    """Objects that have no `state_dict` and `load_state_dict`, or whose own lack something."""

    type: type
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]


def _scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """A scheduler, and the settings of its optimizer, from which most schedulers compute the next learning rate."""
    groups = []
    for group in scheduler.optimizer.param_groups:
        groups.append({key: value for key, value in group.items() if key != "params"})
    return {"scheduler": scheduler.state_dict(), "groups": groups}


def _set_scheduler(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    scheduler.load_state_dict(state["scheduler"])
    for group, settings in zip(scheduler.optimizer.param_groups, state["groups"], strict=True):
        group.update(settings)


def _set_numpy(generator: numpy.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_KINDS = (
    _Kind(torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    _Kind(random.Random, random.Random.getstate, random.Random.setstate),
    _Kind(numpy.random.Generator, lambda generator: generator.bit_generator.state, _set_numpy),
    _Kind(LRScheduler, _scheduler_state, _set_scheduler),
)
_GENERATORS = (GlobalRng, torch.Generator, random.Random, numpy.random.Generator)


def serialized(extras: Mapping[str, Any]) -> dict[str, bytes]:
    """The value of each extra at this moment, as the bytes of `torch.save`: equal values have equal bytes.

    Raises: TypeError if an extra has no value that can be saved.
    """
    values = {}
    for name, extra in extras.items():
        buffer = io.BytesIO()
        try:
            torch.save(_value(name, extra), buffer)
        except (pickle.PicklingError, AttributeError) as error:
            raise TypeError(f"save: the extra {name!r} cannot be pickled: {error}.") from error
        values[name] = buffer.getvalue()
    return values


def _value(name: str, extra: Any) -> Any:
    if isinstance(extra, torch.nn.Module | torch.optim.Optimizer | torch.amp.GradScaler):
        raise TypeError(
            f"save: the extra {name!r} is a {type(extra).__name__}, whose tensors are leaves of the state.\n"
            f"Leave it out. A scheduler brings the settings of its optimizer; other settings are numbers: "
            f"extras={{'lr': 0.1}}. If no step has lifted it, pass its state_dict()."
        )
    for kind in _KINDS:
        if isinstance(extra, kind.type):
            return kind.get(extra)
    if _is_stateful(extra):
        return extra.state_dict()
    for leaf in pytree.tree_leaves(extra):
        is_tensor = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
        if not (is_tensor or is_constant(leaf) or isinstance(leaf, bytes | numpy.ndarray)):
            raise TypeError(
                f"save: the extra {name!r} has a {type(leaf).__name__}, which is neither a value, such as a number or "
                f"a tensor, nor an object with state_dict and load_state_dict.\n"
                f"Give its class these two methods, or save the numbers from which you make it again, such as the "
                f"epoch of a DistributedSampler."
            )
    return extra


def _is_stateful(extra: Any) -> bool:
    return callable(getattr(extra, "state_dict", None)) and callable(
        getattr(extra, "load_state_dict", None)
    )


def records_of_rank(
    extras: Mapping[str, Any], values: Mapping[str, bytes], mesh: DeviceMesh | None
) -> dict[str, bytes]:
    """The records that this rank writes, by name. All ranks of the mesh must call it.

    Raises: RuntimeError on all ranks if they have extras of other names.
    """
    own = {name: hashlib.sha256(value).hexdigest() for name, value in values.items()}
    by_rank = [own] if mesh is None else everywhere(own, mesh)
    rank, ranks = _place(mesh)
    for position, digests in enumerate(by_rank):
        if digests.keys() != by_rank[0].keys():
            here = mesh.mesh.flatten().tolist() if mesh is not None else [0]
            raise RuntimeError(
                f"save: the ranks have other extras: {rank_names([here[0]])} has {', '.join(by_rank[0]) or 'none'}, "
                f"and {rank_names([here[position]])} has {', '.join(digests) or 'none'}.\n"
                f"Pass the same names on all ranks. A value may differ from rank to rank, and may be None."
            )
    named = {}
    for name, value in values.items():
        is_shared = len({digests[name] for digests in by_rank}) == 1
        if is_shared and not isinstance(extras[name], _GENERATORS):
            named[_PREFIX + name] = value
        else:
            named[_of_rank(name, rank, ranks)] = value
    return named


def record_names(
    extras: Mapping[str, Any], saved: Set[str], path: object, mesh: DeviceMesh | None
) -> dict[str, str]:
    """The record to read for each extra on this rank, of the records that a checkpoint has.

    Raises: ValueError if it lacks one, or if each of another number of ranks has saved its own.
    """
    rank, ranks = _place(mesh)
    names, elsewhere = {}, {}
    for name in extras:
        own = _of_rank(name, rank, ranks)
        others = [record for record in saved if record.startswith(f"{_PREFIX}{name}/")]
        if _PREFIX + name in saved:
            names[name] = _PREFIX + name
        elif own in saved:
            names[name] = own
        elif others:
            elsewhere[name] = others[0].rpartition(" of ")[2]
        else:
            there = sorted({_name(record) for record in saved})
            raise ValueError(
                f"load: {path} does not have the extra {name!r}. It has {first_names(there) or 'none'}.\n"
                f"Leave out of `extras` what the checkpoint does not have."
            )
    if elsewhere:
        raise ValueError(
            f"load: {path} was saved in a world of size {next(iter(elsewhere.values()))}; this one has size {ranks}. "
            f"These extras differ from rank to rank, or are generators: {first_names(list(elsewhere), 8)}.\n"
            f"Leave them out of `extras`, and start them again on each rank: seed a generator with another number than "
            f"before, and begin an epoch of the data."
        )
    return names


def restore(extras: MutableMapping[str, Any], values: Mapping[str, bytes]) -> None:
    """Set each extra to its value: an object in place, and any other value in `extras`.

    Raises: ValueError if an object does not accept its value.
    """
    for name, value in values.items():
        extra = extras[name]
        try:
            loaded = torch.load(io.BytesIO(value), weights_only=False)
            kind = next((kind for kind in _KINDS if isinstance(extra, kind.type)), None)
            if kind is not None:
                kind.set(extra, loaded)
            elif _is_stateful(extra):
                extra.load_state_dict(loaded)
            else:
                extras[name] = loaded
        except Exception as error:
            raise ValueError(
                f"load: the extra {name!r}, a {type(extra).__name__}, does not accept what was saved: "
                f"{type(error).__name__}: {error}"
            ) from error


def is_record(name: str) -> bool:
    """Whether a record of a checkpoint is an extra."""
    return name.startswith(_PREFIX)


def _place(mesh: DeviceMesh | None) -> tuple[int, int]:
    """This rank's position among the ranks of a mesh, and their number."""
    if mesh is None:
        return 0, 1
    ranks: Sequence[int] = mesh.mesh.flatten().tolist()
    return ranks.index(mesh.get_rank()), len(ranks)


def _of_rank(name: str, rank: int, ranks: int) -> str:
    """The name of the record of one rank."""
    return f"{_PREFIX}{name}/{rank} of {ranks}"


def _name(record: str) -> str:
    """The name of the extra that a record holds."""
    return record.removeprefix(_PREFIX).split("/")[0]
