"""MiniLM, a sentence encoder of 87 MiB, under budgets of its weights.

Its word table is half of it, and one launch reads some rows of it, which are gathered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stored import save_weights
from torch import nn

import offload
from offload.api.captured import Captured
from offload.commands.demo import load_encoder
from offload.commands.demo.search import DemoUnavailable

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
    """The whole model, on word indices."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids)[0]


class Embedded(Words):
    """The model on embedded words."""

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
    """The results, and the bytes that each execution streamed."""
    with captured.load(weights_budget=budget_bytes) as run:
        results, streamed = [], set()
        for one in inputs:
            results.append(run(one))
            streamed.add(run.last_execution.bytes_streamed)
        plan = run.streaming.plan
        assert plan.memory_bytes <= (budget_bytes or plan.memory_bytes)
        tables = {one.value for one in plan.gathers}
        tables_bytes = sum(captured.program.values[value].size_bytes for value in tables)
        moved_bytes = weight_bytes(captured) - tables_bytes - plan.resident_bytes
        assert plan.transfer_bytes == moved_bytes
        assert streamed == {moved_bytes + plan.gathered_bytes}
    return results, streamed.pop()


def same_bits(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, these, those))


@pytest.mark.slow
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


def test_the_whole_model_at_a_tenth_of_its_weights(encoder: Any, folder: Path) -> None:
    inputs = inputs_of(encoder)
    captured = offload.capture(Words(encoder.model), inputs[0], weights=folder)
    whole_bytes = weight_bytes(captured)
    expected, nothing = results_and_bytes(captured, inputs, None)
    assert nothing == 0
    found, streamed_bytes = results_and_bytes(captured, inputs, whole_bytes // 10)
    assert same_bits(found, expected)
    table_bytes = encoder.model.embeddings.word_embeddings.weight.nbytes
    assert table_bytes > whole_bytes // 2
    assert whole_bytes // 3 < streamed_bytes < whole_bytes - table_bytes
    with torch.no_grad():
        for one, tensor in zip(inputs, expected, strict=True):
            torch.testing.assert_close(tensor, encoder.model(input_ids=one)[0])


def test_what_a_pass_reads_of_the_table_of_words(encoder: Any, folder: Path) -> None:
    inputs = inputs_of(encoder)
    captured = offload.capture(Words(encoder.model), inputs[0], weights=folder)
    n_words, width = inputs[0].numel(), encoder.model.config.hidden_size
    with captured.load(weights_budget=weight_bytes(captured) // 10) as run:
        plan, text = run.streaming.plan, run.streaming.explain()
    names = {captured.program.values[one.value].name: one for one in plan.gathers}
    words = next(one for name, one in names.items() if "word_embeddings" in name)
    assert (words.n_rows, words.row_bytes) == (n_words, width * 4)
    assert f"word_embeddings.weight {n_words} rows of 1.50 KiB" in text
    assert "through the page cache" in text
    assert plan.floor.required_bytes < weight_bytes(captured) // 20
    assert "word_embeddings" not in plan.floor.name


@pytest.mark.slow
def test_budgets_that_the_table_would_fit_in(encoder: Any, folder: Path) -> None:
    inputs = inputs_of(encoder)
    captured = offload.capture(Words(encoder.model), inputs[0], weights=folder)
    whole_bytes = weight_bytes(captured)
    expected, _ = results_and_bytes(captured, inputs, None)
    for budget in (whole_bytes // 2, whole_bytes * 3 // 4, whole_bytes - 1):
        found, streamed_bytes = results_and_bytes(captured, inputs, budget)
        assert same_bits(found, expected)
        assert streamed_bytes > 0
