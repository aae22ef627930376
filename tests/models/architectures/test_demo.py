"""The demo on the real encoder: the output of `make demo` must be true."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from offload import cli
from offload.commands import demo
from offload.commands.demo.search import LENGTH_TOKENS, DemoUnavailable


@pytest.fixture(scope="module")
def encoder() -> demo.Encoder:
    try:
        loaded = demo.load_encoder()
    except DemoUnavailable as missing:
        pytest.skip(str(missing))
    return loaded


@pytest.fixture(scope="module")
def search(encoder: demo.Encoder) -> demo.Search:
    return demo.search_page(encoder, demo.read_page(), demo.QUERIES)


def test_every_sentence_fits_the_recorded_length(encoder: demo.Encoder) -> None:
    for text in (*demo.read_page(), *demo.QUERIES):
        assert len(encoder.tokenizer(text)["input_ids"]) < LENGTH_TOKENS


@pytest.mark.slow
def test_replay_agrees_with_eager(search: demo.Search) -> None:
    # Sums of up to 1,536 float32 products, in another order where torch threads differ.
    assert search.largest_difference < 1e-4


def test_the_right_topic_comes_first(search: demo.Search) -> None:
    topics = ["tides", "Printers", "Tacoma Narrows"]
    for ranking, topic in zip(search.rankings, topics, strict=True):
        assert topic in ranking.hits[0].sentence
        scores = [hit.score for hit in ranking.hits]
        assert scores == sorted(scores, reverse=True)
        assert 0.3 < scores[0] <= 1


def test_every_execution_was_at_new_addresses(search: demo.Search) -> None:
    report = search.report
    assert report.n_executions == len(demo.read_page()) + len(demo.QUERIES)
    assert report.last.n_executions == report.n_executions + 1
    # Both inputs at least: results that are not kept may return at an old address.
    assert report.last.slots_changed >= 2
    assert report.last.words_patched >= report.last.slots_changed
    assert report.m_l_t_ns > 0


def test_the_feature_map_is_shared(search: demo.Search) -> None:
    memory = search.report.memory
    assert memory.lower_bound_bytes <= memory.feature_map_bytes < memory.unshared_bytes / 4
    assert memory.outside_bytes is not None


def test_embeddings_are_those_of_mean_pooling(encoder: demo.Encoder) -> None:
    sentences = ("The sea rises.", "The sea rises twice.")
    found = demo.search_page(encoder, sentences, (sentences[0],))
    assert found.rankings[0].hits[0].sentence == sentences[0]
    assert found.rankings[0].hits[0].score == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("encoder")
@pytest.mark.parametrize("as_json", [False, True])
def test_the_command(as_json: bool) -> None:
    result = CliRunner().invoke(cli.main, ["demo", *["--json"] * as_json])
    assert result.exit_code == 0, result.stderr
    if as_json:
        outcome = json.loads(result.stdout)
        assert outcome["n_sentences"] == 60
        assert len(outcome["rankings"]) == 3
        stages = ["convert", "drain", "policy", "patch", "submit"]
        assert list(outcome["report"]["stages_ns"]) == stages
    else:
        for expected in ("largest difference from eager", "slots changed", "lower bound"):
            assert expected in result.stdout
    assert torch.is_grad_enabled()
