"""What ztrans gains and what it costs, in folders by question. README.md has a line for each file."""

import platform
import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    """The name of the processor with its family and model numbers, as the name alone may be vague."""
    text = Path("/proc/cpuinfo").read_text()
    name, family, model = (
        re.search(rf"^{key}\s*:\s*(.*)", text, re.MULTILINE)
        for key in ("model name", "cpu family", "model")
    )
    return (
        f"{name[1]} (family {family[1]}, model {model[1]})"
        if name and family and model
        else platform.machine()
    )
