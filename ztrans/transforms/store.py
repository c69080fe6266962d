"""Store parameters and moments in bf16 or 8 bits between steps, and round their new values at random."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..ir.graph import DTYPES, Eqn, Graph, Kept, Var, dce
from ..ir.layout import LeafSharding
from ..ir.op_facts import CAST, rearranges
from ..ir.printer import first_names
from ..ir.rewriter import Rewriter
from ..ops import MOMENTS
from .base import Transform, Where, check_where, constructor, matches, program_shardings
from .stored_leaves import StoredLeaves

aten = torch.ops.aten
_ROUND = torch.ops.ztrans.stochastic_round.default
_KEYS = torch.ops.ztrans.leaf_keys.default
_WIDEN = torch.ops.ztrans.widened.default
_ROUNDINGS = ("stochastic", "nearest")


@constructor
def store(
    dtype: torch.dtype,
    *,
    where: Where | None = None,
    first_moments: Where | None = None,
    second_moments: Where | None = None,
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    seed: int = 0,
) -> Transform:
    """Store leaves of the state in bf16 between steps, moments also in 8 bits, and compute in fp32.

    A step reads the stored leaves, casts them to fp32 where forward, backward and the update read them, and rounds each
    new value once, at its end. With fp32 parameters and AdamW this halves the state. Stochastic rounding is up or down,
    with the odds that keep the mean: rounding to nearest would drop every update that is less than 1/512 of its
    parameter, so a model stops learning at small learning rates. The random bits are a hash of the seed, of the number
    of the step, which this transform keeps, and of a leaf's name and the element's index. So they are the same on any
    number of ranks, and after a restart. On one rank values are rounded too.

    `step.shard(state)` rounds the leaves to nearest. They stay bf16 in checkpoints, and in what `step.unshard` and
    `zt.state_dict` return. A chosen leaf that is bf16 already is also computed in fp32. `zt.eager` rounds to nearest.

    Moments of 8 bits are floats without a scale, always rounded stochastically. A first moment, int8, is at most 40 in
    magnitude. A second moment, uint8, may not be negative, and is never rounded to 0. Checkpoints have these codes;
    `step.unshard` returns fp32. With both and bf16 parameters AdamW's state is a third of that in fp32.

    Rewrites:
        y = mm(x, w)                                     y = mm(x, cast(w, f32))
        w1 = update(w, g)                          -->   w1 = stochastic_round(w, update(cast(w, f32), g), key)
        h = cast(view(w), bf16)                          h = view(w)

    Args:
        dtype: torch.bfloat16.
        where: the leaves to store: a pattern for `fnmatch` of their paths, such as "params.*", or a function
            `where(path, leaf)` of the path and a meta tensor in fp32. By default all leaves but buffers of a module.
            Of these, leaves in fp32 with at least one dim are stored; scalars and integers stay.
        first_moments, second_moments: the leaves to store in 8 bits, such as "*.exp_avg" and "*.exp_avg_sq", chosen as
            by `where`; by default none.
        rounding: "stochastic", or "nearest", which 8 bits exclude.
        seed: the seed of stochastic rounding, a whole number.

    Raises: TypeError for another dtype, or if `where` is neither of these; ValueError for another rounding or seed.
        When the step is lowered, ValueError if an option chooses no leaf, or, without `where`, if the step does not
        update one.
        When it is called, TypeError if the state has not been through `step.shard`.

    Source: Zamirai et al., Revisiting BFloat16 Training, 2020; `bf16_stochastic_round` of torchao.

    >>> store(torch.bfloat16, where="optimizer.*", rounding="nearest")
    store(dtype=torch.bfloat16, where='optimizer.*', rounding='nearest')
    """
    if dtype is not torch.bfloat16:
        raise TypeError(
            f"store: dtype={dtype!r}; leaves are stored in torch.bfloat16, which has the range of fp32. In fp16, second"
            f" moments would become 0."
        )
    for chosen in (where, first_moments, second_moments):
        if chosen is not None:
            check_where("store", chosen, "params.*")
    if rounding not in _ROUNDINGS:
        raise ValueError(f"store: rounding={rounding!r}; it is 'stochastic' or 'nearest'.")
    if rounding == "nearest" and (first_moments is not None or second_moments is not None):
        raise ValueError(
            "store: rounding='nearest' with moments in 8 bits. Their changes in a step are smaller than the distance "
            "of two codes, so to nearest they would stay as they are.\nLeave rounding out."
        )
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"store: seed={seed!r}; it is a whole number.")
    return Store(dtype, where, first_moments, second_moments, rounding, seed)


@dataclass(frozen=True)
class Store(Transform):
    """The transform that `store` returns."""

    dtype: torch.dtype
    where: Where | None = None
    first_moments: Where | None = None
    second_moments: Where | None = None
    rounding: str = "stochastic"
    seed: int = 0

    # After all transforms that read a step as it was written, in fp32, such as `ema`.
    phase: ClassVar[float] = 1.5

    def keeps(self, leaves: Mapping[str, torch.Tensor]) -> Sequence[Kept]:
        is_random = self.rounding == "stochastic"
        return [Kept("step", like=(), dtype=torch.int64)] if is_random else []

    def leaf_sharding(self, path: str, leaf: torch.Tensor, shape: tuple[int, ...]) -> LeafSharding:
        if leaf.ndim == 0:
            return LeafSharding()
        where = self.where or (lambda path, leaf: not path.startswith("buffers."))
        moments = (self.first_moments, torch.int8), (self.second_moments, torch.uint8)
        for chosen, dtype in (*moments, (where, self.dtype)):
            is_fp32 = leaf.dtype in (torch.float32, dtype)
            if chosen is not None and is_fp32 and matches(chosen, path, leaf.to(torch.float32)):
                return LeafSharding(dtype=dtype)
        return LeafSharding()

    def rewrite(self, graph: Graph) -> Graph:
        stored = {}
        for v, sharding in program_shardings(graph, [self]).items():
            if sharding.dtype is not None:
                stored[v] = dataclasses.replace(v, dtype=sharding.dtype)
        self._check(graph, stored)
        keys: dict[str, Var] = {}
        if self.rounding == "stochastic":
            graph, keys = self._with_keys(
                graph, [v for v, new in graph.leaves if v in stored and new is not v]
            )

        def rounded(new: Rewriter, value: Var, leaf: Var) -> list[Eqn]:
            name = new.fresh_name(f"{value.name}.{DTYPES[leaf.dtype]}")
            out = Var(name, leaf.dtype, value.shape)
            if self.rounding == "nearest":
                return [Eqn(aten.copy.default, (leaf, value), (out,))]
            place = (list(value.shape), [0] * len(value.shape))
            return [Eqn(_ROUND, (leaf, value, keys[leaf.name], *place), (out,))]

        return _without_round_trips(StoredLeaves(graph, stored, _widened, rounded).program())

    def _with_keys(self, graph: Graph, leaves: list[Var]) -> tuple[Graph, dict[str, Var]]:
        """The program that counts its steps and computes the key of each leaf, and these keys by name."""
        if not leaves:
            return graph, {}
        new = Rewriter(graph)
        step = graph.kept_by(self.name)["step"]
        after = new.fresh(step, ".new")
        vector = Var(new.fresh_name("keys"), torch.int32, (len(leaves),))
        keys = [Var(new.fresh_name(f"{v.name}.key"), torch.int32, ()) for v in leaves]
        names = [zlib.crc32(f"{self.seed} {v.name}".encode()) for v in leaves]
        eqns = [
            Eqn(_KEYS, (step, names), (vector,)),
            Eqn(aten.unbind.int, (vector,), tuple(keys)),
            Eqn(aten.add.Tensor, (step, 1), (after,)),
        ]
        new.insert_before(graph.eqns[0], *(e.replace(region="update") for e in eqns))
        new.set_leaf(step, after)
        return new.applied(), {v.name: key for v, key in zip(leaves, keys)}

    def _check(self, graph: Graph, stored: Mapping[Var, Var]) -> None:
        """Raises: ValueError if no leaf is stored, or one that the step does not update and the user has not chosen."""
        dtypes = {new.dtype for new in stored.values()}
        wanted = {"first_moments": torch.int8, "second_moments": torch.uint8}
        missing = [k for k, v in wanted.items() if getattr(self, k) is not None and v not in dtypes]
        if not stored and not missing:
            missing = ["where"]
        if missing:
            option = missing[0]
            raise ValueError(
                f"store: {option}={getattr(self, option)!r} chooses no leaf of {graph.name} that is fp32 and has "
                f"dims.\nThese are {first_names([v.name for v in graph.state])}."
            )
        unchanged = [old.name for old, new in graph.leaves if old in stored and new is old]
        if self.where is None and 0 < len(unchanged) < len(stored):
            raise ValueError(
                f"store: {graph.name} does not update {first_names(unchanged)}, so bf16 would only make them less "
                f"precise.\nChoose the leaves: where=lambda path, leaf: path.startswith(...); where='*' stores these "
                f"too."
            )


def _widened(new: Rewriter, leaf: Var, stored: Var) -> list[Eqn]:
    """The cast of a stored leaf to the dtype in which the step computes."""
    out = Var(new.fresh_name(f"{leaf.name}.f32"), leaf.dtype, leaf.shape)
    if stored.dtype in MOMENTS:
        return [Eqn(_WIDEN, (stored,), (out,))]
    return [Eqn(CAST, (stored,), (out,), {"dtype": leaf.dtype})]


def _without_round_trips(graph: Graph) -> Graph:
    """The program without casts to fp32 and back: `cast(view(cast(w, f32)), bf16)` is `view(w)`."""
    new = Rewriter(graph)
    for e in graph.eqns:
        if not _casts(e):
            continue
        views: list[Eqn] = []
        source = new.makers.get(e.ins[0])
        while source is not None and rearranges(source):
            views.append(source)
            source = new.makers.get(source.ins[0])
        if source is None or not _casts(source):
            continue
        value = source.ins[0]
        is_wider = torch.promote_types(value.dtype, source.out.dtype) == source.out.dtype
        if value.dtype != e.out.dtype or not is_wider:
            continue
        new.drop(e)
        for view in reversed(views):
            out = new.fresh(view.out, dtype=value.dtype)
            new.insert_before(e, view.replace(args=(value, *view.args[1:]), outs=(out,)))
            value = out
        new.alias(e.out, value)
    return dce(new.applied())


def _casts(e: Eqn) -> bool:
    """Whether an equation casts a value, not a constant, and does nothing else."""
    return e.op is CAST and len(e.ins) == 1 and e.kwargs.keys() == {"dtype"}
