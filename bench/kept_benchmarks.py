"""A pytest plugin that writes the report of benchmarks after each, not only at the end.

A device that hangs would take its process with it, and the process's measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Write the results so far when a test has ended."""
    yield
    session = item.config._benchmarksession
    if not session.benchmarks:
        return
    if not isinstance(session.get_machine_info, functools.partial):
        # Queried once: it takes a second.
        session.get_machine_info = functools.partial(dict, session.get_machine_info())
    session.handle_saving()
