"""Let updates on a GPU read and round state in bf16 themselves, without copies of it in fp32 (see `store`).

    p32 = cast(p, f32); m32 = cast(m, f32); v32 = cast(v, f32)
    p1, m1, v1 = _fused_adamw([p32], [g], [m32], [v32], ...)
    p2 = stochastic_round(p, p1, kp, ...); m2 = ...; v2 = ...
      -->   p2, m2, v2 = fused_adamw([p], [g], [m], [v], ..., [kp, km, kv], ...)

The kernel of `ops/fused_adamw.py` moves 12 bytes for each parameter, beside its gradient. It has the bits of PyTorch's
fused AdamW on a GPU, rounded by the operation. An update keeps its casts if it lacks one of the three roundings, as
with `store(where="params.*")`, if anything else reads a value in fp32, or for an option that the kernel lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch

from ...ir.graph import Eqn, Graph, Var, producers, users, variables
from ...ir.op_facts import CAST
from ...ir.rewriter import Rewriter
from ...ir.verifier import check
from .half_gradients import by_kernel, has_options_of_kernel

_ROUND = torch.ops.ztrans.stochastic_round.default


def stored_updates(graph: Graph, on_gpu: Set[Var]) -> Graph:
    """The program whose updates read and round state in bf16 that is `on_gpu`."""
    new = Rewriter(graph)
    makers = producers(graph.eqns)
    readers = users(graph)
    returned = set(variables(graph.outputs))
    has_changed = False
    for update in graph.eqns:
        if not has_options_of_kernel(update) or update.outs[1] in readers:
            continue
        wide = [update.args[0][0], update.args[2][0], update.args[3][0]]
        results = [update.outs[0], update.outs[2], update.outs[3]]
        casts = [_cast(v, makers, readers, on_gpu) for v in wide]
        roundings = [_rounding(v, readers, returned) for v in results]
        pairs = [(c, r) for c, r in zip(casts, roundings) if c is not None and r is not None]
        if len(pairs) < len(casts) or any(r.args[0] is not c.ins[0] for c, r in pairs):
            continue
        eqn = by_kernel(update)
        p, m, v = ([r.args[0]] for _, r in pairs)
        keys = [r.args[2] for _, r in pairs]
        _, first = pairs[0]
        args = (p, eqn.args[1], m, v, eqn.args[4], [], keys, *first.args[3:])
        new.replace(update, eqn.replace(args=args, outs=tuple(r.out for _, r in pairs)))
        for c, r in pairs:
            new.drop(c)
            new.drop(r)
        has_changed = True
    return check(new.applied()) if has_changed else graph


def _cast(
    v: Var | None, makers: Mapping[Var, Eqn], readers: Mapping[Var, Sequence[Eqn]], on_gpu: Set[Var]
) -> Eqn | None:
    """The cast of a value on the GPU that only an update reads."""
    cast = makers.get(v) if v is not None else None
    if cast is None or cast.op is not CAST or cast.ins[0] not in on_gpu:
        return None
    is_stored = cast.ins[0].dtype == torch.bfloat16
    return cast if is_stored and len(readers[cast.out]) == 1 else None


def _rounding(
    v: Var | None, readers: Mapping[Var, Sequence[Eqn]], returned: Set[Var]
) -> Eqn | None:
    """The rounding of a value that nothing else reads."""
    of_value = readers.get(v, ()) if v is not None else ()
    if len(of_value) != 1 or v in returned or of_value[0].op is not _ROUND:
        return None
    return of_value[0]
