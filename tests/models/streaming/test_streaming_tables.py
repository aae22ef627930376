"""Tables whose rows are gathered: the same bits, exact counts, and typed errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from budgets import budgets_of, floor_of, weight_bytes
from cost_models import NO_HEADER
from stored import save_weights, without_memory
from torch import nn
from torch.nn import functional

import offload
from offload.api.captured import Captured
from offload.backends.cpu import builder as cpu
from offload.backends.cpu.streaming import CpuWeights
from offload.program import StoredTensor
from offload.timeline import SpanKind

N_WORDS, WIDTH = 1000, 64
TABLE_BYTES, ROW_BYTES = N_WORDS * WIDTH * 4, WIDTH * 4


class Encoder(nn.Module):
    """Words, positions looked up by the model's own indices, layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(N_WORDS, WIDTH, padding_idx=0)
        self.places = nn.Embedding(512, WIDTH)
        self.register_buffer("numbers", torch.arange(2048))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(self.numbers[: ids.shape[-1]])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class TwoTexts(Encoder):
    """Two inputs that share one table."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + super().forward(ids.flip(-1))


class Tied(Encoder):
    """The table of words is also the output's weight."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.linear(super().forward(ids), self.words.weight)


def ids_of(shape: tuple[int, ...] = (2, 7), dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, N_WORDS, shape, dtype=dtype)


@pytest.fixture(params=["file", "memory"])
def capture(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """A model in memory, and a capture of it with its weights in a file or in memory."""

    def make(build: type[nn.Module], given: torch.Tensor) -> tuple[nn.Module, Captured]:
        model = build().eval()
        if request.param == "memory":
            with torch.no_grad():
                return model, offload.capture(model, given)
        save_weights(model, tmp_path)
        return model, offload.capture(without_memory(build), given, weights=tmp_path)

    return make


@pytest.fixture
def stored(tmp_path: Path) -> tuple[nn.Module, Captured, Path]:
    model = Encoder().eval()
    save_weights(model, tmp_path)
    captured = offload.capture(without_memory(Encoder), ids_of(), weights=tmp_path)
    return model, captured, tmp_path / "model.safetensors"


def tables_of(run: Any) -> dict[str, int]:
    """The number of rows that an execution gathers, by the table's name."""
    rows: dict[str, int] = {}
    for one in run.streaming.plan.gathers:
        name = run.program.values[one.value].name
        rows[name] = rows.get(name, 0) + one.n_rows
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(7,), (2, 7), (1, 2, 7), (2, 0)])
def test_every_budget_gives_the_same_bits(
    capture: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    _, captured = capture(Encoder, ids_of(shape, dtype))
    inputs = [ids_of(shape, dtype) for _ in range(3)]
    with captured.load() as run:
        expected = [run(one).clone() for one in inputs]
    assert floor_of(captured) < TABLE_BYTES // 2
    for budget in budgets_of(captured):
        with captured.load(weights_budget=budget) as run:
            plan = run.streaming.plan
            tables = {one.value for one in plan.gathers}
            others_bytes = weight_bytes(run.program) - sum(
                run.program.values[value].size_bytes for value in tables
            )
            for turn in range(2):
                for given, wanted in zip(inputs, expected, strict=True):
                    assert torch.equal(run(given), wanted), turn
                    assert run.last_execution.bytes_streamed == plan.streamed_bytes
            assert plan.transfer_bytes == others_bytes - plan.resident_bytes
            if budget < TABLE_BYTES:
                assert tables_of(run)["words.weight"] == ids_of(shape).numel()
                assert plan.gathered_bytes == ROW_BYTES * sum(tables_of(run).values())
            modes = [one.mode for one in run.launch_reports()]
            assert modes.count("gathered") == len(plan.gathers)
            assert run.proof.n_launches == len(modes) - modes.count("call")


def test_indices_that_do_not_lie_side_by_side(capture: Any) -> None:
    _, captured = capture(Encoder, ids_of((7, 2)).t())
    given = ids_of((7, 2)).t()
    with captured.load() as run:
        expected = run(given).clone()
    with captured.load(weights_budget=floor_of(captured)) as run:
        assert torch.equal(run(given), expected)


@pytest.mark.parametrize("scheduling", ["offload", "host"])
def test_an_index_out_of_range_fails_the_launch(capture: Any, scheduling: str) -> None:
    model, captured = capture(Encoder, ids_of())
    good = ids_of()
    with captured.load() as run:
        expected = run(good).clone()
    with captured.load(weights_budget=floor_of(captured), scheduling=scheduling) as run:
        for turn in range(2):  # the first execution proves launches, others do not
            for index in (N_WORDS, -1, 2**62, -(2**62)):
                bad = good.clone()
                bad[1, 3] = index
                with pytest.raises(IndexError, match="index out of range in self"):
                    model(bad)
                message = f"aten::embedding: index out of range in self: .*words.*got index {index}"
                with pytest.raises(offload.ExecutionError, match=message):
                    run(bad)
            assert torch.equal(run(good), expected), turn
            assert run.last_execution.bytes_streamed == run.streaming.plan.streamed_bytes


def test_addresses_may_be_new_and_executions_submitted(capture: Any) -> None:
    _, captured = capture(Encoder, ids_of())
    inputs = [ids_of() for _ in range(6)]
    with captured.load() as run:
        expected = [run(one).clone() for one in inputs]
    with captured.load(weights_budget=floor_of(captured)) as run:
        outputs = [torch.empty(2, 7, WIDTH) for _ in inputs]
        arenas = [torch.empty(run.feature_map_bytes, dtype=torch.uint8) for _ in inputs]
        tickets = [
            run.submit(one, out=out, feature_map=arena)
            for one, out, arena in zip(inputs, outputs, arenas, strict=True)
        ]
        for ticket, out, wanted in zip(tickets, outputs, expected, strict=True):
            assert ticket.result() is out
            assert torch.equal(out, wanted)


def test_two_embeddings_that_share_a_table(capture: Any) -> None:
    model, captured = capture(TwoTexts, ids_of())
    given = ids_of()
    with captured.load(weights_budget=floor_of(captured)) as run, torch.no_grad():
        torch.testing.assert_close(run(given), model(given))
        assert tables_of(run)["words.weight"] == 2 * given.numel()
        assert run.last_execution.bytes_streamed == run.streaming.plan.streamed_bytes
        assert f"words.weight {2 * given.numel()} rows of 256 bytes" in run.streaming.explain()


def test_a_table_that_a_linear_layer_reads_is_not_gathered(capture: Any) -> None:
    model, captured = capture(Tied, ids_of())
    given = ids_of()
    assert floor_of(captured) > TABLE_BYTES
    for budget in (floor_of(captured), weight_bytes(captured.program) - 1):
        with captured.load(weights_budget=budget) as run, torch.no_grad():
            torch.testing.assert_close(run(given), model(given))
            assert "words.weight" not in tables_of(run)


def test_a_table_that_the_result_shows_is_not_gathered(capture: Any) -> None:
    class Showing(Encoder):
        def forward(self, ids: torch.Tensor) -> Any:
            return super().forward(ids), self.words.weight[1:]

    model, captured = capture(Showing, ids_of())
    assert floor_of(captured) > TABLE_BYTES
    with captured.load(weights_budget=floor_of(captured)) as run:
        assert torch.equal(run(ids_of())[1], model.words.weight[1:])
        assert "words.weight" not in tables_of(run)


def test_a_device_that_cannot_gather_does_not(
    capture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, captured = capture(Encoder, ids_of())
    assert floor_of(captured) < TABLE_BYTES
    monkeypatch.setattr(CpuWeights, "gathers_rows", False)
    assert floor_of(captured) > TABLE_BYTES
    with captured.load(weights_budget=floor_of(captured)) as run:
        assert not run.streaming.plan.gathers


def test_what_is_gathered_is_proved(capture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, captured = capture(Encoder, ids_of())
    budget = floor_of(captured)

    def shifted(*args: Any) -> dict[int, tuple[int, int, int, int]]:
        return {
            launch: (number, offset_bytes + ROW_BYTES, n_rows - 1, row_bytes)
            for launch, (number, offset_bytes, n_rows, row_bytes) in tables(*args).items()
        }

    tables = cpu.gathered_tables
    monkeypatch.setattr(cpu, "gathered_tables", shifted)
    given = torch.full((2, 7), 5)
    with (
        captured.load(weights_budget=budget) as run,
        pytest.raises(offload.ExecutionError, match="embedding: the rows that were gathered are"),
    ):
        run(given)


# ---- the store changes --------------------------------------------------------------------------


def test_a_table_in_memory_that_is_written_is_seen() -> None:
    model, given = Encoder().eval(), ids_of()
    with torch.no_grad():
        captured = offload.capture(model, given)
        for budget in (floor_of(captured), weight_bytes(captured.program) // 2):
            with captured.load(weights_budget=budget) as run:
                assert "words.weight" in tables_of(run)
                assert torch.equal(run(given), model(given))
                model.words.weight.mul_(-0.5)
                assert torch.equal(run(given), model(given))
                model.words.weight.data.add_(1)  # not counted
                run.streaming.refresh()
                assert torch.equal(run(given), model(given))
                model.words.weight.data = torch.randn(N_WORDS, WIDTH)
                with pytest.raises(offload.BindingError, match=r"words.weight: its storage was"):
                    run(given)
                run.rebind_weights()
                assert torch.equal(run(given), model(given))


def test_memory_that_was_freed_is_refused() -> None:
    model, given = Encoder().eval(), ids_of()
    with torch.no_grad():
        captured = offload.capture(model, given)
    floor = floor_of(captured)
    with captured.load(weights_budget=floor) as run:
        with pytest.raises(RuntimeError, match="not resizable"):  # rows are read at any time
            model.words.weight.untyped_storage().resize_(0)
        torch.testing.assert_close(run(given), model(given))
    model.words.weight.untyped_storage().resize_(0)
    with pytest.raises(offload.BindingError, match=r"words\.weight"):
        captured.load(weights_budget=floor)


def test_a_table_is_replaced(stored: Any, tmp_path: Path) -> None:
    model, captured, _ = stored
    given = ids_of()
    new = torch.randn(N_WORDS, WIDTH)
    path = tmp_path / "other"
    path.write_bytes(b"1234" + new.neg().numpy().tobytes())
    in_file = StoredTensor("words", str(path), 4, TABLE_BYTES, (N_WORDS, WIDTH), "float32")
    with captured.load(weights_budget=floor_of(captured)) as run, torch.no_grad():
        for content, tensor in ((new, new), (in_file, new.neg())):
            model.words.weight.copy_(tensor)
            run.streaming.replace({"words.weight": content})
            for _ in range(2):
                torch.testing.assert_close(run(given), model(given))
                assert run.last_execution.bytes_streamed == run.streaming.plan.streamed_bytes
        with pytest.raises(offload.BindingError, match=r"words.weight: expected float32\[1000, 64"):
            run.streaming.replace({"words.weight": torch.zeros(3, WIDTH)})
        torch.testing.assert_close(run(given), model(given))


def test_a_changed_file_is_refused_until_it_is_read_again(stored: Any) -> None:
    model, captured, path = stored
    given = ids_of()
    for budget in (floor_of(captured), weight_bytes(captured.program) // 2):
        with captured.load(weights_budget=budget) as run, torch.no_grad():
            torch.testing.assert_close(run(given), model(given))
            model.words.weight.mul_(-2)
            content = safetensors.torch.save(dict(model.state_dict()))
            with path.open("r+b") as file:
                file.write(content)
            with pytest.raises(offload.ExecutionError, match="it was written after it was opened"):
                _ = [run(given) for _ in range(3)]
            run.streaming.refresh()
            torch.testing.assert_close(run(given), model(given))


def test_a_file_that_became_short_fails_the_launch(stored: Any) -> None:
    _, captured, path = stored
    content, given = path.read_bytes(), ids_of()
    with captured.load() as run:
        expected = run(given).clone()
    whole_but_tables = weight_bytes(captured.program) // 2
    with captured.load(weights_budget=whole_but_tables) as run:
        assert not run.streaming.plan.transfers
        assert torch.equal(run(given), expected)
        os.truncate(path, 3000)
        for _ in range(2):
            with pytest.raises(
                offload.ExecutionError, match=r"embedding: .*model.safetensors: (expected|it was)"
            ):
                run(given)
        path.write_bytes(content)
        run.streaming.refresh()
        for _ in range(2):
            assert torch.equal(run(given), expected)
            assert run.last_execution.bytes_streamed == run.streaming.plan.gathered_bytes


def test_a_file_that_is_deleted_stays_readable(stored: Any) -> None:
    _, captured, path = stored
    given = ids_of()
    with captured.load() as run:
        expected = run(given).clone()
    with captured.load(weights_budget=floor_of(captured)) as run:
        path.unlink()
        assert torch.equal(run(given), expected)


def test_forks_gather_for_themselves(capture: Any) -> None:
    _, captured = capture(Encoder, ids_of())
    inputs = [ids_of() for _ in range(4)]
    with captured.load() as run:
        expected = [run(one).clone() for one in inputs]
    with captured.load(weights_budget=floor_of(captured)) as run:
        run(inputs[0])
        child = os.fork()
        if child == 0:
            right = [
                torch.equal(run(one), wanted) for one, wanted in zip(inputs, expected, strict=True)
            ]
            os._exit(0 if all(right) else 1)
        for one, wanted in zip(inputs, expected, strict=True):
            assert torch.equal(run(one), wanted)
        assert os.waitpid(child, 0)[1] == 0


# ---- its reports ---------------------------------------------------------------------------------


def test_what_is_gathered_is_told(capture: Any, request: pytest.FixtureRequest) -> None:
    _, captured = capture(Encoder, ids_of())
    with captured.load(weights_budget=floor_of(captured)) as run:
        run(ids_of())
        moved_bytes = run.streaming.bytes_moved
        run(ids_of())
        assert run.streaming.bytes_moved - moved_bytes >= run.streaming.plan.gathered_bytes
        way = "through the page cache" if "file" in request.node.name else "from memory"
        line = f"gathered: words.weight 14 rows of 256 bytes, 3.50 KiB of 250.00 KiB {way}"
        assert line in run.streaming.explain()
        text = run.streaming.explain()
    assert "of tables 5.25 KiB of rows are gathered" in text
    assert "gathered: words.weight 14 rows" in run.streaming.explain()  # closed


def test_gathering_is_a_wait_in_timelines(stored: Any) -> None:
    _, captured, _ = stored
    with captured.load(weights_budget=weight_bytes(captured.program) // 2) as run:
        run(ids_of())
        with run.timeline(NO_HEADER) as timeline:
            run(ids_of())
        gathers = {one.launch for one in run.streaming.plan.gathers}
        last = run.last_execution
    (one,) = timeline.executions
    assert gathers
    assert {span.launch for span in one.of_kind(SpanKind.WAIT)} == gathers
    assert sum(span.duration_ns for span in one.of_kind(SpanKind.WAIT)) == last.stream_wait_ns
    predicted = [span for span in one.predicted if span.kind is SpanKind.WAIT]
    assert {span.launch for span in predicted} == gathers
    assert all(span.duration_ns > 0 for span in predicted)


def test_auto_gathers_where_little_is_free(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, captured, _ = stored
    monkeypatch.setattr(CpuWeights, "free_bytes", lambda *_: TABLE_BYTES // 2)
    given = ids_of()
    with captured.load(weights_budget="auto") as run, torch.no_grad():
        assert "words.weight" in tables_of(run)
        torch.testing.assert_close(run(given), model(given))
