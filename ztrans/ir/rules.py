"""Rules: how an operation behaves in a program, that is, its meaning, its storage and its bytes.

`Rules` itself describes an ordinary operation of PyTorch; `op_facts` has the kind of that operation. Each primitive has
a subclass, in `marks`, `collectives`, `copies` or `user_collectives`, which overrides what differs. A pass asks
`collectives.rules(eqn)` instead of testing which primitive an equation has. Only the calls that send a collective are
elsewhere: "Where to add" in docs/architecture.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from .graph import Eqn, Var
from .op_facts import is_view
from .operations import compute
from .result_types import result_problem

Sizes = Mapping[str, int]  # of the mesh axes
Values = Mapping[Var, Any]  # the values of a program on one rank
Axes = frozenset[str]
INVARIANT: Axes = frozenset()


class Kind(NamedTuple):
    """A kind of messages: what they cost, whether a transform or the user's step sends them.

    Attributes:
        name: the name by which a link has its figures for this kind.
        crossings: how many times a rank receives a whole value.
        touched: the bytes of memory that are read and written for each byte that a rank receives. By default, a message
            reads what it sends and writes what it receives.
    """

    name: str
    crossings: int = 1
    touched: float = 2.0


# In a ring, a gather writes each received byte, and reads it to pass it on. A reduction reads the rank's own term and
# the received sum, and writes the new sum. An all_reduce is a reduction followed by a gather.
ALL_GATHER_KIND = Kind("all_gather")
REDUCE_SCATTER_KIND = Kind("reduce_scatter", touched=3.0)
ALL_REDUCE_KIND = Kind("all_reduce", crossings=2, touched=2.5)
ALL_TO_ALL_KIND = Kind("all_to_all")


class Rules:
    """The rules of an ordinary operation of PyTorch.

    Attributes:
        starts: it starts a collective or a copy, whose results must be waited for.
        waits: it waits for a result of a collective or a copy.
        reads_futures: its argument has the type of a future. The results of the user's own collectives do not.
        copies: it copies between two memories. No other operation reads a value that is not on the device.
        packs: it copies its arguments into a send buffer. A GPU may do so while the next equations run.
        moves: it moves elements without computing, so a cast may stand before or after it with the same result.
        over_all_micro_batches: its results belong to all micro-batches (see `marks`), and do not differ between them.
        named_argument: the position of an argument that it only names, and does not read.
        lane: the kind of its queue. Each mesh axis has one queue of each kind (see `collectives.lane`).
        kind: what its message costs.
        unpacking_per_byte: an estimate of `unpacking_traffic` for each byte that a rank receives, for a plan, which has
            yet to decide which members share a message.
    """

    starts: ClassVar[bool] = False
    waits: ClassVar[bool] = False
    reads_futures: ClassVar[bool] = False
    copies: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    moves: ClassVar[bool] = False
    over_all_micro_batches: ClassVar[bool] = False
    named_argument: ClassVar[int | None] = None
    lane: str | None = None
    kind: Kind = Kind("none")
    unpacking_per_byte: ClassVar[int] = 0

    @property
    def remote(self) -> bool:
        """Whether other ranks take part, so that it may block, and fails if they fail."""
        return (self.starts or self.waits) and not self.copies

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        """An error in the types of an equation, as text for the verifier, or None."""
        if any(out.future for out in eqn.results):
            return "an operation that is not a collective has a future among its results"
        return result_problem(eqn)

    def axis(self, eqn: Eqn) -> str | None:
        """The mesh axis whose ranks compute the equation together, or None if each rank computes it alone."""
        return None

    def meaning(self, eqns: Sequence[Eqn], values: Sequence[Values]) -> list[Sequence[Any]]:
        """Compute an equation on every rank of one group along `axis`, for the interpreter.

        Args:
            eqns: the equation as each rank runs it (see `layout.localize`).
            values: the values of the program on each rank.

        Returns: One value for each result of the equation, for each rank.
        """
        return [compute(eqn, env) for eqn, env in zip(eqns, values)]

    def varies(self, eqn: Eqn, axes_of: Mapping[Var, Axes]) -> Axes:
        """The axes over which the results differ from rank to rank; `axes_of` has the axes of the arguments."""
        axes = INVARIANT
        for v in eqn.ins:
            if v in axes_of:
                axes |= axes_of[v]
        return axes

    def shares_storage(self, eqn: Eqn) -> bool:
        """Whether the results share the storage of the first argument."""
        return is_view(eqn)

    def stays_in_buffer(self, eqn: Eqn, index: int) -> bool:
        """Whether the value of a member stays in its receive buffer."""
        return False

    def sends_without_copy(self, eqn: Eqn, index: int, sizes: Sizes) -> bool:
        """Whether a collective sends a member from its own storage, which must then live until the wait."""
        return False

    def is_exchanged(self, eqn: Eqn, ranks: int, gloo: bool) -> bool:
        """Whether every rank sends its part to every other rank. If not, the backend passes parts around a ring.

        Args:
            eqn: the equation.
            ranks: the number of ranks.
            gloo: whether gloo sends the messages, or else NCCL.
        """
        return False

    def halves(self, eqn: Eqn) -> tuple[Eqn, Eqn] | None:
        """The reduce_scatter and the all_gather that carry out an all_reduce, or None for a single message."""
        return None

    def wire_bytes(self, eqn: Eqn, sizes: Sizes) -> int:
        """The bytes that one rank receives, padding included.

        A gather or a scatter over n ranks moves (n-1)/n of the whole value, an all_reduce twice as much.
        """
        return 0

    def sent_bytes(self, eqn: Eqn, sizes: Sizes) -> int:
        """The bytes of the send buffers, into which a collective packs, casts or pads its members."""
        return 0

    def received_bytes(self, eqn: Eqn, index: int, sizes: Sizes) -> int:
        """The bytes of the receive buffer of a member; a gather receives into the whole value."""
        return 0

    def value_bytes(self, eqn: Eqn, index: int, sizes: Sizes) -> int:
        """The bytes of the value of a member after the wait: of its receive buffer, if the value stays there."""
        return 0

    def unpacked_bytes(self, eqn: Eqn, sizes: Sizes) -> int:
        """The bytes of the buffer that receives the members that are packed together, or sent as codes.

        They are copied out of it: on a GPU as soon as they arrive, on a CPU at the wait for the first of them.
        """
        return 0

    def unpacking_traffic(self, eqn: Eqn, sizes: Sizes) -> int:
        """The bytes that are read and written to turn the received bytes into values."""
        return 0

    def encoding(self, eqn: Eqn, sizes: Sizes) -> int:
        """The bytes that are read and written to encode members; 0 if they are not sent as codes."""
        return 0

    def decoding(self, eqn: Eqn, sizes: Sizes) -> int:
        """The bytes that are read and written to decode what arrives; 0 if no codes do."""
        return 0


class Memberwise(Rules):
    """Rules of an operation whose result k depends on argument k alone; `member` of a subclass computes it."""

    def meaning(self, eqns: Sequence[Eqn], values: Sequence[Values]) -> list[Sequence[Any]]:
        eqn = eqns[0]
        results = []
        for index in range(len(eqn.outs)):
            member = eqn.ins[index]
            terms = [self.as_sent(eqn, index, env[member], len(values)) for env in values]
            results.append(self.member(eqn, index, terms))
        return list(zip(*results))

    def as_sent(self, eqn: Eqn, index: int, term: torch.Tensor, ranks: int) -> torch.Tensor:
        """Argument `index` of one of so many ranks, as it arrives at the others."""
        return term

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Result `index` on every rank of a group, from the term of each rank; by default the term itself."""
        return terms


class Wait(Memberwise):
    """Rules of a wait. The start decides whether its value stays in the receive buffer (see `stays_in_buffer`)."""

    waits = True
    reads_futures = True

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        if len(eqn.ins) != 1 or len(eqn.outs) != 1:
            return "a wait is for one future and has one result"
        future, out = eqn.ins[0], eqn.outs[0]
        if out is None or out.future or not out.is_like(future):
            return f"wait changes the type of {future}"
        return None
