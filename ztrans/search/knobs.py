"""The knobs of a search: what may be changed about a step, and the values that are tried.

A knob is a row of `KNOBS`. It changes the transforms of a step, and for HSDP also the mesh and its links. What a plan
decides anyway, such as the values that backward recomputes, is no knob.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..fitting import pattern_of_moments
from ..ir.graph import Graph
from ..ir.layout import AbstractMesh
from ..planning.cluster import Cluster
from ..transforms.accumulate import accumulate
from ..transforms.base import Transform, micro_batches_of
from ..transforms.fuse_cast_gather import fuse_cast_gather
from ..transforms.offload import offload
from ..transforms.overlap_grads import overlap_grads
from ..transforms.prefetch import prefetch
from ..transforms.remat import remat
from ..transforms.shard_params import ShardParams
from ..transforms.tile import tile

Transforms = tuple[Transform, ...]
Values = tuple[tuple[str, Any], ...]  # (name of a knob, its value)


@dataclass(frozen=True)
class Setting:
    """A value for each knob, and what a step with these values is.

    Attributes:
        values: (name of the knob, its value).
        transforms: all transforms of the step.
        cluster: the devices and links.
        saves_memory: whether a value only helps a step that has too little memory.
    """

    values: Values
    transforms: Transforms
    cluster: Cluster
    saves_memory: bool = False

    @property
    def micro_batches(self) -> int:
        return micro_batches_of(self.transforms)

    def speed_values(self) -> Values:
        """The values of the knobs that do not only save memory."""
        saving = {knob.name for knob in KNOBS if knob.saves_memory}
        return tuple((name, value) for name, value in self.values if name not in saving)


class Start(NamedTuple):
    """What the values of a knob depend on: the program as it was traced, its transforms, and the rows of the batch."""

    graph: Graph
    setting: Setting
    rows: int


class Knob(NamedTuple):
    """A row of the table.

    Attributes:
        name: its name in `search(knobs=...)`.
        values: the values to try; the first one leaves the step as it is, or is the least change.
        apply: the setting with a value; None if it has no meaning there.
        text: a value in words; empty for one that changes nothing.
        saves_memory: whether values after the first only help a step that has too little memory.
        only: all values that it takes; empty if these are numbers.
    """

    name: str
    values: Callable[[Start], Sequence[Any]]
    apply: Callable[[Start, Setting, Any], Setting | None]
    text: Callable[[Any], str]
    saves_memory: bool = False
    only: tuple[Any, ...] = ()


def settings(start: Start, chosen: Mapping[str, Sequence[Any]] | None) -> Iterator[Setting]:
    """Every setting of the knobs, those with few changes first.

    Args:
        start: the step.
        chosen: the values of some knobs, in place of those in the table.

    Raises: ValueError if a knob is unknown, or has no values, or one that it does not take.
    """
    chosen = dict(chosen or {})
    known = {knob.name: knob for knob in KNOBS}
    for name, values in chosen.items():
        if name not in known:
            raise ValueError(f"search: no knob {name!r}; there are {', '.join(known)}.")
        if isinstance(values, (str, int)) or not values:
            raise ValueError(
                f"search: knobs={{{name!r}: {values!r}}}; write the values to try, such as ({values!r},)."
            )
        only = known[name].only
        wrong = [value for value in values if only and value not in only]
        if wrong:
            raise ValueError(
                f"search: knobs={{{name!r}: ...}} has {wrong[0]!r}; its values are {', '.join(map(repr, only))}."
            )
    tried = [chosen.get(knob.name, knob.values(start)) or (None,) for knob in KNOBS]
    for values in itertools.product(*tried):
        setting = _applied(start, values)
        if setting is not None:
            yield setting


def _applied(start: Start, values: Sequence[Any]) -> Setting | None:
    """The setting with a value for each knob, None for a knob that the step does not have."""
    setting = start.setting
    for knob, value in zip(KNOBS, values):
        if value is None:
            continue
        changed = knob.apply(start, setting, value)
        if changed is None:
            return None
        saves = knob.saves_memory and value != knob.values(start)[0]
        setting = dataclasses.replace(
            changed,
            values=(*changed.values, (knob.name, value)),
            saves_memory=changed.saves_memory or saves,
        )
    return setting


def with_schedules(transforms: Transforms) -> Transforms:
    """The transforms of a step, and the schedules that it lacks: they cost nothing, and the plan decides about them."""
    schedules: list[Transform] = [remat(memory="auto")]
    if sharding_of_step(transforms):
        schedules = [overlap_grads(), prefetch(), fuse_cast_gather(), *schedules]
    missing = [s for s in schedules if not any(type(s) is type(t) for t in transforms)]
    return (*transforms, *missing)


def without_savings(transforms: Transforms) -> Transforms:
    """The transforms of a step without those that only save memory."""
    saving = (type(tile()), type(offload(memory="auto")), type(remat()))
    return tuple(t for t in transforms if not isinstance(t, saving))


def replaced(transforms: Transforms, new: Transform) -> Transforms:
    """The transforms of a step with `new` in place of the one of its kind, or as the last one."""
    if any(type(t) is type(new) for t in transforms):
        return tuple(new if type(t) is type(new) else t for t in transforms)
    return (*transforms, new)


def _with(setting: Setting, new: Transform) -> Setting:
    return dataclasses.replace(setting, transforms=replaced(setting.transforms, new))


def sharding_of_step(transforms: Transforms) -> ShardParams | None:
    """The transform that shards the state, if there is one."""
    return next((t for t in transforms if isinstance(t, ShardParams)), None)


# ---- the knobs


def _stages(start: Start) -> Sequence[Any]:
    return (3, 2, 1, 0) if sharding_of_step(start.setting.transforms) else ()


def _with_stage(start: Start, setting: Setting, stage: int) -> Setting | None:
    shard = sharding_of_step(setting.transforms)
    if shard is None:
        return None
    # One micro-batch has its gradients reduced once at stage 1 too.
    if stage == 2 and setting.micro_batches == 1:
        return None
    return _with(setting, dataclasses.replace(shard, stage=stage))


def _replicas(start: Start) -> Sequence[Any]:
    """Whether each host has a replica: an axis over several hosts becomes two axes."""
    return (False, True) if _over_hosts(start.setting) else (False,)


def _over_hosts(setting: Setting) -> tuple[ShardParams, AbstractMesh, str] | None:
    """The transform that shards over an axis of several hosts, its mesh and that axis; None if there is none."""
    shard = sharding_of_step(setting.transforms)
    if shard is None or not isinstance(shard.mesh, AbstractMesh):
        return None
    if not isinstance(shard.axis, str) or shard.replicate_axis is not None:
        return None
    link = setting.cluster.link(shard.axis)
    size = dict(shard.mesh.axes)[shard.axis]
    is_divided = link.inside is not None and 1 < link.local < size and size % link.local == 0
    return (shard, shard.mesh, shard.axis) if is_divided else None


def _with_replicas(start: Start, setting: Setting, value: bool) -> Setting | None:
    if not value:
        return setting
    divided = _over_hosts(setting)
    if divided is None or divided[0].stage == 0:
        return None
    shard, mesh, axis = divided
    link = setting.cluster.link(axis)
    host = "host" if "host" not in dict(mesh.axes) else f"{axis}_host"
    sizes: dict[str, int] = {}
    for name, size in mesh.axes:
        sizes |= {host: size // link.local, axis: link.local} if name == axis else {name: size}
    links = dict(setting.cluster.links)
    links |= {axis: link.inside or link, host: dataclasses.replace(link, inside=None, local=1)}
    sharded = dataclasses.replace(shard, mesh=AbstractMesh(**sizes), replicate_axis=host)
    cluster = dataclasses.replace(setting.cluster, links=tuple(links.items()))
    return dataclasses.replace(_with(setting, sharded), cluster=cluster)


def _micro_batches(start: Start) -> Sequence[Any]:
    return tuple(n for n in (1, 2, 4, 8) if start.rows % n == 0 and start.rows >= n)


def _with_micro_batches(start: Start, setting: Setting, micro: int) -> Setting | None:
    if micro == 1:
        others = (t for t in setting.transforms if t.micro_batches == 1)
        return dataclasses.replace(setting, transforms=tuple(others))
    return _with(setting, accumulate(micro))


def _with_order(
    start: Start, setting: Setting, order: Literal["batches", "layers"]
) -> Setting | None:
    if order == "batches":
        return setting
    micro = setting.micro_batches
    return _with(setting, accumulate(micro, order=order)) if micro > 1 else None


def _codes(start: Start) -> Sequence[Any]:
    """Whether messages are codes, where the step leaves that open."""
    return (False, True) if any(map(_is_open, start.setting.transforms)) else ()


def _is_open(transform: Transform) -> bool:
    """Whether a transform has `bits="auto"`."""
    return transform.variants_change_bits and len(transform.variants) > 1


def _with_codes(start: Start, setting: Setting, codes: bool) -> Setting | None:
    transforms: list[Transform] = []
    for t in setting.transforms:
        if not _is_open(t):
            transforms.append(t)
        elif codes:
            transforms.append(t.variants[-1])
    return dataclasses.replace(setting, transforms=tuple(transforms))


def _with_tiles(start: Start, setting: Setting, tokens: int) -> Setting | None:
    return _with(setting, tile(tokens)) if tokens else setting


def _on_host(start: Start) -> Sequence[Any]:
    moments = ("moments",) if pattern_of_moments(start.graph) else ()
    return ("nothing", "activations", *moments, "everything")


def _with_host(start: Start, setting: Setting, value: str) -> Setting | None:
    if value == "nothing":
        return setting
    if value == "activations":
        return _with(setting, offload(memory="auto"))
    where = "*" if value == "everything" else pattern_of_moments(start.graph)
    return _with(setting, offload(where=where, memory="auto"))


KNOBS: tuple[Knob, ...] = (
    Knob(
        "micro_batches",
        _micro_batches,
        _with_micro_batches,
        lambda n: f"{n} micro-batches" if n > 1 else "",
    ),
    Knob(
        "order",
        lambda start: ("batches", "layers"),
        _with_order,
        lambda order: f"in the order of {order}" if order == "layers" else "",
        only=("batches", "layers"),
    ),
    Knob("stage", _stages, _with_stage, lambda n: f"stage {n}", only=(0, 1, 2, 3)),
    Knob(
        "replicas",
        _replicas,
        _with_replicas,
        lambda yes: "a replica on each host" if yes else "",
        only=(False, True),
    ),
    Knob("codes", _codes, _with_codes, lambda yes: "codes" if yes else "", only=(False, True)),
    Knob(
        "tile",
        lambda start: (0, 4096),
        _with_tiles,
        lambda tokens: f"tiles of {tokens:,} tokens" if tokens else "",
        saves_memory=True,
    ),
    Knob(
        "on_host",
        _on_host,
        _with_host,
        lambda what: f"{what} on the host" if what != "nothing" else "",
        saves_memory=True,
        only=("nothing", "activations", "moments", "everything"),
    ),
)


def described(values: Values) -> str:
    """The values of a setting in words.

    >>> described((("stage", 3), ("micro_batches", 2), ("on_host", "nothing")))
    'stage 3, 2 micro-batches'
    """
    texts = {knob.name: knob.text for knob in KNOBS}
    return ", ".join(filter(None, (texts[name](value) for name, value in values)))


def rows_of(batch: Any) -> int:
    """The samples of a batch: the length of the first dim of its tensors."""
    leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor) and x.dim()]
    return min((x.shape[0] for x in leaves), default=1)
