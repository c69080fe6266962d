"""Read and write files on all ranks together: they find the same ones, and an error on one rank is raised on all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from ...ir.dependencies import grouped
from ..agreement import Failure, agree, everywhere
from ..session import rank_names, session_of

T = TypeVar("T")


def agreed(
    find: Callable[[], T], digest_of: Callable[[T], str], mesh: DeviceMesh | None, call: str
) -> T:
    """What this rank has found on disk. All ranks must have found something with the same digest.

    Raises: the error of `find`; RuntimeError on all ranks if they have found different things, or one has failed.
    """
    try:
        found = find()
    except Exception as error:
        if mesh is not None:
            failure = Failure(call, f"{type(error).__name__}: {error}")
            with contextlib.suppress(RuntimeError):  # the error of this rank is more specific
                agree(session_of(mesh), call, failure, lambda by_rank: "")
        raise
    if mesh is not None:
        agree(session_of(mesh), call, digest_of(found), _different_digests)
    return found


def _different_digests(by_rank: Mapping[int, str]) -> str:
    """The error text for ranks that have found checkpoints with different digests."""
    by_digest = grouped((digest, rank) for rank, digest in by_rank.items())
    lines = "".join(
        f"  {rank_names(ranks)} found {digest[:8]}\n" for digest, ranks in by_digest.items()
    )
    return (
        f"  They have found different checkpoints:\n{lines}"
        f"The path must be on a file system of all ranks, and no other program may save to it meanwhile."
    )


@contextlib.contextmanager
def failing_together(mesh: DeviceMesh | None, call: str) -> Iterator[None]:
    """A context that raises on all ranks if its body fails on one of them.

    Raises: the error of this rank, or else RuntimeError with the error of another rank.
    """
    own_error = None
    try:
        yield
    except Exception as error:
        own_error = error
    if mesh is not None:
        own_text = f"{type(own_error).__name__}: {own_error}" if own_error is not None else ""
        texts = everywhere(own_text, mesh)
        failures = [
            f"rank {rank} has failed with {text}"
            for rank, text in zip(mesh.mesh.flatten().tolist(), texts)
            if text
        ]
        if failures and own_error is None:
            raise RuntimeError(f"{call}: {failures[0]}")
    if own_error is not None:
        raise own_error
