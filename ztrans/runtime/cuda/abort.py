"""Abort: end NCCL communicators whose other ranks do not come.

Private torch APIs live here, because torch has no public way to abort several communicators together; checked on torch
2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort the NCCL communicators of these groups. Their kernels leave, also those that a CUDA graph has launched.

    An abort also frees memory of the device, and for that waits for all of its kernels. So a first communicator would
    wait for ever for a kernel of a second one (NVIDIA/nccl#1013). In one NCCL group all are told to stop, then freed.
    """
    if not groups:
        return
    backend: Any = groups[0]._get_backend(torch.device("cuda"))
    backend._group_start()
    try:
        for group in groups:
            group.abort()
    finally:
        backend._group_end()


def forget(group: dist.ProcessGroup) -> None:
    """Remove an aborted group from torch's registry. To destroy it, torch would wait for its messages first."""
    distributed_c10d._abort_process_group(group)
