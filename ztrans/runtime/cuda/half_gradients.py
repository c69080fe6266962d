"""half_gradients: on a GPU, an update reads its half-precision gradient itself.

    g0 = mm(a, b)                                     g0 = mm(a, b)
    g = cast(g0, f32)                          -->    p1, m1, v1 = fused_adamw([p], [g0], [m], [v], ...)
    p1, m1, v1 = _fused_adamw([p], [g], [m], [v], ...)

PyTorch's fused optimizers take gradients of the dtype of the parameters, so backward under autocast ends with casts.
The kernel of `ops/update.py` needs none of them: AdamW then moves 26 bytes for each parameter, not 34. No bit changes.
A gradient that anything else reads, such as a norm for clipping, keeps its cast. So does the gradient of an update with
options that the kernel does not have. Inductor fuses a cast with what computes its argument, without rounding that to
half precision, unless that is a matrix product; so for Inductor only casts of products are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

import torch

from ...ir.collectives import HALF
from ...ir.graph import Eqn, Graph, Var, variables
from ...ir.op_facts import CAST, is_matmul, op_facts, rearranges
from ...ir.verifier import check

# The operations of `ops/update.py`, and which lists of PyTorch's operation they take.
_UPDATES = {
    "_fused_adam": (torch.ops.ztrans.fused_adam.default, (0, 1, 2, 3, 5)),
    "_fused_adamw": (torch.ops.ztrans.fused_adamw.default, (0, 1, 2, 3, 5)),
    "_fused_sgd": (torch.ops.ztrans.fused_sgd.default, (0, 1, 2)),
}
_OFF = ("amsgrad", "maximize", "grad_scale", "found_inf")  # what the kernel does not do


def on_gpu(graph: Graph, inputs: Sequence[torch.Tensor]) -> set[Var]:
    """The inputs of a program that are contiguous on a GPU."""
    return {v for v, x in zip(graph.inputs, inputs) if x.is_cuda and x.is_contiguous()}


def half_gradients(graph: Graph, on_gpu: Set[Var], of_products: bool = False) -> Graph:
    """The program whose updates read half-precision gradients, if the parameter and its moments are `on_gpu`.

    With `of_products` only those gradients that are matrix products. A program without such an update is returned as
    it is.
    """
    known = [eqn for eqn in graph.eqns if _is_known(eqn, on_gpu)]
    if not known or _moves(graph):
        return graph
    readers = _readers(graph)
    casts = _casts(graph, readers, of_products)
    updates = {
        eqn: _reading_half(eqn, casts)
        for eqn in known
        if eqn.args[1][0] in casts and not readers[eqn.outs[1]]
    }
    if not updates:
        return graph
    unread = {casts[eqn.args[1][0]] for eqn in updates}
    eqns = (updates.get(eqn, eqn) for eqn in graph.eqns if eqn not in unread)
    return check(graph.replace(eqns=tuple(eqns)))


def _readers(graph: Graph) -> Counter[Var | None]:
    """How many equations read each value; the outputs count as one more for each of their values."""
    readers: Counter[Var | None] = Counter()
    for eqn in graph.eqns:
        readers.update(set(eqn.ins))
    readers.update(variables(graph.outputs))
    return readers


def _casts(graph: Graph, readers: Counter[Var | None], of_products: bool) -> dict[Var, Eqn]:
    """The casts of half precision to fp32 that one equation reads, by their results."""
    products = _products(graph)
    casts = {}
    for eqn in graph.eqns:
        if _widens(eqn) and readers[eqn.out] == 1 and (eqn.ins[0] in products or not of_products):
            casts[eqn.out] = eqn
    return casts


def _widens(eqn: Eqn) -> bool:
    """Whether an equation casts half precision to fp32."""
    return eqn.op is CAST and eqn.ins[0].dtype in HALF and eqn.out.dtype == torch.float32


def _products(graph: Graph) -> set[Var]:
    """The results of matrix products, and their views."""
    products: set[Var] = set()
    for eqn in graph.eqns:
        is_shown = bool(eqn.ins) and eqn.ins[0] in products and rearranges(eqn)
        if is_matmul(eqn) or is_shown:
            products.update(eqn.results)
    return products


def _moves(graph: Graph) -> bool:
    """Whether casts move tensors between devices, so that a gradient may be elsewhere than its parameter."""
    casts = [eqn for eqn in graph.eqns if eqn.op is CAST and eqn.out.shape]
    devices = {torch.device(eqn.kwargs["device"]).type for eqn in casts if "device" in eqn.kwargs}
    return len(devices) > 1


def _is_known(eqn: Eqn, on_gpu: Set[Var]) -> bool:
    """Whether the kernel can compute an update, whose parameter and moments are inputs on a GPU."""
    name = op_facts(eqn.op).name
    if name not in _UPDATES or any(eqn.kwargs.get(option) for option in _OFF):
        return False
    overwritten = [*variables(eqn.args[0]), *variables(eqn.args[2:4])]
    is_fp32 = all(v.dtype == torch.float32 for v in overwritten)
    return is_fp32 and isinstance(eqn.kwargs["lr"], Var) and on_gpu >= set(overwritten)


def _reading_half(eqn: Eqn, casts: Mapping[Var, Eqn]) -> Eqn:
    """The update that reads what its gradient was cast from."""
    op, lists = _UPDATES[op_facts(eqn.op).name]
    args = [eqn.args[k] for k in lists]
    args[1] = list(casts[eqn.args[1][0]].ins)
    taken = {argument.name for argument in op._schema.arguments}
    kwargs = {name: x for name, x in eqn.kwargs.items() if name in taken}
    return eqn.replace(op=op, args=tuple(args), outs=(eqn.outs[0], *eqn.outs[2:]), kwargs=kwargs)
