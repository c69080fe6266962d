"""Decide which equations write their result over an argument that nothing reads afterwards.

The caller of a step donates the storage of the state, so an elementwise update of the state runs in place. An operation
on a temporary also runs in place if the argument fills its storage, the equation is the last to read it, and no
collective in flight reads it.

A rank that fails between two updates in place has a half-updated state. `writes_last` reorders a program so that the
equations that write the state run after everything that can fail because of another rank: every collective, forward and
backward. A step that fails before the first write leaves the old state unchanged.

    m1 = mul(m, 0.9)                 n = norm(g)
    n = norm(g)               -->    s = wait(all_reduce(n))
    s = wait(all_reduce(n))          m1 = mul(m, 0.9)
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .cached_analysis import cached_on_graph
from .collectives import rules
from .graph import Eqn, Graph, Var
from .liveness import liveness, read_after_step
from .marks import gradient_marks
from .op_facts import CAST, is_random, is_written, op_facts, overloads
from .operations import direct
from .pairing import pair
from .user_collectives import is_user_wait
from .varying import varying

# Arguments that are overwritten, each with the result that replaces it.
Overwritten = list[tuple[Var, Var | None]]

# The most bytes of a constant that is made once and used by every step.
_MOST_CONSTANT_BYTES = 16 << 10
_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default


def first_write(graph: Graph) -> int:
    """The index of the first equation that may write over the state; 0 unless the program writes its state last.

    The gathers for the next step read the new state, so they start after it and do not count.
    """
    if graph.hints.update != "last":
        return 0
    carried = set(graph.carried_outputs)
    last_to_fail = -1
    for i, e in enumerate(graph.eqns):
        if can_fail(e) and carried.isdisjoint(e.results):
            last_to_fail = i
    return last_to_fail + 1


def can_fail(e: Eqn) -> bool:
    """Whether an equation is a collective, which may fail because of another rank, or runs in forward or backward."""
    return e.region != "update" or rules(e).remote


def is_constant(e: Eqn) -> bool:
    """Whether an equation makes a small constant.

    It is made once and used by every step, so nothing may write over it.
    """
    if e.ins or len(e.results) != 1 or not isinstance(e.op, torch._ops.OpOverload):
        return False
    is_small = e.out.nbytes <= _MOST_CONSTANT_BYTES
    return is_small and not e.out.layout and not is_random(e)


@dataclass(frozen=True)
class Donation:
    """Which equations write over their arguments, and how long each storage is needed as a consequence.

    Attributes:
        in_place_ops: the operation of each equation that writes in place.
        last: as in `Liveness`; a storage is also needed by a result that took it over.
        owner: for each value, the first value in its storage.
        read_until: for each storage, the index of the last equation during which a collective still reads it.
    """

    in_place_ops: dict[Eqn, Any]
    last: dict[Var, int]
    owner: dict[Var, Var]
    read_until: dict[Var, int]


@cached_on_graph
def donation(graph: Graph, kept_out_of_place: frozenset[Eqn] = frozenset()) -> Donation:
    """Decide for every equation whether it writes over its arguments."""
    storages = _StorageOwners(graph)
    released = _released(graph)
    in_place_ops: dict[Eqn, Any] = {}
    for index, eqn in enumerate(graph.eqns):
        if eqn not in kept_out_of_place:
            # Take the first safe choice: PyTorch's own twin comes before ours.
            for op, overwritten in _choices(eqn):
                if _fits(eqn, overwritten) and storages.may_write(index, eqn, overwritten):
                    in_place_ops[eqn] = op
                    storages.take_over(overwritten)
                    break
        storages.advance_past(eqn, released.get(eqn))
    owners = {v: storages.owner(v) for v in storages.root}
    return Donation(in_place_ops, storages.last, owners, storages.read_until)


class Peaks(NamedTuple):
    """The most bytes that are live at once on one rank, in the order of a program.

    Attributes:
        everything: of all values.
        of_samples: of values that depend on the batch, in forward and backward, where each gradient is reduced or
            consumed as soon as it is computed. No sharding of the state makes it smaller.
    """

    everything: int
    of_samples: int


def peaks(graph: Graph) -> Peaks:
    """The peaks of a program before it is sharded."""
    storages = donation(graph)
    from_batch = varying(graph, ("batch",))
    first = dict.fromkeys(graph.inputs, 0)
    marks = gradient_marks(graph)
    gradients = {e.args[0] for e in marks}
    last_before_update: dict[Var, int] = {}
    for i, e in enumerate(graph.eqns):
        first.update(dict.fromkeys(e.results, i))
        # Autograd returns all gradients at the end of backward, and casts some of them there.
        if e.region == "update" or e in marks:
            continue
        used = e.results if e.op is CAST and e.out in gradients else (*e.ins, *e.results)
        last_before_update.update((storages.owner[v], i) for v in used)

    everything, of_samples = [0] * (len(graph.eqns) + 2), [0] * (len(graph.eqns) + 2)
    for v in dict.fromkeys(storages.owner.values()):
        everything[first[v]] += v.nbytes
        everything[storages.last.get(v, first[v]) + 1] -= v.nbytes
        if v in from_batch and v in last_before_update:
            of_samples[first[v]] += v.nbytes
            of_samples[last_before_update[v] + 1] -= v.nbytes
    return Peaks(max(itertools.accumulate(everything)), max(itertools.accumulate(of_samples)))


class _StorageOwners:
    """The owner of each storage and the last equation that needs it, while results take over storages of arguments.

    Attributes:
        root: as in `Liveness`, before results take over storages.
        last: as in `Liveness`, updated as results take over storages.
        inputs: the inputs of the program.
        state: the leaves of the state.
        writes_from: the index of the first equation that may write over the state.
        writable: the values that fill a storage that the program may write.
        read_after: the storages that a copy still reads after the step. The caller must not own them, because it may
            write over what it owns.
        earlier_owner: for each result that took over a storage, the value that owned it before.
        read_until: for each storage, the index of the last equation during which a collective still reads it.
    """

    def __init__(self, graph: Graph) -> None:
        lifetimes = liveness(graph)
        self.root = lifetimes.root
        self.last = dict(lifetimes.last)
        self.inputs = set(graph.inputs)
        self.state = set(graph.state)
        self.read_after = {lifetimes.root[v] for v in read_after_step(graph)}
        self.writes_from = first_write(graph)
        self.writable = self.state | {v for v, _ in graph.donated}
        self.earlier_owner: dict[Var, Var] = {}
        self.read_until: dict[Var, int] = {}

    def owner(self, v: Var) -> Var:
        """The first value in the storage of `v`."""
        v = self.root[v]
        while v in self.earlier_owner:
            v = self.earlier_owner[v]
        return v

    def may_write(self, index: int, e: Eqn, overwritten: Overwritten) -> bool:
        """Whether each overwritten argument fills a storage of its own that nothing needs afterwards."""
        owners = [self.owner(v) for v, _ in overwritten]
        # Two results cannot go to one storage.
        if len(set(owners)) < len(owners):
            return False
        # A kernel may read an element of another argument after it has written to the same memory.
        if any(self.owner(v) in owners for v in _unwritten(e, overwritten)):
            return False
        # The caller may write over an input after the step, while a copy of the step still reads the result.
        for owner, (_, result) in zip(owners, overwritten):
            if owner in self.inputs and result in self.read_after:
                return False
        if any(v not in self.writable for v, _ in overwritten):
            return False
        return all(self._is_free(index, storage) for storage in owners)

    def _is_free(self, index: int, storage: Var) -> bool:
        """Whether equation `index` is the last that needs a storage, and no collective still reads it."""
        if self.last[storage] != index or self.read_until.get(storage, -1) >= index:
            return False
        # The state must still be the old one if another rank fails before `writes_from`.
        return index >= self.writes_from or storage not in self.state

    def take_over(self, overwritten: Overwritten) -> None:
        """Give the storage of each overwritten argument to its result."""
        for v, result in overwritten:
            if result is not None:
                owner = self.owner(v)
                self.last[owner] = self.last[result]
                self.earlier_owner[result] = owner

    def advance_past(self, e: Eqn, released: int | None) -> None:
        """Go on to the next equation. If `e` is a collective, it reads its arguments until equation `released`."""
        if released is not None:
            for owner in map(self.owner, e.ins):
                self.read_until[owner] = max(released, self.read_until.get(owner, -1))
        if not rules(e).shares_storage(e):
            if not is_constant(e):
                self.writable.update(out for out in e.results if not out.future)
        elif is_user_wait(e) and e.ins[0] in self.writable:
            # This wait returns its argument itself, which fills its storage.
            self.writable.update(e.results)


def _released(graph: Graph) -> dict[Eqn, int]:
    """For the start of each collective, the index of the last equation during which it reads its members.

    A GPU packs members while the following equations run, until the next start or the next first wait at the latest.
    The user's own collectives read their members until their wait. So do collectives that send a member unpacked, which
    `liveness` takes into account.
    """
    collectives = pair(graph, include_user=True, include_copies=True).starts.values()
    packed = [c for c in collectives if rules(c.start).packs]
    starts_and_waits = {c.index for c in packed} | {c.first_wait for c in packed}
    events = sorted(starts_and_waits)

    released = {c.start: c.first_wait for c in collectives}
    for c in packed:
        # Every start has a wait after it, so there is a next event.
        released[c.start] = events[bisect_right(events, c.index)]
    return released


def _fits(e: Eqn, overwritten: Overwritten) -> bool:
    """Whether every overwritten argument has the type and the device of its result.

    A scalar does not fit if there are other arguments: it may be on the CPU, and the result on the GPU.
    """
    if not overwritten:
        return False
    for v, out in overwritten:
        if out is None or not v.is_like(out):
            return False
    is_scalar = len(overwritten) == 1 and not overwritten[0][0].shape
    return not (is_scalar and _unwritten(e, overwritten))


def _unwritten(e: Eqn, overwritten: Overwritten) -> list[Var]:
    """The arguments of an equation that are not overwritten."""
    targets = {target for target, _ in overwritten}
    return [v for v in e.ins if v not in targets]


def _choices(e: Eqn) -> Iterator[tuple[Any, Overwritten]]:
    """The ways to write over arguments of an equation: an operation, and the arguments that it overwrites."""
    twin = in_place(e.op)
    if e.kwargs.get("over") is not None and rules(e).copies:
        yield e.op, [(e.kwargs["over"], e.out)]

    # The running mean and variance are arguments 3 and 4, and so are their new values among the results.
    if e.op is _BATCH_NORM:
        yield batch_norm_over, list(zip(e.args[3:5], e.outs[3:5]))
    elif twin is not None and not (op_facts(e.op).adds and e.args[0] in e.ins[1:]):
        yield twin, _overwritten(e, twin)

    # A twin writes over its first argument only. Arithmetic may also write over the second one.
    if _out_form(e.op) is not None and (twin is None or op_facts(e.op).arithmetic):
        for k, v in enumerate(e.args):
            if isinstance(v, Var) and (k or twin is None):
                yield onto(e.op, k), [(v, e.outs[0])]


@functools.cache
def in_place(op: Any) -> Any:
    """The in-place twin of an elementwise operation, a copy, a sum with a product, or a fused optimizer, or None."""
    facts = op_facts(op)
    if not (facts.pointwise or facts.adds or facts.replaces or facts.fused_update):
        return None
    name = facts.name.split("::")[-1]
    packet = getattr(getattr(torch.ops, op.namespace), f"{name}_", None)
    return getattr(packet, op._schema.overload_name or "default", None)


def updated(e: Eqn, twin: Any) -> Overwritten:
    """The arguments that the in-place twin declares to write, each with its result."""
    flat: list[Any] = []
    for declared, x in zip(twin._schema.arguments, e.args):
        if is_written(declared):
            flat += x if isinstance(x, (list, tuple)) else [x]
    if len(flat) != len(e.outs) or not all(isinstance(v, Var) for v in flat):
        return []
    return list(zip(flat, e.outs))


def _overwritten(e: Eqn, twin: Any) -> Overwritten:
    """The arguments that the in-place twin overwrites."""
    pairs = updated(e, twin)
    # PyTorch's fused optimizers declare that they write gradients, but they do so only to unscale them.
    declares_gradients = op_facts(e.op).fused_update and is_written(twin._schema.arguments[1])
    if declares_gradients and e.kwargs.get("grad_scale") is None:
        del pairs[1:2]
    return pairs


def batch_norm_over(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """A batch norm that writes the new running mean and variance over the old ones, its arguments 3 and 4."""
    return *torch.ops.aten._native_batch_norm_legit.default(*args, **kwargs), args[3], args[4]


@functools.cache
def _out_form(op: Any) -> Any:
    """The `out=` form of an operation that may write over an argument while it reads it, or None."""
    if not (op_facts(op).pointwise or op_facts(op).by_row):
        return None
    signature = [(a.name, str(a.type)) for a in op._schema.arguments]
    for form in overloads(op.overloadpacket):
        arguments = form._schema.arguments
        # Generated forms allocate a result and copy it, so they save nothing.
        if torch.Tag.generated in form.tags or not arguments or not arguments[-1].is_out:
            continue
        if [(a.name, str(a.type)) for a in arguments[:-1]] == signature:
            return form
    return None


def overwritten_place(op: Any) -> int:
    """The index of the argument that an operation in `in_place_ops` writes over: 0, or the `place` of `onto`.

    >>> overwritten_place(torch.ops.aten.add_.Tensor)
    0
    >>> overwritten_place(onto(torch.ops.aten.add.Tensor, 1))
    1
    """
    return getattr(op, "place", 0)


@functools.cache
def onto(op: Any, place: int) -> Callable:
    """`op` as a function that writes its result over argument number `place`.

    It does so only if the result would have the strides of that argument, because later code may rely on them: if all
    arguments are contiguous, or, in plain arithmetic, if both have the same strides or the other one is a scalar.

    >>> x = torch.ones(2, 2)
    >>> onto(torch.ops.aten._softmax.default, 0)(x, -1, False) is x, x[0, 0].item()
    (True, 0.5)
    """
    form = _out_form(op)
    if form is None:
        raise ValueError(f"{op} has no form that writes where it reads.")
    # A recurrent layer calls these functions hundreds of times a step on small tensors: each microsecond here counts.
    write = direct(form)
    allocate = direct(op)
    *arguments, out = form._schema.arguments
    tensors = [i for i, a in enumerate(arguments) if not a.kwarg_only and str(a.type) == "Tensor"]

    def overwrite_term(x: torch.Tensor, y: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        target, operand = (y, x) if place else (x, y)
        are_contiguous = target.is_contiguous() and operand.is_contiguous()
        if are_contiguous or target.stride() == operand.stride() or not operand.dim():
            return write(x, y, **kwargs, out=target)
        return allocate(x, y, **kwargs)

    def overwrite_argument(*args: Any, **kwargs: Any) -> torch.Tensor:
        for i in tensors:
            if not args[i].is_contiguous():
                return allocate(*args, **kwargs)
        return write(*args, **kwargs, **{out.name: args[place]})

    overwrite: Any = overwrite_term if op_facts(op).arithmetic else overwrite_argument
    overwrite.__name__ = f"{op_facts(op).name}_over"
    overwrite.place = place
    return overwrite
