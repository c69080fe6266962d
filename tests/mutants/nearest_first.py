"""A plugin of pytest: tests run in the order of their files on the command line, and long tests after all others."""

from __future__ import annotations

from collections.abc import Generator

import pytest

LONG = ("slow", "compiles", "distributed")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    place = {item: k for k, item in enumerate(items)}
    yield  # conftest.py moves files that take long to the front
    items.sort(key=lambda item: (any(map(item.get_closest_marker, LONG)), place[item]))
