"""half_weights: an update also writes the half-precision copy of its parameter that the next step reads.

    h = cast(p, bf16)
    y = mm(x, h)                                      y = mm(x, h)
    ...                                          -->  ...
    p1, m1, v1 = fused_adamw([p], [g], [m], [v],      p1, m1, v1, h1 = fused_adamw([p], [g], [m], [v],
                             [n], ...)                                             [n], [h], ...)

A step under autocast begins with casts of its parameters. The update has just had them in registers, so it writes the
copy too: 2 bytes for each parameter, in place of a cast that reads 4 and writes 2. The bits are those of the cast. The
kernels of `ops/update.py` do so, and kernels of Inductor for an elementwise update, on CPUs too.

The copies are leaves of the state of the program, which the user does not see. A copy is used if the parameter is the
very tensor that the step before returned, and PyTorch's version counter says that nothing has changed it since.
Otherwise the parameter is cast before the step. So any other state may be passed, in any order. The counter does not
see what is written through `.data`, by a collective of torch.distributed, or by a kernel that PyTorch does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...calling.inputs import Inputs
from ...calling.snapshot import Snapshot
from ...ir.collectives import HALF
from ...ir.graph import Eqn, Graph, Names, Var, producers, rename
from ...ir.liveness import liveness
from ...ir.op_facts import CAST, op_facts
from ...ir.verifier import check

_UPDATES = ("ztrans::fused_adam", "ztrans::fused_adamw", "ztrans::fused_sgd")


@dataclass
class HalfWeights:
    """The half-precision copies of parameters that a program has as hidden leaves of its state.

    Attributes:
        num_state: the number of leaves that the user sees, after which the copies come.
        places: the positions of the parameters among them.
        copies: the copy of each of these.
    """

    num_state: int
    places: Sequence[int]
    copies: Sequence[torch.Tensor]
    _written: list[Snapshot] = field(default_factory=list)  # by the last step, if it ended well

    def inserted(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs of the program, given those that the user sees."""
        return [*tensors[: self.num_state], *self.copies, *tensors[self.num_state :]]

    def refresh(self, inputs: Inputs) -> None:
        """Cast the parameters that are not as the last step has left them. A step on these inputs follows."""
        written = self._written
        self._written = []
        for k, (place, copy) in enumerate(zip(self.places, self.copies)):
            if not written or not written[k].is_unchanged(inputs, place):
                copy.copy_(inputs.tensors[place])

    def note(self, inputs: Inputs) -> None:
        """Note that a step on these inputs has ended well, and has written the copies."""
        self._written = [Snapshot.of(inputs, place) for place in self.places]

    def forget(self) -> None:
        """Let the next step cast all parameters."""
        self._written = []


def with_half_weights(
    graph: Graph, tensors: Sequence[torch.Tensor], fuses: bool = False
) -> tuple[Graph, HalfWeights | None]:
    """The program whose updates write half-precision copies, and these copies; None if there is nothing to write.

    `graph` is a program after `half_gradients`, and `tensors` are its inputs. With `fuses` elementwise updates will be
    kernels of Inductor, which write copies too.
    """
    casts = _casts(graph)
    makers = _makers(graph, casts, fuses)
    places = [i for i, v in enumerate(graph.inputs) if v in makers]
    if not places or graph.micro > 1:
        return graph, None
    names = Names(v.name for v in (*graph.inputs, *producers(graph.eqns)))
    before: dict[Var, Var] = {}
    after: dict[Var, Var] = {}
    for i in places:
        parameter = graph.inputs[i]
        dtype = casts[parameter][0].out.dtype
        before[parameter] = _copy_of(parameter, dtype, names)
        after[parameter] = _copy_of(graph.outputs[i], dtype, names)
    graph = _rewritten(graph, casts, makers, before, after)
    # As a cast, a copy keeps the strides of its parameter.
    copies = [
        torch.empty_like(tensors[i], dtype=half.dtype) for i, half in zip(places, before.values())
    ]
    return graph, HalfWeights(graph.num_state - len(places), places, copies)


def _casts(graph: Graph) -> dict[Var, list[Eqn]]:
    """The casts of each leaf of the state to half precision, if all of them are to one dtype."""
    state = set(graph.inputs[: graph.num_state])
    casts: dict[Var, list[Eqn]] = {}
    for eqn in graph.eqns:
        is_half = eqn.op is CAST and eqn.out.dtype in HALF and eqn.kwargs.keys() == {"dtype"}
        if is_half and eqn.ins[0] in state:
            casts.setdefault(eqn.ins[0], []).append(eqn)
    return {v: eqns for v, eqns in casts.items() if len({eqn.out.dtype for eqn in eqns}) == 1}


def _makers(graph: Graph, casts: Mapping[Var, Sequence[Eqn]], fuses: bool) -> dict[Var, Eqn]:
    """For each parameter that has casts, the equation of its new value, if that can write a copy.

    Nothing may read the casts later.
    """
    lifetimes = liveness(graph)
    position = {eqn: index for index, eqn in enumerate(graph.eqns)}
    by_result = producers(graph.eqns)
    makers: dict[Var, Eqn] = {}
    for parameter, new in zip(graph.inputs[: graph.num_state], graph.outputs):
        maker = by_result.get(new)
        if maker is not None and parameter in casts:
            last_read = max(lifetimes.last[cast.out] for cast in casts[parameter])
            is_ours = _is_ours(maker) and maker.args[0][0] is parameter and maker.outs[0] is new
            writes = is_ours or (fuses and _is_elementwise(maker))
            if writes and last_read < position[maker]:
                makers[parameter] = maker
    return makers


def _is_ours(eqn: Eqn) -> bool:
    return op_facts(eqn.op).name in _UPDATES


def _is_elementwise(eqn: Eqn) -> bool:
    return eqn.region == "update" and op_facts(eqn.op).pointwise


def _copy_of(v: Var, dtype: torch.dtype, names: Names) -> Var:
    suffix = "bf16" if dtype == torch.bfloat16 else "fp16"
    return Var(names.fresh(f"{v.name}.{suffix}"), dtype, v.shape, v.layout)


def _rewritten(
    graph: Graph,
    casts: Mapping[Var, Sequence[Eqn]],
    makers: Mapping[Var, Eqn],
    before: Mapping[Var, Var],
    after: Mapping[Var, Var],
) -> Graph:
    """The program that reads the copies `before` its step in place of casts, and writes those `after` it."""
    rewritten: dict[Eqn, list[Eqn]] = {}
    alias: dict[Var, Any] = {}
    for parameter, half in before.items():
        maker = makers[parameter]
        rewritten[maker] = _writing(maker, half, after[parameter])
        rewritten.update((cast, []) for cast in casts[parameter])
        alias.update((cast.out, half) for cast in casts[parameter])
    eqns = []
    for eqn in graph.eqns:
        eqns += rewritten.get(eqn, [eqn])
    n = graph.num_state
    graph = graph.replace(
        inputs=(*graph.inputs[:n], *before.values(), *graph.inputs[n:]),
        eqns=tuple(eqns),
        outputs=(*graph.outputs[:n], *after.values(), *graph.outputs[n:]),
        num_state=n + len(before),
        leaf_shapes=(*graph.leaf_shapes, *(v.shape for v in before)) if graph.leaf_shapes else (),
    )
    return check(rename(graph, alias))


def _writing(maker: Eqn, half: Var, new_half: Var) -> list[Eqn]:
    """The equation of a new parameter, and of its copy. Inductor computes a cast in the kernel of its argument."""
    if _is_ours(maker):
        return [maker.replace(args=(*maker.args, [half]), outs=(*maker.outs, new_half))]
    kwargs = {"dtype": half.dtype}
    return [maker, Eqn(CAST, (maker.out,), (new_half,), kwargs, maker.region, maker.source)]
