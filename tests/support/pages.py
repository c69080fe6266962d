"""What the HTML page of a timeline shows."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any


def data_of(html: str) -> dict[str, Any]:
    """The data that the script of a page draws."""
    (packed,) = re.findall(r'atob\("([\w+/=]*)"\)', html)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def changes(curve: Iterable[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """The points at which a curve of live bytes is not as before."""
    before = None
    for time, live in curve:
        if live != before:
            yield time, live
        before = live
