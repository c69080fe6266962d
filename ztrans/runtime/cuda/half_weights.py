"""half_weights: on a GPU, an update also writes the half-precision copy of its parameter that the next step reads.

    h = cast(p, bf16)
    y = mm(x, h)                                      y = mm(x, h)
    ...                                          -->  ...
    p1, m1, v1 = fused_adamw([p], [g], [m], [v],      p1, m1, v1, h1 = fused_adamw([p], [g], [m], [v],
                             [n], ...)                                             [n], [h], ...)

A step under autocast begins with casts of its parameters. The update has just had them in registers, so it writes the
copy too: 2 bytes for each parameter, in place of a cast that reads 4 and writes 2. The bits are those of the cast.

The copies are leaves of the state of the program, which the user does not see. A copy is used if the parameter is the
very tensor that the step before returned, and PyTorch's version counter says that nothing has changed it since.
Otherwise the parameter is cast before the step. So any other state may be passed, in any order. The counter does not
see what is written through `.data`, or by a kernel that PyTorch does not know.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...calling.inputs import Inputs
from ...ir.collectives import HALF
from ...ir.graph import Eqn, Graph, Names, Var, producers, rename
from ...ir.liveness import liveness
from ...ir.op_facts import CAST, op_facts
from ...ir.verifier import check

_UPDATES = ("ztrans::fused_adam", "ztrans::fused_adamw", "ztrans::fused_sgd")
# A leaf, and the version counters and the address of what this rank has of it.
_Snapshot = tuple[weakref.ref, int, int, int]


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
    _written: list[_Snapshot] = field(default_factory=list)  # by the last step, if it ended well

    def inserted(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs of the program, given those that the user sees."""
        return [*tensors[: self.num_state], *self.copies, *tensors[self.num_state :]]

    def refresh(self, inputs: Inputs) -> None:
        """Cast the parameters that are not as the last step has left them. A step on these inputs follows."""
        written = self._written
        self._written = []
        for k, (place, copy) in enumerate(zip(self.places, self.copies)):
            if not written or not _is_unchanged(written[k], inputs, place):
                copy.copy_(inputs.tensors[place])

    def note(self, inputs: Inputs) -> None:
        """Note that a step on these inputs has ended well, and has written the copies."""
        self._written = [_snapshot(inputs, place) for place in self.places]

    def forget(self) -> None:
        """Let the next step cast all parameters."""
        self._written = []


def _snapshot(inputs: Inputs, place: int) -> _Snapshot:
    leaf = inputs.leaves[place]
    tensor = inputs.tensors[place]
    return weakref.ref(leaf), leaf._version, tensor._version, tensor.data_ptr()


def _is_unchanged(written: _Snapshot, inputs: Inputs, place: int) -> bool:
    return written[0]() is inputs.leaves[place] and written[1:] == _snapshot(inputs, place)[1:]


def with_half_weights(
    graph: Graph, tensors: Sequence[torch.Tensor]
) -> tuple[Graph, HalfWeights | None]:
    """The program whose updates write half-precision copies, and these copies; None if there is nothing to write.

    `graph` is a program after `half_gradients`, and `tensors` are its inputs.
    """
    casts = _casts(graph)
    updates = _updates(graph, casts)
    places = [i for i, v in enumerate(graph.inputs) if v in updates]
    if not places or graph.micro > 1:
        return graph, None
    names = Names(v.name for v in (*graph.inputs, *producers(graph.eqns)))
    before: dict[Var, Var] = {}
    after: dict[Var, Var] = {}
    for parameter in (graph.inputs[i] for i in places):
        dtype = casts[parameter][0].out.dtype
        before[parameter] = _copy_of(parameter, dtype, names)
        after[parameter] = _copy_of(updates[parameter].out, dtype, names)
    graph = _rewritten(graph, casts, updates, before, after)
    copies = [
        torch.empty(tensors[i].shape, dtype=half.dtype, device=tensors[i].device)
        for i, half in zip(places, before.values())
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


def _updates(graph: Graph, casts: Mapping[Var, Sequence[Eqn]]) -> dict[Var, Eqn]:
    """For each parameter that has casts, its update by a kernel of ours, if that can write a copy.

    Its result must be the new state, and nothing may read the casts later.
    """
    new_state = dict(zip(graph.inputs[: graph.num_state], graph.outputs))
    lifetimes = liveness(graph)
    updates: dict[Var, Eqn] = {}
    for index, eqn in enumerate(graph.eqns):
        if op_facts(eqn.op).name in _UPDATES:
            parameter = eqn.args[0][0]
            last_reads = [lifetimes.last[cast.out] for cast in casts.get(parameter, ())]
            if last_reads and max(last_reads) < index and new_state[parameter] is eqn.outs[0]:
                updates[parameter] = eqn
    return updates


def _copy_of(v: Var, dtype: torch.dtype, names: Names) -> Var:
    suffix = "bf16" if dtype == torch.bfloat16 else "fp16"
    return Var(names.fresh(f"{v.name}.{suffix}"), dtype, v.shape, v.layout)


def _rewritten(
    graph: Graph,
    casts: Mapping[Var, Sequence[Eqn]],
    updates: Mapping[Var, Eqn],
    before: Mapping[Var, Var],
    after: Mapping[Var, Var],
) -> Graph:
    """The program that reads the copies `before` its step in place of casts, and writes those `after` it."""
    rewritten: dict[Eqn, Eqn] = {}
    dropped: dict[Var, Any] = {}
    for parameter, half in before.items():
        update = updates[parameter]
        args = (*update.args, [half])
        outs = (*update.outs, after[parameter])
        rewritten[update] = update.replace(args=args, outs=outs)
        dropped.update((eqn.out, half) for eqn in casts[parameter])
    eqns = []
    for eqn in graph.eqns:
        if not any(v in dropped for v in eqn.results):
            eqns.append(rewritten.get(eqn, eqn))
    n = graph.num_state
    graph = graph.replace(
        inputs=(*graph.inputs[:n], *before.values(), *graph.inputs[n:]),
        eqns=tuple(eqns),
        outputs=(*graph.outputs[:n], *after.values(), *graph.outputs[n:]),
        num_state=n + len(before),
        leaf_shapes=(*graph.leaf_shapes, *(v.shape for v in before)) if graph.leaf_shapes else (),
    )
    return check(rename(graph, dropped))
