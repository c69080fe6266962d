"""A checkpoint's folder on disk: its names, its checksums, and how it replaces the previous checkpoint.

A save to `x` fills a new folder beside it, `x.ztrans-1a2b3c4d.partial`, with eight digits that differ for each save.
Once its files have been checked, the previous checkpoint is renamed to `x.ztrans-1a2b3c4d.old`, the new folder to `x`,
and the old folder is deleted. So a folder called `x` is always complete. If the process is killed between the two
renames, `x` is missing, and the old folder is the complete checkpoint.

The file `ztrans.json` shows that a save made the folder, and holds a checksum for each record of the other files.
Only folders with such a name and this file are ever deleted.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

_MARKER = "ztrans.json"
_INDEX = ".metadata"  # written by torch.distributed.checkpoint
_CHUNK = 1 << 20  # bytes read at a time

# By file name: the offset, length and checksum of each record. The last record ends where the file ends.
Checksums = Mapping[str, Sequence[tuple[int, int, int]]]


class Damaged(ValueError):
    """A file of a checkpoint is missing, or differs from what `save` wrote."""


def real_path(path: Path) -> Path:
    """The absolute path of a checkpoint's folder, with all links resolved.

    A save makes its new folder beside this one: on the same disk, so that a rename can replace the checkpoint.
    """
    return path.absolute().resolve()


def unfinished_name(target: Path, nonce: str) -> Path:
    """The folder that a save fills before it is complete. The nonce differs for each save."""
    return target.with_name(f"{target.name}.ztrans-{nonce}.partial")


def index_of(folder: Path) -> Path:
    """The index of a checkpoint. A folder without one is not a checkpoint."""
    return folder / _INDEX


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a complete checkpoint, of `save` or of torch.distributed.checkpoint."""
    return index_of(folder).is_file()


def committed(path: Path) -> Path | None:
    """The folder of the last complete checkpoint at this path, or None."""
    target = real_path(path)
    for folder in (target, *_siblings(target, "old")):
        if is_checkpoint(folder):
            return folder
    return None


def has_unfinished(path: Path) -> bool:
    """Whether a save to this path has begun without completing."""
    return bool(_siblings(real_path(path), "partial"))


def check_replaceable(target: Path) -> None:
    """Check that a save to this path would delete nothing but a checkpoint.

    Raises: FileExistsError if it would.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file; choose a new name")
    if target.is_mount():
        raise FileExistsError(
            f"{target} is the root of a disk, which cannot be renamed; save to a folder in it"
        )
    names = sorted(file.name for file in target.iterdir())
    if names and _INDEX not in names:
        raise FileExistsError(f"{target} exists and is not a checkpoint; choose a new name")
    foreign_names = [name for name in names if not _is_written_by_save(name)]
    if foreign_names:
        raise FileExistsError(
            f"{target} has files that are not part of a checkpoint, such as {foreign_names[0]}, and a save would "
            f"delete them; move them, or choose a new name"
        )


def make(folder: Path) -> None:
    """Delete unfinished folders of earlier saves to the same path, and make the folder that a save fills."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    target = folder.with_name(folder.name.rsplit(".ztrans-", 1)[0])
    for unfinished in _siblings(target, "partial"):
        delete(unfinished)
    folder.mkdir()
    _write_marker(folder, {})


def delete(folder: Path) -> None:
    """Delete a folder made by a save. Files that cannot be deleted stay, without an error."""
    if not (folder / _MARKER).is_file():
        # A process that was killed in `make` or here leaves an empty folder.
        with contextlib.suppress(OSError):
            folder.rmdir()
        return
    # Delete the index first and the marker last. If the process is killed in between, the rest is not taken for a
    # checkpoint, and can still be deleted.
    for path in sorted(
        folder.iterdir(), key=lambda path: (path.name == _MARKER, path.name != _INDEX)
    ):
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def replace(target: Path, folder: Path) -> None:
    """Rename a complete folder to `target`, which is beside it, and delete the checkpoint that had this name."""
    _sync(folder)
    if is_checkpoint(target):
        for old in _siblings(target, "old"):
            delete(old)
        old = folder.with_name(f"{folder.name.removesuffix('.partial')}.old")
        target.rename(old)  # `committed` finds it there if this process is killed now
        if not (old / _MARKER).exists():  # torch.distributed.checkpoint wrote it
            _write_marker(old, {})
    folder.rename(target)
    _sync(target.parent)
    for old in _siblings(target, "old"):
        delete(old)


def write_checksums(folder: Path, checksums: Checksums) -> None:
    """Write the checksums of a folder's files, and of its index, into its marker."""
    index = index_of(folder)
    size = index.stat().st_size
    with index.open("rb") as file:
        index_checksum = checksum(file, 0, size)
    _write_marker(folder, {**checksums, _INDEX: [(0, size, index_checksum)]})


def read_checksums(folder: Path) -> Checksums:
    """The checksums of a folder's files; none if torch.distributed.checkpoint wrote it.

    Raises: Damaged if the marker, which holds them, is damaged.
    """
    marker = folder / _MARKER
    if not marker.exists():
        return {}
    body, _, body_checksum = marker.read_bytes().partition(b"\n")
    if f"{zlib.crc32(body):08x}".encode() != body_checksum.strip():
        raise Damaged(f"{marker} is damaged.")
    return json.loads(body)["files"]


def checksum(file: io.BufferedReader, offset: int, length: int) -> int:
    """The CRC-32 of `length` bytes of a file from `offset` on, or of fewer if the file ends earlier.

    On one core of an EPYC, zlib computes it at 2.3 GB/s; SHA-256 reaches 1.4 with the CPU's own instructions, and
    BLAKE2b 0.7. The checksum detects damage; it does not protect against an attacker.
    """
    file.seek(offset)
    buffer = memoryview(bytearray(min(length, _CHUNK)))
    crc = 0
    while length > 0:
        count = file.readinto(buffer[:length])
        if not count:
            break
        crc = zlib.crc32(buffer[:count], crc)
        length -= count
    return crc


def check_file(
    folder: Path, name: str, checksums: Checksums, offsets: set[int] | None = None
) -> None:
    """Check the length of a file, and the records that begin at `offsets`: all of them by default.

    Raises: Damaged, with the name of the file.
    """
    path = folder / name
    records = checksums[name]
    if not path.is_file():
        raise Damaged(f"{path} is missing.")
    written_size = max(offset + length for offset, length, _ in records)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != written_size:
            raise Damaged(f"{path} has {size} bytes, but {written_size} were written.")
        for offset, length, expected in records:
            is_selected = offsets is None or offset in offsets
            if is_selected and checksum(file, offset, length) != expected:
                raise Damaged(
                    f"{path} is damaged: bytes {offset} to {offset + length} differ from those written."
                )


def _siblings(target: Path, kind: str) -> list[Path]:
    """The folders that saves to `target` have left beside it, of one kind: partial or old."""
    pattern = re.compile(rf"{re.escape(target.name)}\.ztrans-[0-9a-f]{{8}}\.{kind}")
    if not target.parent.is_dir():
        return []
    return sorted(path for path in target.parent.iterdir() if pattern.fullmatch(path.name))


def _is_written_by_save(name: str) -> bool:
    return name in (_INDEX, _MARKER) or name.endswith(".distcp")


def _write_marker(folder: Path, checksums: Checksums) -> None:
    body = json.dumps({"made_by": "ztrans.save", "files": checksums}).encode()
    with (folder / _MARKER).open("wb") as file:
        file.write(body + b"\n" + f"{zlib.crc32(body):08x}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
