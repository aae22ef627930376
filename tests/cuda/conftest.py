"""Fixtures of tests that need a GPU; without a GPU each is skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("on_device", "device_models")


def _missing() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return ""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Allow warnings of libraries that only a GPU loads."""
    item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """The GPU, for inference."""
    if missing := _missing():
        pytest.skip(missing)
    torch.cuda.synchronize()  # a fault of an earlier test is raised here
    with torch.no_grad():
        torch.cuda.manual_seed_all(0)
        yield torch.device("cuda", torch.cuda.current_device())
        torch.cuda.synchronize()
