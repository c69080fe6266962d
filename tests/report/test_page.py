"""The HTML page of a timeline in a notebook."""

import re
from html import unescape

import pytest

import ztrans as zt
from tests.support.net import lower
from ztrans.report.page import page

SIMULATED = lower(zt.overlap_grads(), zt.prefetch()).timeline


@pytest.mark.parametrize("count", [1, 2], ids=["a timeline", "two"])
def test_a_timeline_shows_in_a_notebook(count):
    """The page is in a sandboxed frame. Its script runs only there, and no text of the page can close the frame."""
    timelines = [SIMULATED() for _ in range(count)]
    cell = (timelines[0] if count == 1 else timelines[0].compare(timelines[1]))._repr_html_()
    attributes = re.fullmatch(r"<iframe ([^<>]*)></iframe>", cell)[1]
    assert 'sandbox="allow-scripts"' in attributes and attributes.count('"') == 2 * 3
    html = unescape(re.search(r'srcdoc="([^"]*)"', attributes)[1])
    assert html == page(timelines) and not re.search(r"(src|href)=|https?://|@import|fetch\(", html)
