"""Symmetric memory of processes of one machine, on the CPU, in shared files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from ztrans.ops.symmetric import Symmetric, room, view
from ztrans.runtime.cuda.symmetric import CudaSource


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


class FileSource(CudaSource):
    """Allocates symmetric memories of the ranks of the world in files, each memory in a folder of its own.

    `note` is called with each memory, and returns it.
    """

    def __init__(self, note: Callable[[Symmetric], Symmetric] = lambda memory: memory) -> None:
        folder = [tempfile.mkdtemp(dir="/dev/shm") if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        self.folder = Path(folder[0])
        self.note = note
        self.memories: list[Symmetric] = []

    def device(self) -> str:
        return "cpu"

    def check_room(self, lanes: int) -> None:
        """Processes need no multiprocessors."""

    def check_links(self, devices: Mapping[int, str]) -> None:
        """All processes can map the files."""

    def allocate(self, nbytes: int, ranks: int) -> Path:
        folder = self.folder / str(len(self.memories))
        folder.mkdir(exist_ok=True)
        return folder

    def connect(self, part: Path, nbytes: int, group: dist.ProcessGroup) -> Symmetric:
        memory = self.note(over_files(part, group.rank(), group.size(), nbytes))
        self.memories.append(memory)
        return memory

    def end(self) -> None:
        """Delete the files. All ranks call it together."""
        dist.barrier()
        shutil.rmtree(self.folder, ignore_errors=True)
