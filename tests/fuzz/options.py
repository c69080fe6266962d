"""`Options`: a random mesh, a random choice of transforms, and their random options."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

import ztrans as zt

from .programs import Program


@dataclass(frozen=True)
class Options:
    """The mesh, transforms and cluster that a program is lowered with.

    `before` and `after` are the transforms before and after `shard_params`. The step is cut into `tiles`, if it can be:
    then its sums have another order, so the program without schedules has them too. `budget` is the memory budget as a
    fraction of the peak of the program in its written order, or None for no budget. `local` has h, the parts, and
    whether there is an outer optimizer, of local steps; None for none. With `codes` the case also runs in fp32, and
    these transforms quantize its messages. With `averages` it also runs with `zt.ema`.
    """

    ranks: int
    hosts: int
    shard: tuple[tuple[str, Any], ...]
    before: tuple[zt.Transform, ...]
    after: tuple[zt.Transform, ...]
    prefetch: tuple[tuple[str, Any], ...] | None
    budget: float | None
    cluster: tuple[str, str]
    tiles: tuple[zt.Transform, ...] = ()
    local: tuple[int, int, bool] | None = None
    codes: tuple[zt.Transform, ...] = ()
    averages: tuple[zt.Transform, ...] = ()

    @staticmethod
    def draw(program: Program, chance: Random) -> Options:
        ranks, hosts = (
            chance.choice([2, 3, 5]),
            2 if chance.random() < 0.15 and not program.together else 1,
        )
        shard: dict[str, Any] = {"stage": chance.choice([0, 1, 2, 3, 3])}
        if hosts > 1:
            shard["replicate_axis"] = "host"
        if chance.random() < 0.3:
            shard["reshard"] = "always"
        if chance.random() < 0.2:
            shard["outputs"] = "local"
        if chance.random() < 0.2:
            shard["where"] = SOME
        alone = program.micro == 1 and hosts == 1 and not program.together
        if alone and chance.random() < 0.25:
            dtype = chance.choice([torch.bfloat16, torch.float16, torch.float32])
            # Muon's update reads whole gradients. Which of these are all-reduced, and so rounded to the dtype of the wire,
            # the truth does not know.
            if not program.optimizer.name.startswith("muon"):
                shard["reduce_dtype"] = dtype
        as_written = [
            t
            for t in (zt.remat(at_least=chance.choice([1, 64])), zt.delay_weight_grads())
            if chance.random() < 0.3
        ]
        first = [t for t in as_written if chance.random() < 0.5]
        overlap = zt.overlap_grads(
            bucket=chance.choice(["auto", "auto", 0, 64, 1 << 20]),
            max_matmuls_between=chance.choice([8, None, 1, 2]),
            max_in_flight=chance.choice([None, None, 0, 256]),
            update=chance.choice(["eager", "eager", "last"]),
        )
        after = [t for t in (overlap, zt.fuse_cast_gather()) if chance.random() < 0.7]
        after += [zt.owned_updates()] if chance.random() < 0.3 else []
        after += [t for t in as_written if t not in first]
        chance.shuffle(after)
        prefetch = (
            (("max_in_flight", chance.choice([None, None, 0, 64, 1024])),)
            if chance.random() < 0.7
            else None
        )
        budget = chance.choice([None, None, 1.0, 1.05, 1.5])
        cluster = (
            chance.choice(["cpu", "a100", "h100"]),
            chance.choice(["ethernet-1g", "infiniband"]),
        )
        if chance.random() < 0.25:
            across_steps, gradients = (chance.random() < 0.3 for _ in range(2))
            after.append(
                zt.offload(where="*", gradients=gradients, across_steps=across_steps, at_least=0)
            )
        tiles = (zt.tile(parts=chance.choice([2, 3, 4])),) if chance.random() < 0.3 else ()
        local = None
        if hosts == 1 and chance.random() < 0.05:
            h = chance.randint(1, 3)
            local = h, chance.randint(1, h), chance.random() < 0.5
        codes = _codes(chance) if chance.random() < 0.3 else ()
        averages: tuple[zt.Transform, ...] = ()
        if chance.random() < 0.2:
            where = chance.choice([None, "*", "params.*", SOME])
            averages = (zt.ema(chance.choice([0.0, 0.5, 0.99, 1.0]), where=where),)
        return Options(
            ranks,
            hosts,
            tuple(shard.items()),
            tuple(first),
            tuple(after),
            prefetch,
            budget,
            cluster,
            tiles,
            local,
            codes,
            averages,
        )

    @property
    def world(self) -> int:
        return self.ranks * self.hosts

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return dict(self.shard).get("reduce_dtype")

    def keeps_whole(self, path: str, leaf: torch.Tensor) -> bool:
        """Whether each rank has a whole leaf, whose gradient is all-reduced.

        It has one with fewer rows than half of the ranks.
        """
        options = dict(self.shard)
        has_few_rows = leaf.ndim == 0 or 2 * len(leaf) < self.ranks
        is_chosen = options.get("where", lambda path, leaf: True)(path, leaf)
        return options["stage"] == 0 or has_few_rows or not is_chosen

    @property
    def mesh(self) -> zt.AbstractMesh:
        return (
            zt.AbstractMesh(host=self.hosts, dp=self.ranks)
            if self.hosts > 1
            else zt.AbstractMesh(dp=self.ranks)
        )

    @property
    def sharding(self) -> zt.Transform:
        return zt.shard_params(self.mesh, **dict(self.shard))

    def transforms(self, peak: int) -> tuple[zt.Transform, ...]:
        """All transforms in order. `peak` is the peak in bytes of the program in its written order."""
        memory = "auto" if self.budget is None else int(self.budget * peak)
        fetch = (
            () if self.prefetch is None else (zt.prefetch(memory=memory, **dict(self.prefetch)),)
        )
        return (*self.before, self.sharding, *self.after, *self.tiles, *fetch)

    @property
    def others(self) -> tuple[zt.Transform, ...]:
        """All transforms but `shard_params` and `prefetch`."""
        return (*self.before, *self.after, *self.tiles)

    @property
    def name(self) -> str:
        shown = ", ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in self.shard)
        others = " > ".join(map(repr, self.others))
        fetch = (
            ""
            if self.prefetch is None
            else f" > prefetch({dict(self.prefetch)}, budget={self.budget})"
        )
        local = "" if self.local is None else f" > local_steps{self.local}"
        more = "".join(f" > {t!r}" for t in (*self.codes, *self.averages))
        return f"{self.mesh} {shown} {self.cluster[0]} {others}{fetch}{local}{more}"


def _codes(chance: Random) -> tuple[zt.Transform, ...]:
    """Formats of short blocks, so that small leaves have several, and perhaps state in bf16 or 8 bits."""

    def block() -> int:
        return chance.choice([2, 6, 16])

    gathers = zt.quantize_gathers(chance.choice([8, 4]), block())
    grads = zt.quantize_grads(
        chance.choice([8, 4]),
        block(),
        between=chance.choice([None, 8, 4]),
        rotate=chance.choice([None, None, 2, 4]),
    )
    chosen = chance.choice([[gathers], [grads], [gathers, grads]])
    if chance.random() < 0.5:
        stored = chance.choice([{}, {"first_moments": "*"}, {"rounding": "nearest"}])
        chosen.append(zt.store(torch.bfloat16, where="*", seed=3, **stored))
    return tuple(chosen)


def some(path: str, leaf: torch.Tensor) -> bool:
    """Choose about two leaves of three, by a hash of their paths."""
    return zlib.crc32(path.encode()) % 3 > 0


SOME: Callable[[str, torch.Tensor], bool] = some
