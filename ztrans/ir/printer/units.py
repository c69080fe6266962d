"""units: seconds and bytes as text."""


def format_seconds(seconds: float) -> str:
    """Seconds as text.

    >>> format_seconds(0.0042), format_seconds(3.5e-6), format_seconds(0)
    ('4.20 ms', '3.50 us', '0.00 us')
    """
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if abs(seconds) < 999.995 * scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds:.2f} s"


def format_bytes(count: float) -> str:
    """A number of bytes as text.

    >>> format_bytes(512), format_bytes(3 << 20)
    ('512 B', '3.00 MiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
