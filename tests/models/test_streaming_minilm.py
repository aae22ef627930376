"""MiniLM, a sentence encoder of 87 MiB, under budgets of its weights.

Its table of words is half of it, and one launch takes some rows of it: the least budget is more
than the table. Given embedded words the same model runs at a tenth of what it then reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stored import save_weights
from torch import nn

import offload
from offload.api import Captured
from offload.demo import load_encoder
from offload.demo.search import DemoUnavailable

SENTENCES = (
    "a capture records launches",
    "the quick brown fox jumps over it",
    "nobody reads addresses twice",
)


@pytest.fixture(scope="module")
def encoder() -> Any:
    try:
        return load_encoder()
    except DemoUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder(encoder: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("minilm")
    save_weights(Words(encoder.model), made)
    return made


class Words(nn.Module):
    """The whole model, on numbers of words."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids)[0]


class Embedded(Words):
    """The model on words that were looked up."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.model(inputs_embeds=words)[0]


def inputs_of(encoder: Any, n_words: int = 8) -> list[torch.Tensor]:
    """The first words of each sentence."""
    ids = [encoder.tokenizer(one, return_tensors="pt")["input_ids"] for one in SENTENCES]
    return [one[:, : min(n_words, *(one.shape[1] for one in ids))] for one in ids]


def embedded(encoder: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [encoder.model.embeddings.word_embeddings(ids) for ids in inputs_of(encoder)]


def weight_bytes(captured: Captured) -> int:
    return sum(one.size_bytes for one in captured.program.values if one.role == "weight")


def results_and_bytes(
    captured: Captured, inputs: list[torch.Tensor], budget_bytes: int | None
) -> tuple[list[torch.Tensor], int]:
    """The results, and what each execution streamed."""
    with captured.load(weights_budget=budget_bytes) as run:
        results, streamed = [], set()
        for one in inputs:
            results.append(run(one))
            streamed.add(run.last_execution.bytes_streamed)
        plan = run.streaming.plan
        assert plan.memory_bytes <= (budget_bytes or plan.memory_bytes)
        assert streamed == {weight_bytes(captured) - plan.resident_bytes}
    return results, streamed.pop()


def same_bits(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, these, those))


def test_a_tenth_of_the_weights(encoder: Any, folder: Path) -> None:
    inputs = embedded(encoder)
    model = Embedded(encoder.model)
    captured = offload.capture(model, inputs[0], weights=folder)
    whole_bytes = weight_bytes(captured)
    assert whole_bytes > 40e6
    expected, nothing = results_and_bytes(captured, inputs, None)
    assert nothing == 0
    found, streamed_bytes = results_and_bytes(captured, inputs, whole_bytes // 10)
    assert same_bits(found, expected)
    assert streamed_bytes >= whole_bytes * 9 // 10
    with torch.no_grad():
        for one, tensor in zip(inputs, expected, strict=True):
            torch.testing.assert_close(tensor, model(one))


def test_the_table_of_words_sets_the_least_budget(encoder: Any, folder: Path) -> None:
    inputs = inputs_of(encoder)
    captured = offload.capture(Words(encoder.model), inputs[0], weights=folder)
    table_bytes = encoder.model.embeddings.word_embeddings.weight.nbytes
    with pytest.raises(offload.PlanError, match="word_embeddings"):
        captured.load(weights_budget=weight_bytes(captured) // 10)
    expected, _ = results_and_bytes(captured, inputs, None)
    with captured.load(weights_budget=weight_bytes(captured) // 4 * 3) as run:
        floor_bytes = run.streaming.plan.floor.required_bytes
    assert table_bytes < floor_bytes < 1.2 * table_bytes
    found, streamed_bytes = results_and_bytes(captured, inputs, floor_bytes)
    assert same_bits(found, expected)
    assert streamed_bytes >= weight_bytes(captured) - floor_bytes
