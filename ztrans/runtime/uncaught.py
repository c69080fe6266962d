"""Uncaught errors: if several ranks end with the same error, one of them prints it, and the others name that rank."""

from __future__ import annotations

import hashlib
import sys
import traceback
from types import TracebackType

import torch.distributed as dist

from .meeting import in_time
from .process_groups import LostRank


def print_once(store: dist.Store, rank: int) -> None:
    """From now on, this process prints an uncaught error only if no other rank with this store has printed the same."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        first = [str(rank)]
        key = f"error/{_digest(kind, error, where, rank)}"
        in_time(lambda: first.append(store.compare_set(key, "", str(rank)).decode()))
        if first[-1] == str(rank):
            before(kind, error, where)
        else:
            print(
                f"[rank{rank}]: {kind.__name__}, as on rank {first[-1]}, which prints it.",
                file=sys.stderr,
            )

    sys.excepthook = hook


def _digest(
    kind: type[BaseException], error: BaseException, where: TracebackType | None, rank: int
) -> str:
    """A hash of what an error prints, which is equal on ranks that differ only in their own number.

    The errors of ranks that have lost others count as equal: the first of them says why.
    """
    lines = (
        [kind.__name__]
        if issubclass(kind, LostRank)
        else traceback.format_exception(kind, error, where)
    )
    return hashlib.sha256("".join(lines).replace(f"rank {rank}", "rank").encode()).hexdigest()
