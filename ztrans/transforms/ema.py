"""Keep an exponential average of the parameters in the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch

from ..ir.graph import Graph, Kept
from ..ir.printer import first_names
from ..ir.rewriter import Rewriter
from .base import Transform, Where, check_where, constructor, matches


@constructor
def ema(decay: float, *, where: Where | None = None) -> Transform:
    """Keep an exponential moving average of each parameter (EMA), which every step updates after its optimizer.

    An average begins as its parameter, and is a leaf of the state like it: with the same dtype, on the same shards,
    saved with it, and moved to the host by `offload(where="ema.*")`. Nothing is sent for it. Evaluate the averages by
    `evaluate(step.ema(state), *batch)`, with `evaluate = step.eval(fn)`.

    Rewrites:
        w1 = update(w, g)          -->   w1 = update(w, g); a1 = lerp(a, w1, 1 - decay)

    Args:
        decay: the weight of the old average, from 0 to 1: `a = decay * a + (1 - decay) * w`.
        where: the leaves to average. A pattern for `fnmatch` of their paths, such as "params.*.weight"; or a function
            `where(path, leaf)` of the path and a meta tensor. By default all leaves at "params", as a lifted state has
            them. Leaves that hold no floats, or floats of 8 bits, are left out.

    Raises: TypeError if `where` is neither; ValueError if `decay` is not a number from 0 to 1. When the step is called,
        ValueError if `where` chooses no leaf.

    Source: Polyak and Juditsky, 1992; `get_ema_multi_avg_fn` of torch.optim.swa_utils, whose bits it has.

    >>> import ztrans as zt
    >>> @zt.ema(0.9)
    ... def step(state, x):
    ...     return {"params": state["params"] - x}, None
    >>> state, kept = step.init({"params": torch.ones(2)})
    >>> (state, kept), _ = step((state, kept), 1.0)
    >>> kept
    {'ema': {'params': tensor([0.9000, 0.9000])}}
    """
    if isinstance(decay, bool) or not isinstance(decay, Real) or not 0 <= decay <= 1:
        raise ValueError(f"ema: decay={decay!r}; it is a number from 0 to 1, such as 0.999.")
    if where is not None:
        check_where("ema", where, "params.*")
    return Ema(float(decay), where)


@dataclass(frozen=True)
class Ema(Transform):
    """The transform that `ema` returns."""

    decay: float
    where: Where | None = None

    # The average of a new parameter is one more equation of the update, and runs on shards as that does.
    phase: ClassVar[int] = 1

    def keeps(self, leaves: Mapping[str, torch.Tensor]) -> Sequence[Kept]:
        averages = []
        for path, leaf in leaves.items():
            is_chosen = (
                is_parameter(path) if self.where is None else matches(self.where, path, leaf)
            )
            is_float = leaf.is_floating_point() or leaf.is_complex()
            if is_chosen and is_float and leaf.itemsize > 1:
                averages.append(Kept(path, like=path, start="copy"))
        if not averages:
            which = "at 'params'" if self.where is None else f"where {self.where!r}"
            raise ValueError(
                f"ema: the state has no floats {which}. It has {first_names([*leaves])}.\n"
                f"Choose the leaves to average: zt.ema({self.decay}, where='w.*'), or where='*' for all of them."
            )
        return averages

    def rewrite(self, graph: Graph) -> Graph:
        new = Rewriter(graph)
        averages = graph.kept_by(self.name)
        for old, parameter in graph.leaves:
            # In an evaluation all parameters stay as they are, and so do their averages.
            if old.name in averages and parameter is not old:
                average = averages[old.name]
                name = f"{average.name}.new"
                weight = 1 - self.decay
                value = new.emit(torch.lerp, average, parameter, weight, region="update", name=name)
                new.set_leaf(average, value)
        return new.applied()


def is_parameter(path: str) -> bool:
    """Whether a leaf of the state is a parameter by its path; inside of local steps the state of the step is `state`.

    >>> is_parameter("params.fc1.weight"), is_parameter("state.params.w"), is_parameter("optimizer.fc1.weight.exp_avg")
    (True, True, False)
    """
    own_path = path.removeprefix("state.")
    return own_path == "params" or own_path.startswith("params.")
