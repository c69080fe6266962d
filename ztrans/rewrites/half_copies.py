"""Keep copies of leaves in half precision on the host, for a program that casts the leaves before it computes.

    def step(w: f32<host>[4], x):                      def step(w: f32<host>[4], x, w.half: bf16<host>[4]):
      v = wait(to_device(w)); h = cast(v, bf16)          h = wait(to_device(w.half))
      ...forward, and the same in backward...            ...forward, and the same in backward...
      w1 = update(wait(to_device(w)))               -->  w1 = update(wait(to_device(w)))
      w1.host = wait(to_host(w1, over=w))                w1.host = wait(to_host(w1, over=w)); h1 = cast(w1, bf16)
                                                         h1.host = wait(to_host(h1, over=w.half))
      return w1.host, loss                               return w1.host, loss, h1.host

Forward and backward copy half of the bytes, and the update copies 2 more for each parameter to the host. So there are
copies where forward and backward run several times for each update, or where a leaf does not change. Elsewhere the way
back costs what the way in saves: of Llama-3-8B on one H100 with 1 to 4 sequences, clipped or not, no step got 0.5%
faster.

A copy follows from its leaf, so it is no part of the state: the program takes it as its last arguments and returns it
after its results. `HalfWeights` passes it from step to step, and casts the leaf again if somebody has changed it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..ir.collectives import rules
from ..ir.copies import copy_to, is_copy, wait_for_copy
from ..ir.graph import Eqn, Graph, Var, users, variables
from ..ir.op_facts import CAST
from ..ir.rewriter import Rewriter
from ..ops import HALF


def with_half_copies(graph: Graph) -> Graph:
    """The program that copies leaves from the host in half precision, wherever it casts all that it has copied.

    A leaf that the update also reads from the same copy still comes in whole. A program that changes no leaf, such as
    an evaluation, has no copies: the host would make them for each state.
    """
    if graph.new_state == graph.state:
        return graph
    new = Rewriter(graph)
    new_leaf = dict(graph.leaves)
    readers = users(graph)
    copies: dict[Var, Var] = {}
    for start, dtype in _casting(graph):
        leaf = start.ins[0]
        if graph.micro == 1 and new_leaf[leaf] is not leaf:
            continue
        if leaf not in copies:
            copies[leaf] = new.fresh(leaf, ".half", dtype=dtype)
        if copies[leaf].dtype != dtype:
            continue
        (wait,) = readers[start.out]
        future, value = (dataclasses.replace(v, dtype=dtype) for v in (start.out, wait.out))
        new.replace(start, start.replace(args=(copies[leaf],), outs=(future,)))
        new.replace(wait, wait.replace(args=(future,), outs=(value,)))
        new.alias(wait.out, value)
        for e in readers[wait.out]:
            if e.op is CAST:
                new.drop(e)
                new.alias(e.out, value)
    if not copies:
        return graph

    pairs = [(copy, _new_copy(new, new_leaf[leaf], leaf, copy)) for leaf, copy in copies.items()]
    old, returned = zip(*pairs)
    return new.applied().replace(
        inputs=(*graph.inputs, *old),
        outputs=(*graph.outputs, *returned),
        donated=(*graph.donated, *pairs),
        hidden=tuple(graph.state.index(leaf) for leaf in copies),
    )


def copies_of(graph: Graph, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The copies that a program takes without a step before it, from the leaves of the state of a rank."""
    return [leaves[i].to(v.dtype) for i, v in zip(graph.hidden, graph.hidden_inputs)]


def _new_copy(new: Rewriter, new_leaf: Var, leaf: Var, copy: Var) -> Var:
    """The copy of a new leaf, written over the old copy; the old copy itself of a leaf that does not change."""
    if new_leaf is leaf:
        return copy
    wait = new.makers[new_leaf]
    start = new.makers[wait.ins[0]]
    value = start.ins[0]
    half = new.fresh(value, ".half", dtype=copy.dtype)
    cast = Eqn(CAST, (value,), (half,), {"dtype": copy.dtype}).like(start)
    name = new.fresh_name(f"{half.name}.{copy.memory}")
    leaves = copy_to(copy.memory, half, name, (leaf.name,), over=copy).like(start)
    arrives = wait_for_copy(leaves.out).like(start)
    new.insert_before(start, cast)
    new.insert_after(wait, leaves, arrives)
    return arrives.out


def _casting(graph: Graph) -> list[tuple[Eqn, torch.dtype]]:
    """The copies of leaves to the device that all readers cast to one dtype of half precision, with this dtype."""
    readers = users(graph)
    leaves = set(graph.state)
    returned = set(variables(graph.outputs))
    found = []
    for start in graph.eqns:
        if not is_copy(start) or start.out.memory != "device" or start.ins[0] not in leaves:
            continue
        (wait,) = readers[start.out]
        dtypes = {_cast_to(e, wait.out) for e in readers.get(wait.out, ())}
        if len(dtypes) == 1 and wait.out not in returned:
            (dtype,) = dtypes
            if dtype in HALF and dtype.itemsize < wait.out.dtype.itemsize:
                found.append((start, dtype))
    return found


def _cast_to(e: Eqn, v: Var) -> torch.dtype | None:
    """The dtype to which an equation casts a value that it reads, alone or as it gathers it; None if it does not."""
    if e.op is CAST and e.kwargs.keys() == {"dtype"}:
        return e.out.dtype
    if rules(e).moves:
        # A bucket may gather a value twice, for forward and for backward.
        dtypes = {out.dtype for member, out in zip(e.ins, e.results) if member is v}
        return e.kwargs["dtype"] if dtypes == {e.kwargs["dtype"]} else None
    return None
