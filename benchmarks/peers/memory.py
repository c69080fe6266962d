"""Peak memory of a step, in two accounts that treat all subjects alike.

`Peak`: bytes that malloc has lent out: tensors, those of C++ included, and what libraries hold beside
them. (PyTorch's profiler does not see what gloo's threads free.) `resident_peak`: memory that the
operating system has lent: this, and what malloc keeps for later.
"""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path


class _Mallinfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Mallinfo


def lent() -> int:
    """Bytes in use: small ones in arenas, large ones mapped by themselves."""
    info = _libc.mallinfo2()
    return info.uordblks + info.hblkhd


class Peak:
    """The most bytes in use while it is entered, looked at all the time by a thread."""

    def __enter__(self) -> Peak:
        self.bytes, self.over = 0, threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.over.is_set():
            self.bytes = max(self.bytes, lent())
            time.sleep(2e-4)

    def __exit__(self, *_) -> None:
        self.over.set()
        self.thread.join()


def trim() -> None:
    """Give the operating system what malloc keeps for later."""
    _libc.malloc_trim(0)


def forget_peak() -> None:
    """Forget it, and what malloc has kept so far: what was needed to get ready is nobody's step."""
    trim()
    Path("/proc/self/clear_refs").write_text("5")


def resident() -> int:
    return _said("/proc/self/status", "VmRSS")


def resident_peak() -> int:
    """Since the last `forget_peak`."""
    return _said("/proc/self/status", "VmHWM")


def available() -> int:
    """Bytes that the machine has left."""
    return _said("/proc/meminfo", "MemAvailable")


def _said(file: str, key: str) -> int:
    (line,) = (x for x in Path(file).read_text().splitlines() if x.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])
