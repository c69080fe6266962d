"""The rules of collectives that the user's step calls itself (tensor parallel, expert parallel).

These collectives stay where the user put them. In a program they name the mesh axis (see `user_collectives`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ... import ops
from ..axes import members
from ..graph import Eqn, Var
from ..source import where
from .interface import Memberwise
from .user_collectives import functional_name

# The collectives whose results are the same on all ranks of a group.
_ALIKE = ("all_reduce", "all_gather_into_tensor", "broadcast")


class UserStart(Memberwise):
    """Rules of a collective of the user's own step."""

    starts = True
    lane = "(step)"

    def axis(self, eqn: Eqn) -> str:
        return eqn.args[-1]

    def varies(self, eqn: Eqn, over: Mapping[Var, frozenset[str]]) -> frozenset[str]:
        """What every rank of a group gets the same of does not vary over its axis."""
        alike = functional_name(eqn.op).removesuffix("_coalesced") in _ALIKE
        return super().varies(eqn, over) - {*(members(self.axis(eqn)) if alike else ())}

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        how, ranks = eqn.args[1:-1], range(len(terms))
        match functional_name(eqn.op).removesuffix("_coalesced"):
            case "all_reduce":
                whole = _total(how[0], terms)
                return [whole for _ in ranks]
            case "reduce_scatter_tensor":
                return [part.clone() for part in _total(how[0], terms).chunk(len(ranks))]
            case "all_gather_into_tensor":
                return [torch.cat(list(terms)) for _ in ranks]
            case "broadcast":
                return [terms[how[0]] for _ in ranks]
            case "all_to_all_single":
                sent = [term.split(how[1]) for term in terms]
                return [torch.cat([sent[r][rank] for r in ranks]) for rank in ranks]
            case kind:
                raise ValueError(
                    f"lockstep: the step's own {kind} goes from one rank to another, and here all ranks run one "
                    f"program.\n  at {where(eqn.source)}\n"
                    f"Run the step on real ranks, lowered.compile() on each, or send with a collective "
                    f"(all_to_all, broadcast)."
                )


class UserWait(Memberwise):
    """Rules of the wait for a collective of the user's own step."""

    waits = True


def _total(op: str, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return ops.reduce(terms, {"avg": "mean"}.get(op, op), terms[0].dtype)


USER_START = UserStart()
USER_WAIT = UserWait()
