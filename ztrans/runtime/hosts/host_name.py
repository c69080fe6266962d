"""The name of the host on which this process runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_name() -> tuple[str, ...]:
    """A name of this host, which no other host has; each network namespace of a machine counts as a host."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/net"
    booted = boot.read_text() if boot.exists() else ""
    return socket.gethostname(), booted, os.readlink(namespace) if os.path.exists(namespace) else ""
