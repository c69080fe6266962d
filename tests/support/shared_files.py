"""Symmetric memory of processes of one machine, on the CPU, in shared files."""

from __future__ import annotations

from pathlib import Path

import torch

from ztrans.ops.symmetric import Symmetric, room, view


def over_files(folder: str | Path, rank: int, ranks: int, nbytes: int) -> Symmetric:
    """The memory of one of `ranks` processes, in files of `folder`: a new one, in /dev/shm at best."""
    files = [str(Path(folder) / f"{r}.symmetric") for r in range(ranks)]
    size = room(nbytes, ranks)
    # The files get their length before torch maps them. When torch lengthens a file it writes a zero at its start,
    # over data that a faster rank may have put there.
    for path in files:
        with open(path, "ab") as file:
            file.truncate(max(size, file.tell()))
    whole = [torch.from_file(file, shared=True, size=size, dtype=torch.uint8) for file in files]
    return view(rank, whole[rank], nbytes, [t.data_ptr() for t in whole], whole)
