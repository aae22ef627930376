"""A plugin of pytest: the report of benchmarks is written after each, not at the end alone.

A device that hangs takes its process with it, and what that had measured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Write what there is when a test has ended."""
    yield
    session = item.config._benchmarksession
    if not session.benchmarks:
        return
    if not isinstance(session.get_machine_info, functools.partial):
        # Asked once: it takes a second.
        session.get_machine_info = functools.partial(dict, session.get_machine_info())
    session.handle_saving()
