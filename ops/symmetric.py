"""Symmetric memory: on every rank of a group, a buffer and signals that all other ranks can access.

    memory = connect(allocate(nbytes, ranks), nbytes, group)   ranks of one node, each with its GPU: torch's own
    memories = in_one_process(ranks, nbytes, device)           all ranks in this process
    memory = view(rank, memory, nbytes, starts, mapping)        any memory that all ranks have mapped

`mine` is this rank's buffer of bytes. `parts` are the buffers of all ranks as tensors, which copies read without a
kernel. `buffers` and `pads`, int64[ranks] on its device, are the addresses of every rank's buffer and signals, as this
rank sees them. The signals of one rank are int32[CHANNELS, ranks], each row padded to a power of two. They are zero
between collectives; `barrier.py` describes their use. `error`, int32[1], is zero until a barrier has waited in vain.
The host reads it without synchronising.

One memory serves one stream of collectives. Collectives that run at the same time need separate memories.

Signals are set and read by atomic operations on the memory of other GPUs. NVLink carries these and PCIe does not, so
ask `has_native_atomics` first. `allocate` and `connect` use a private torch API, `_symmetric_memory`, because torch has
no public one for memory that GPUs of several processes share; checked on torch 2.13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .operation import check_like

# The most blocks in the grid of a collective. Each has signals of its own.
CHANNELS = 128
# The default number of blocks of a collective.
BLOCKS = 32
# The blocks that fit on a multiprocessor: each has 256 threads of at most 128 registers.
BLOCKS_ON_PROCESSOR = 2
# The signals of a rank start at a multiple of this many bytes, a cache line of the GPU.
ALIGNMENT = 128
# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, in cuda.h.
_NATIVE_ATOMICS = 3


@dataclass(frozen=True, eq=False)
class Symmetric:
    """One rank's view of a symmetric memory."""

    rank: int
    ranks: int
    mine: torch.Tensor
    buffers: torch.Tensor
    pads: torch.Tensor
    error: torch.Tensor
    mapping: Any = None  # keeps the memory of all ranks mapped
    parts: Sequence[torch.Tensor] = ()

    def check(self) -> None:
        """Raise if an earlier barrier has waited in vain. On a GPU this covers the work that has run so far."""
        check(self.error, self.rank)

    def check_room(self, name: str, nbytes: int) -> None:
        """Raise if the collective `name` would read more than the buffer of a rank."""
        if nbytes > self.mine.numel():
            raise ValueError(f"{name}: reads {nbytes} bytes from a buffer of {self.mine.numel()}.")


def check(error: torch.Tensor, rank: int) -> None:
    """Raise if `error` is set: it is 1 + the rank that a barrier waited for in vain."""
    code = int(error)
    if not code:
        return
    raise RuntimeError(
        f"rank {rank} waited in vain for rank {code - 1}: it has died, is far behind, or runs other collectives. "
        f"The state of the symmetric memory is unknown; make a new one."
    )


def check_arguments(name: str, kind: str, buffers, outs, sizes, rank: int, channels: int) -> None:
    """Raise for arguments that are wrong for any collective. `kind` is the name of an out in errors."""
    if not outs or len(outs) != len(sizes) or not 0 <= rank < len(buffers):
        raise ValueError(
            f"{name}: {len(outs)} {kind}s, {len(sizes)} sizes, rank {rank} of {len(buffers)}."
        )
    if not 1 <= channels <= CHANNELS:
        raise ValueError(f"{name}: channels must be 1 to {CHANNELS}, got {channels}.")
    check_like(name, kind, outs, outs[0].dtype, buffers.device)


def in_one_process(ranks: int, nbytes: int, device: torch.device | str = "cpu") -> list[Symmetric]:
    """The memories of `ranks` ranks that are all in this process, on one device.

    >>> a, b = in_one_process(2, 64)
    >>> (a.rank, b.rank), a.mine.shape, a.buffers.tolist() == [a.mine.data_ptr(), b.mine.data_ptr()]
    ((0, 1), torch.Size([64]), True)
    """
    device = torch.device(device)
    size = room(nbytes, ranks)
    memories = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(ranks)]
    starts = [memory.data_ptr() for memory in memories]
    parts = [memory[:nbytes] for memory in memories]
    return [view(rank, memories[rank], nbytes, starts, memories, parts) for rank in range(ranks)]


def allocate(nbytes: int, ranks: int) -> torch.Tensor:
    """This rank's part, on the current CUDA device: a buffer of `nbytes` and its signals, all zero."""
    import torch.distributed._symmetric_memory as symm_mem

    device = torch.device("cuda", torch.cuda.current_device())
    size = room(nbytes, ranks)
    try:
        part = symm_mem.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError:
        # The memory does not come from the free blocks of torch's allocator, but may need their room.
        torch.cuda.empty_cache()
        part = symm_mem.empty(size, dtype=torch.uint8, device=device)
    part.zero_()
    torch.cuda.synchronize(device)
    return part


def connect(part: torch.Tensor, nbytes: int, group: dist.ProcessGroup) -> Symmetric:
    """The symmetric memory with `part` as this rank's part. Every rank of `group` must call it.

    The caller synchronises the ranks before the first collective: the signals of all ranks must be zero before any rank
    sets one.
    """
    import torch.distributed._symmetric_memory as symm_mem

    handle = symm_mem.rendezvous(part, group)
    offset = part.data_ptr() - handle.buffer_ptrs[group.rank()]  # in the mapped allocation
    starts = [pointer + offset for pointer in handle.buffer_ptrs]
    parts = [
        handle.get_buffer(rank, (nbytes,), torch.uint8, offset) for rank in range(group.size())
    ]
    return view(group.rank(), part, nbytes, starts, (part, handle), parts)


def has_native_atomics(device: int, peer: int, driver: Any = None) -> bool:
    """Whether a CUDA device can do atomic operations on the memory of another device, over the link between them.

    Args:
        device, peer: indices of devices of this process.
        driver: the driver's library, by default this machine's.
    """
    if device == peer:
        return True
    if driver is None:
        driver = ctypes.CDLL("libcuda.so.1")
    answer = ctypes.c_int(0)
    status = driver.cuDeviceGetP2PAttribute(ctypes.byref(answer), _NATIVE_ATOMICS, device, peer)
    return status == 0 and answer.value == 1


def at_addresses(table: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    """The bytes at each address of `table`, which is on the CPU."""
    if not nbytes:
        return [torch.empty(0, dtype=torch.uint8) for _ in table]
    memories = [(ctypes.c_uint8 * nbytes).from_address(start) for start in table.tolist()]
    return [torch.frombuffer(memory, dtype=torch.uint8) for memory in memories]


def room(nbytes: int, ranks: int) -> int:
    """The bytes of one rank's memory: its buffer and its signals."""
    signals = CHANNELS * (1 << (ranks - 1).bit_length())
    return _aligned(nbytes) + 4 * signals


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def view(
    rank: int,
    memory: torch.Tensor,
    nbytes: int,
    starts: Sequence[int],
    mapping: Any,
    parts: Sequence[torch.Tensor] = (),
) -> Symmetric:
    """One rank's view of `room` bytes. The memories of all ranks start at `starts`; `mapping` keeps them mapped.

    `parts` are the buffers of all ranks. On a CPU they are made from `starts`.
    """
    device = memory.device
    buffers = torch.tensor(starts, dtype=torch.int64, device=device)
    pads = buffers + _aligned(nbytes)
    # Pinned on the host, which reads it while kernels run.
    error = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
    if device.type == "cpu":
        parts = at_addresses(buffers, nbytes)
    return Symmetric(rank, len(starts), memory[:nbytes], buffers, pads, error, mapping, parts)
