"""Files that are replaced as a whole, so that a reader never finds half of one."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file in the same folder, which replaces `path` at the end.

    If the disk is full or the process is killed, the old file stays unchanged.
    """
    target = Path(os.path.realpath(path))
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
