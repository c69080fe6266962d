"""Let updates also write the half-precision copies of parameters that the next step reads.

    h = cast(p, bf16)
    y = mm(x, h)                                      y = mm(x, h)
    ...                                          -->  ...
    p1, m1, v1 = fused_adamw([p], [g], [m], [v],      p1, m1, v1, h1 = fused_adamw([p], [g], [m], [v],
                             [n], ...)                                             [n], [h], ...)

A step under autocast begins with casts of its parameters. The update of the previous step had them in registers, so it
writes the copies too: 2 bytes for each parameter, where a cast reads 4 and writes 2. The copies have the bits of the
casts. The kernel of `ops/fused_adamw.py` does this, and so do Inductor's kernels for elementwise updates, on CPUs too.

`with_half_weights` rewrites the program, and `HalfWeights` keeps the copies from step to step. They are leaves of the
program's state that the user does not see, or, if they are on the host, its last arguments (see `half_copies`). A copy
is used if the parameter is the very tensor that the previous step returned, and PyTorch's version counter shows no
change since. Otherwise the parameter is cast before the step. So any other state may be passed, in any order. The
counter does not see writes through `.data`, by a collective of torch.distributed, or by a kernel that PyTorch does not
know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...calling.host_memory import EMPTY_IN, let_copies_end
from ...calling.inputs import Inputs
from ...calling.leaf_records import Snapshot
from ...ir.graph import Eqn, Graph, Var, producers
from ...ir.liveness import liveness
from ...ir.op_facts import CAST, op_facts
from ...ir.rewriter import Rewriter
from ...ir.verifier import check
from ...ops import HALF


@dataclass
class HalfWeights:
    """The half-precision copies of parameters that a program takes and returns, and the user does not see.

    Attributes:
        place: how many of the inputs, and of the outputs, come before the copies; None if these are the last.
        positions: the positions of the parameters among these leaves.
        copies: the copy of each parameter.
    """

    place: int | None
    positions: Sequence[int]
    copies: Sequence[torch.Tensor]
    _parameters: list[Snapshot] = field(default_factory=list)  # as the last step left them

    def inserted(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs of the program: the inputs that the user sees, and the copies."""
        place = len(tensors) if self.place is None else self.place
        return [*tensors[:place], *self.copies, *tensors[place:]]

    def remove_from(self, outputs: list[Any]) -> None:
        """Remove the copies from the outputs of the program."""
        place = len(outputs) - len(self.copies) if self.place is None else self.place
        del outputs[place : place + len(self.copies)]

    def refresh(self, inputs: Inputs) -> None:
        """Cast the parameters that have changed since the last step, before a step on these inputs."""
        parameters = self._parameters
        self._parameters = []  # until this step has succeeded
        changed = []
        for k, (position, copy) in enumerate(zip(self.positions, self.copies)):
            if not parameters or not parameters[k].is_unchanged(inputs, position):
                changed.append((inputs.tensors[position], copy))
        if self.place is None and changed:
            let_copies_end()
        for parameter, copy in changed:
            copy.copy_(parameter)

    def step_ended(self, inputs: Inputs) -> None:
        """Record that a step on these inputs has succeeded, and has written the copies."""
        self._parameters = [Snapshot.of(inputs, position) for position in self.positions]

    def forget(self) -> None:
        """Let the next step cast all parameters."""
        self._parameters = []


def half_copies(graph: Graph, tensors: Sequence[torch.Tensor]) -> HalfWeights:
    """The copies on the host that are the last arguments of a program; `tensors` are its inputs."""
    copies = []
    for position, v in zip(graph.hidden, graph.hidden_inputs):
        like = torch.empty_like(tensors[position], dtype=v.dtype, device="meta")
        copies.append(EMPTY_IN[v.memory](like))
    return HalfWeights(None, graph.hidden, copies)


def with_half_weights(
    graph: Graph, tensors: Sequence[torch.Tensor], fuses: bool = False
) -> tuple[Graph, HalfWeights | None]:
    """The program with updates that write half-precision copies, and these copies; None if there are none.

    `graph` is a program after `half_gradients`, and `tensors` are its inputs. With `fuses`, elementwise updates will be
    kernels of Inductor, which can write copies too.
    """
    casts = _casts(graph)
    makers = _makers(graph, casts, fuses)
    positions = [i for i, v in enumerate(graph.state) if v in makers]
    if not positions or graph.micro > 1:
        return graph, None

    new = Rewriter(graph)
    hidden_leaves = []
    copies = []
    for i in positions:
        parameter, new_parameter = graph.leaves[i]
        dtype = casts[parameter][0].out.dtype
        old_copy = _copy_of(parameter, dtype, new)
        new_copy = _copy_of(new_parameter, dtype, new)
        hidden_leaves.append((old_copy, new_copy))
        # Like a cast, a copy keeps the strides of its parameter.
        copies.append(torch.empty_like(tensors[i], dtype=dtype))
        _write_copy(new, makers[parameter], old_copy, new_copy)
        for cast in casts[parameter]:
            new.drop(cast)
            new.alias(cast.out, old_copy)
    with_copies = new.applied().with_leaves(hidden_leaves)
    return check(with_copies), HalfWeights(graph.num_state, positions, copies)


def _casts(graph: Graph) -> dict[Var, list[Eqn]]:
    """The casts of each leaf of the state to half precision, if all of them are to one dtype."""
    state = set(graph.state)
    casts: dict[Var, list[Eqn]] = {}
    for eqn in graph.eqns:
        if eqn.op is not CAST or eqn.ins[0] not in state:
            continue
        if eqn.out.dtype in HALF and eqn.kwargs.keys() == {"dtype"}:
            casts.setdefault(eqn.ins[0], []).append(eqn)
    one_dtype_casts = {}
    for v, eqns in casts.items():
        if len({eqn.out.dtype for eqn in eqns}) == 1:
            one_dtype_casts[v] = eqns
    return one_dtype_casts


def _makers(graph: Graph, casts: Mapping[Var, Sequence[Eqn]], fuses: bool) -> dict[Var, Eqn]:
    """The equation that updates each parameter with casts, if it can also write a copy.

    This requires that nothing reads the casts after the update.
    """
    lifetimes = liveness(graph)
    position = {eqn: index for index, eqn in enumerate(graph.eqns)}
    by_result = producers(graph.eqns)
    makers: dict[Var, Eqn] = {}
    for parameter, new in graph.leaves:
        maker = by_result.get(new)
        if maker is None or parameter not in casts:
            continue
        is_adamw = _is_our_adamw(maker) and maker.args[0][0] is parameter and maker.outs[0] is new
        if not is_adamw and not (fuses and _is_elementwise_update(maker)):
            continue
        # The update writes the new copy over the old one, which the step reads instead of casts.
        last_read = max(lifetimes.last[cast.out] for cast in casts[parameter])
        if last_read < position[maker]:
            makers[parameter] = maker
    return makers


def _is_our_adamw(eqn: Eqn) -> bool:
    """Whether the kernel of `ops/fused_adamw.py` computes an update."""
    return op_facts(eqn.op).name == "ztrans::fused_adamw"


def _is_elementwise_update(eqn: Eqn) -> bool:
    return eqn.region == "update" and op_facts(eqn.op).pointwise


def _copy_of(v: Var, dtype: torch.dtype, new: Rewriter) -> Var:
    suffix = "bf16" if dtype == torch.bfloat16 else "fp16"
    return Var(new.fresh_name(f"{v.name}.{suffix}"), dtype, v.shape, v.layout)


def _write_copy(new: Rewriter, maker: Eqn, half: Var, new_half: Var) -> None:
    """Let the update of a parameter write its copy too: by our kernel, or by a cast that Inductor fuses into it."""
    if _is_our_adamw(maker):
        outs = (*maker.outs, new_half)
        new.replace(maker, maker.replace(args=(*maker.args, [half]), outs=outs))
    else:
        cast = Eqn(CAST, (maker.out,), (new_half,), {"dtype": half.dtype})
        new.insert_after(maker, cast.like(maker))
