"""barrier(memory): no rank continues before all ranks have reached the barrier.

There is one signal from each rank a to each rank b. Rank a waits until it is 0 and sets it to 1. Rank b waits until it
is 1 and sets it to 0. So only one of them may write at a time. A barrier leaves all signals as they were and keeps no
count, so a captured CUDA graph may replay it. Writes before the barrier are visible after it: a signal is set with
release semantics and read with acquire semantics, at the scope of the whole system.

A rank reads a signal at most `spins` times. Then it times out: it writes 1 + the number of the missing rank to `error`,
and the host raises when it next checks `error`. From then on it sends no signals to the others. Its signal to itself
stays at 1, so its later barriers time out soon. A rank that is only late then waits in vain too, here or at its next
barrier, and times out: by then, the memory of the first rank may hold another message. On the CPU the barrier raises at
once.

Errors: `error` was set by an earlier barrier. Bytes moved at least: 4 to and from every other rank.
"""

from __future__ import annotations

import time

import torch

from .kernel import kernel, tl
from .operation import define
from .symmetric import Symmetric, at_addresses, check

SPINS = 1 << 24  # some tens of seconds on a GPU


def barrier(memory: Symmetric, *, spins: int = SPINS) -> None:
    """Wait for all ranks of `memory`; on a GPU its stream waits.

    >>> from .symmetric import in_one_process
    >>> barrier(in_one_process(1, 0)[0])
    """
    torch.ops.ztrans.barrier.default(memory.pads, memory.error, memory.rank, spins)


def reference(pads: torch.Tensor, error: torch.Tensor, rank: int, spins: int) -> None:
    """The barrier for processes that share memory, on channel 0."""
    check(error, rank)
    ranks = len(pads)
    signals = [row.view(torch.int32) for row in at_addresses(pads, 4 * ranks)]
    peers = [r for r in range(ranks) if r != rank]
    for r in peers:
        _replace(signals[r][rank : rank + 1], 0, 1, r, error, rank, spins)
    for r in peers:
        _replace(signals[rank][r : r + 1], 1, 0, r, error, rank, spins)


def _replace(
    signal: torch.Tensor, old: int, new: int, peer: int, error: torch.Tensor, rank: int, spins: int
) -> None:
    """Wait until a signal is `old`, and set it to `new`. Raises if `peer` does not change it in time."""
    for tries in range(spins):
        if int(signal) == old:
            signal.fill_(new)
            return
        time.sleep(0 if tries < 1000 else 1e-4)
    error.fill_(1 + peer)
    check(error, rank)


@kernel
def _patience(error, looks, patience):
    # The error word is in the host's memory, which is slow to read, so it is read only every 1024th time. Threads may
    # see it change at different times but must leave together, so an error that one thread sees counts for all.
    if looks % 1024 == 0:
        errors = tl.load(error + tl.zeros([256], tl.int32), volatile=True)
        patience = tl.where(tl.max(errors, 0) == 0, patience, 0)
    return patience


@kernel
def meet(pads, error, rank, channel, spins, WORLD: tl.constexpr):
    """The barrier between one block of the grid and the same block of every other rank.

    Returns whether all ranks have arrived. If not, messages of the other ranks must not be used.
    """
    # There is a lane for each rank, including this one. Lanes beyond the number of ranks signal to themselves.
    LANES: tl.constexpr = 1 << (WORLD - 1).bit_length()
    lane = tl.arange(0, LANES)
    mine = tl.load(pads + rank)
    pads_of_lane = tl.load(pads + tl.minimum(lane, WORLD - 1))
    theirs = tl.where(
        lane < WORLD,
        pads_of_lane + (channel * LANES + rank) * 4,
        mine + (channel * LANES + lane) * 4,
    )
    theirs = theirs.to(tl.pointer_type(tl.int32))
    ours = (mine + (channel * LANES + lane) * 4).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    looks = 0
    patience = spins
    wrong = tl.atomic_add(theirs, 0, sem="acquire", scope="sys") != 0
    while (tl.max(wrong.to(tl.int32), 0) != 0) & (looks < patience):
        wrong = tl.atomic_add(theirs, 0, sem="acquire", scope="sys") != 0
        looks += 1
        patience = _patience(error, looks, patience)
    # A rank that times out leaves its signal to itself at 1, which is wrong at its next barrier.
    all_right = tl.max(wrong.to(tl.int32), 0) == 0
    tl.atomic_xchg(theirs, 1, mask=all_right | (lane == rank), sem="release", scope="sys")
    missing = tl.atomic_add(ours, 0, sem="acquire", scope="sys") != 1
    while all_right & (tl.max(missing.to(tl.int32), 0) != 0) & (looks < patience):
        missing = tl.atomic_add(ours, 0, sem="acquire", scope="sys") != 1
        looks += 1
        patience = _patience(error, looks, patience)
    in_vain = wrong | (all_right & missing)
    all_here = tl.max(in_vain.to(tl.int32), 0) == 0
    # `lane >= 0` makes the mask a vector.
    tl.atomic_xchg(ours, 0, mask=all_here & (lane >= 0), sem="release", scope="sys")
    late = tl.max(tl.where(in_vain & (lane != rank), lane + 1, 0), 0)
    # An earlier error stays, because it names the first cause.
    is_first = tl.load(error, mask=late > 0, other=1, volatile=True) == 0
    tl.store(error, late, mask=is_first)
    tl.debug_barrier()
    return all_here


@kernel(unspecialized="first spins")
def _barrier(pads, error, first, spins, WORLD: tl.constexpr):
    meet(pads, error, first + tl.program_id(1), tl.program_id(0), spins, WORLD)


def launch(pads: torch.Tensor, error: torch.Tensor, rank: int, spins: int) -> None:
    """The barrier on GPUs, by one block."""
    check(error, rank)
    if len(pads) > 1:
        with torch.cuda.device_of(pads):
            _barrier[(1,)](pads, error, rank, spins, WORLD=len(pads), num_warps=1)


def _check(pads: torch.Tensor, error: torch.Tensor, rank: int, spins: int) -> None:
    if not 0 <= rank < len(pads):
        raise ValueError(f"barrier: rank {rank} of {len(pads)}.")


define(
    "barrier(Tensor pads, Tensor(a!) error, int rank, int spins) -> ()", _check, reference, launch
)
