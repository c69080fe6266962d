"""An update also writes the half-precision copy of its parameter that the next step reads.

    h = cast(p, bf16)
    y = mm(x, h)                                      y = mm(x, h)
    ...                                          -->  ...
    p1, m1, v1 = fused_adamw([p], [g], [m], [v],      p1, m1, v1, h1 = fused_adamw([p], [g], [m], [v],
                             [n], ...)                                             [n], [h], ...)

A step under autocast begins with casts of its parameters. The update has just had them in registers, so it writes the
copy too: 2 bytes for each parameter, in place of a cast that reads 4 and writes 2. The bits are those of the cast. The
kernel of `ops/fused_adamw.py` does so, and kernels of Inductor for an elementwise update, on CPUs too.

`with_half_weights` rewrites the program, and `HalfWeights` keeps the copies from step to step. They are leaves of the
state of the program, which the user does not see. A copy is used if the parameter is the very tensor that the step
before returned, and PyTorch's version counter says that nothing has changed it since. Otherwise the parameter is cast
before the step. So any other state may be passed, in any order. The counter does not see what is written through
`.data`, by a collective of torch.distributed, or by a kernel that PyTorch does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...calling.inputs import Inputs
from ...calling.snapshot import Snapshot
from ...ir.graph import Eqn, Graph, Var, producers
from ...ir.liveness import liveness
from ...ir.op_facts import CAST, op_facts
from ...ir.rewriter import Rewriter
from ...ir.verifier import check
from ...ops import HALF


@dataclass
class HalfWeights:
    """The half-precision copies of parameters that a program has as hidden leaves of its state.

    Attributes:
        num_state: the number of leaves that the user sees, after which the copies come.
        positions: those of the parameters among these leaves.
        copies: the copy of each parameter.
    """

    num_state: int
    positions: Sequence[int]
    copies: Sequence[torch.Tensor]
    _parameters: list[Snapshot] = field(default_factory=list)  # as the last step left them

    def inserted(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs of the program, given those that the user sees."""
        return [*tensors[: self.num_state], *self.copies, *tensors[self.num_state :]]

    def refresh(self, inputs: Inputs) -> None:
        """Cast the parameters that are not as the last step has left them. A step on these inputs follows."""
        parameters = self._parameters
        self._parameters = []  # until this step has ended well
        for k, (position, copy) in enumerate(zip(self.positions, self.copies)):
            if not parameters or not parameters[k].is_unchanged(inputs, position):
                copy.copy_(inputs.tensors[position])

    def note(self, inputs: Inputs) -> None:
        """Note that a step on these inputs has ended well, and has written the copies."""
        self._parameters = [Snapshot.of(inputs, position) for position in self.positions]

    def forget(self) -> None:
        """Let the next step cast all parameters."""
        self._parameters = []


def with_half_weights(
    graph: Graph, tensors: Sequence[torch.Tensor], fuses: bool = False
) -> tuple[Graph, HalfWeights | None]:
    """The program whose updates write half-precision copies, and these copies; None if there is nothing to write.

    `graph` is a program after `half_gradients`, and `tensors` are its inputs. With `fuses` elementwise updates will be
    kernels of Inductor, which write copies too.
    """
    casts = _casts(graph)
    makers = _makers(graph, casts, fuses)
    positions = [i for i, v in enumerate(graph.inputs) if v in makers]
    if not positions or graph.micro > 1:
        return graph, None

    new = Rewriter(graph)
    old_copies: dict[Var, Var] = {}
    new_copies: dict[Var, Var] = {}
    copies = []
    for i in positions:
        parameter = graph.inputs[i]
        dtype = casts[parameter][0].out.dtype
        old_copies[parameter] = _copy_of(parameter, dtype, new)
        new_copies[parameter] = _copy_of(graph.outputs[i], dtype, new)
        # As a cast, a copy keeps the strides of its parameter.
        copies.append(torch.empty_like(tensors[i], dtype=dtype))
        _write_copy(new, makers[parameter], old_copies[parameter], new_copies[parameter])
        for cast in casts[parameter]:
            new.drop(cast)
            new.alias(cast.out, old_copies[parameter])
    n = graph.num_state
    leaf_shapes = graph.leaf_shapes
    if leaf_shapes:
        leaf_shapes = (*leaf_shapes, *(v.shape for v in old_copies))
    graph = new.applied()
    graph = graph.replace(
        inputs=(*graph.inputs[:n], *old_copies.values(), *graph.inputs[n:]),
        outputs=(*graph.outputs[:n], *new_copies.values(), *graph.outputs[n:]),
        num_state=n + len(old_copies),
        leaf_shapes=leaf_shapes,
    )
    return check(graph), HalfWeights(graph.num_state - len(positions), positions, copies)


def _casts(graph: Graph) -> dict[Var, list[Eqn]]:
    """The casts of each leaf of the state to half precision, if all of them are to one dtype."""
    state = set(graph.inputs[: graph.num_state])
    casts: dict[Var, list[Eqn]] = {}
    for eqn in graph.eqns:
        if eqn.op is not CAST or eqn.ins[0] not in state:
            continue
        if eqn.out.dtype in HALF and eqn.kwargs.keys() == {"dtype"}:
            casts.setdefault(eqn.ins[0], []).append(eqn)
    of_one_dtype = {}
    for v, eqns in casts.items():
        if len({eqn.out.dtype for eqn in eqns}) == 1:
            of_one_dtype[v] = eqns
    return of_one_dtype


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
        if maker is None or parameter not in casts:
            continue
        is_ours = _is_ours(maker) and maker.args[0][0] is parameter and maker.outs[0] is new
        if not is_ours and not (fuses and _is_elementwise_update(maker)):
            continue
        # The update writes the new copy over the old one, which is read in place of the casts.
        last_read = max(lifetimes.last[cast.out] for cast in casts[parameter])
        if last_read < position[maker]:
            makers[parameter] = maker
    return makers


def _is_ours(eqn: Eqn) -> bool:
    """Whether the kernel of `ops/fused_adamw.py` computes an update."""
    return op_facts(eqn.op).name == "ztrans::fused_adamw"


def _is_elementwise_update(eqn: Eqn) -> bool:
    return eqn.region == "update" and op_facts(eqn.op).pointwise


def _copy_of(v: Var, dtype: torch.dtype, new: Rewriter) -> Var:
    suffix = "bf16" if dtype == torch.bfloat16 else "fp16"
    return Var(new.fresh_name(f"{v.name}.{suffix}"), dtype, v.shape, v.layout)


def _write_copy(new: Rewriter, maker: Eqn, half: Var, new_half: Var) -> None:
    """Let the update of a parameter write its copy too. Inductor computes a cast in the kernel of its argument."""
    if _is_ours(maker):
        outs = (*maker.outs, new_half)
        new.replace(maker, maker.replace(args=(*maker.args, [half]), outs=outs))
    else:
        kwargs = {"dtype": half.dtype}
        cast = Eqn(CAST, (maker.out,), (new_half,), kwargs, maker.region, maker.source)
        new.insert_after(maker, cast)
