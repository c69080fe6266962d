"""Peak memory of a step, measured in two ways that are fair to all subjects.

`Peak` counts the bytes that malloc has handed out: tensors, also those of C++ code, and other memory of the libraries.
(PyTorch's profiler does not see the memory that gloo's threads free.) `resident_peak` counts the memory that the
operating system has given to the process, which includes free memory that malloc keeps.
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
    """Bytes that malloc has handed out: small blocks in its arenas, and large blocks, which it maps separately."""
    info = _libc.mallinfo2()
    return info.uordblks + info.hblkhd


class Peak:
    """A context that measures the most bytes in use inside, by a thread that looks every 0.2 ms."""

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
    """Return free memory that malloc keeps to the operating system."""
    _libc.malloc_trim(0)


def forget_peak() -> None:
    """Reset `resident_peak`, and return malloc's free memory, so that memory used during the start does not count."""
    trim()
    Path("/proc/self/clear_refs").write_text("5")


def resident() -> int:
    return _bytes_of("/proc/self/status", "VmRSS")


def resident_peak() -> int:
    """The peak of resident bytes since the last `forget_peak`."""
    return _bytes_of("/proc/self/status", "VmHWM")


def available() -> int:
    """The bytes of memory that are available on the machine."""
    return _bytes_of("/proc/meminfo", "MemAvailable")


def _bytes_of(file: str, key: str) -> int:
    (line,) = (x for x in Path(file).read_text().splitlines() if x.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])
