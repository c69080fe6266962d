"""Seconds and bytes as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Seconds as text.

    >>> duration(0.0042), duration(3.5e-6), duration(0)
    ('4.20 ms', '3.50 us', '0.00 us')
    """
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if abs(seconds) < 999.995 * scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds:.2f} s"


def size(count: float) -> str:
    """Bytes as text.

    >>> size(512), size(3 << 20)
    ('512 B', '3.00 MiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
