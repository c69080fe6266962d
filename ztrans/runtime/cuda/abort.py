"""End NCCL communicators whose other ranks do not come.

Private torch APIs live here, because torch has no public way to remove a group without waiting for its messages;
checked on torch 2.13.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

_PATIENCE = 5.0  # seconds


def abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort the NCCL communicators of these groups. Their kernels stop, also those that a CUDA graph has launched.

    An abort tells the kernels to stop, then frees memory of the device, and for that waits for all of its kernels. Of
    two communicators that are aborted one after the other, the first would wait for a kernel of the second
    (NVIDIA/nccl#1013). So each group has a thread. NCCL's own group calls count for one thread, and torch aborts each
    process group in another one.

    A communicator whose collectives a CUDA graph holds is freed with the graph. So this does not wait for long.
    """
    threads = [
        threading.Thread(target=_abort, args=(group,), name="ztrans-abort", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))


def _abort(group: dist.ProcessGroup) -> None:
    # It may have been aborted or destroyed already. KeyError is of a group that another thread destroys meanwhile.
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        if group is dist.group.WORLD:  # torch would end all groups, one after the other
            group.abort()
        else:
            distributed_c10d._abort_process_group(group)
