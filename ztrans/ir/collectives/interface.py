"""Rules: the answers to everything that the rest of ztrans asks about an operation.

`Rules` has the answers for an ordinary operation of PyTorch. Each primitive holds rules of its own, a subclass that
overrides the answers which differ; they stand in the file of that collective. So whoever walks over a program asks
`rules(eqn)` for what it needs to know, and does not test which primitive it has before it. A new collective is one
file with its rules, and a row in the tables of the packages that emit code for it and know its cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch

from ..graph import Eqn, Var
from ..operations import compute, is_view


class Rules:
    """The rules of an ordinary operation.

    Attributes:
        starts: its results come later, and must be waited for.
        waits: its argument is such a result.
        reads_futures: its argument has the type of a future, which the results of the user's collectives do not.
        packs: a GPU may still be copying its arguments into a send buffer while what follows runs.
        remote: other ranks take part, so it may block, and fails where they fail.
        moves: what arrives is what was sent, element by element, so a cast may as well come before as after.
        lane: the queue among those of its mesh axis in which its messages travel.
        strides: how its results are laid out in memory; None where only running it tells.
    """

    starts: ClassVar[bool] = False
    waits: ClassVar[bool] = False
    reads_futures: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    remote: ClassVar[bool] = False
    moves: ClassVar[bool] = False
    lane: ClassVar[str | None] = None
    strides: ClassVar[Literal["contiguous", "argument"] | None] = None

    def problem(self, eqn: Eqn, axes: Mapping[str, int]) -> str | None:
        """What is wrong with the types of an equation, for the verifier; None if nothing is."""
        if any(out.future for out in eqn.results):
            return "an operation that is no collective has a future among its results"
        return None

    def axis(self, eqn: Eqn) -> str | None:
        """The mesh axis whose ranks compute the equation together; None where each rank does so alone."""
        return None

    def meaning(self, eqns: Sequence[Eqn], values: Sequence[Mapping[Var, Any]]) -> list[Sequence[Any]]:
        """The results of an equation on every rank of one group along `axis`, for the interpreter.

        Args:
            eqns: the equation as it is on each rank (see `layout.localize`).
            values: the values of the program on each rank.

        Returns: by rank, one value for each of the equation's results.
        """
        return [compute(eqn, env) for eqn, env in zip(eqns, values)]

    def varies(self, eqn: Eqn, over: Mapping[Var, frozenset[str]]) -> frozenset[str]:
        """The axes over which the results differ from rank to rank, given those of its arguments."""
        return frozenset[str]().union(*(over.get(v, ()) for v in eqn.ins))

    def shares(self, eqn: Eqn) -> bool:
        """Whether the results share the storage of the first argument."""
        return is_view(eqn)

    def shares_buffer(self, eqn: Eqn, index: int) -> bool:
        """Whether the value of a member shares the storage of the buffer in which the member was received."""
        return False

    def sends_own(self, eqn: Eqn, index: int, sizes: Mapping[str, int]) -> bool:
        """Whether a collective sends a member from its own storage, which must then live until the wait."""
        return False

    def wire_bytes(self, eqn: Eqn, sizes: Mapping[str, int]) -> int:
        """Bytes that one rank receives, padding included. A gather or a scatter over n ranks moves (n-1)/n of the
        whole value, an all_reduce twice that."""
        return 0

    def sent_bytes(self, eqn: Eqn, sizes: Mapping[str, int]) -> int:
        """Bytes of the buffers into which a collective packs, casts or pads what it sends."""
        return 0

    def received_bytes(self, eqn: Eqn, index: int, sizes: Mapping[str, int]) -> int:
        """Bytes of the buffer in which a member is received: for a gather, the value's."""
        return 0

    def unpacked_bytes(self, eqn: Eqn, sizes: Mapping[str, int]) -> int:
        """Bytes of the buffer in which members that cross together are received.

        Their values are copied out of it: on a GPU when they have arrived, on a CPU when the first is waited for.
        """
        return 0


class Memberwise(Rules):
    """Rules of an operation that makes result k of argument k alone; subclasses say how, by `member`."""

    def meaning(self, eqns: Sequence[Eqn], values: Sequence[Mapping[Var, Any]]) -> list[Sequence[Any]]:
        eqn = eqns[0]
        members = (self.sent(eqn, [env[eqn.ins[k]] for env in values]) for k in range(len(eqn.outs)))
        results = (self.member(eqn, k, terms) for k, terms in enumerate(members))
        return list(zip(*results))

    def sent(self, eqn: Eqn, terms: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The values of one argument on every rank of a group, in the dtype in which they cross the wire."""
        return terms

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Result `index` on every rank of a group, from the terms that each of them sent; by default the same."""
        return terms
