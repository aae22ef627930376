"""Checks on executables of relocated models, and a way to make discovery miss a word."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import offload
from offload import backends
from offload.backends.ascend import TorchAscendBackend, captured_words, torch_relocation

# The notes of a relocated model, and of a model that works on copies.
RELOCATED, COPIED = "addresses of kernel arguments", "are not relocated"


def counts(run: offload.Executable) -> tuple[int, int]:
    found = run._loaded.resident.refresh_counts
    return found["copies"], found["bytes_copied"]


def notes(run: offload.Executable) -> str:
    return "\n".join(run.notes())


def without(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """Make discovery miss one word."""
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
    """Fail the load where addresses cannot be patched or the proof fails."""
    make = functools.partial(TorchAscendBackend, relocation=True)
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})
