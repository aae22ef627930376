"""What tests of relocated models ask of an executable, and how they have discovery miss a word."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import offload
from offload import backends
from offload.backends.ascend import TorchAscendBackend, captured_words, torch_relocation

# The notes of a model that was relocated, and of one that works on copies.
RELOCATED, COPIED = "addresses of kernel arguments", "are not relocated"


def counts(run: offload.Executable) -> tuple[int, int]:
    found = run._loaded.resident.refresh_counts
    return found["copies"], found["bytes_copied"]


def notes(run: offload.Executable) -> str:
    return "\n".join(run.notes())


def without(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """Have discovery miss one word."""
    find = captured_words.relocated_words

    def miss(*args: Any) -> captured_words.RelocatedWords:
        found = find(*args)
        words = found.discovery.words
        discovery = captured_words.dataclasses.replace(
            found.discovery, words=words[:index] + words[index + 1 :]
        )
        return captured_words.dataclasses.replace(found, discovery=discovery)

    monkeypatch.setattr(torch_relocation, "relocated_words", miss)


def require_relocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading fails where addresses cannot be patched, or where the proof does."""
    make = functools.partial(TorchAscendBackend, relocation=True)
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})
