"""New content of weights, and the executions that see it."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from budgets import floor_of, weight_bytes
from stored import save_weights, without_memory
from stored_models import mlp
from torch import nn

import offload
from offload.run import Executable


def test_weights_are_replaced_in_place(tmp_path: Path) -> None:
    model, other = mlp().eval(), mlp().eval()
    save_weights(model, tmp_path)
    captured = offload.capture(without_memory(mlp), torch.randn(3, 16), weights=tmp_path)
    given = torch.randn(3, 16)
    for budget in (floor_of(captured), 10**9):
        with captured.load(weights_budget=budget) as run, torch.no_grad():
            run(given)
            n_executions = run.last_execution.n_executions
            new = {name: tensor.clone() for name, tensor in other.state_dict().items()}
            run.streaming.replace(new)
            torch.testing.assert_close(run(given), other(given))
            assert run.last_execution.n_executions == n_executions + 1
            with pytest.raises(offload.BindingError, match=r"0.weight: expected float32\[32, 16\]"):
                run.streaming.replace({"2.bias": torch.zeros(4), "0.weight": torch.ones(2)})
            torch.testing.assert_close(run(given), other(given))
            with pytest.raises(offload.BindingError, match="no weight of this name"):
                run.streaming.replace({"3.weight": torch.ones(2)})
            for content, message in [
                (dict.fromkeys(new, 0), r"0\.weight: expected a tensor or .*, got a int"),
                ({"0.weight": new["0.weight"].numpy()}, "expected a tensor or .*, got a ndarray"),
                ({"0.weight": new["0.weight"].to("meta")}, "with content, got one on meta"),
                ({"0.weight": new["0.weight"].to_sparse()}, "dense tensor .*torch.sparse_coo"),
                ([new["0.weight"]], "by the names of weights, got a list"),
            ]:
                with pytest.raises(offload.BindingError, match=message):
                    run.streaming.replace(content)
            torch.testing.assert_close(run(given), other(given))


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_was_submitted_before_has_the_old_content(tmp_path: Path, in_memory: bool) -> None:
    model, other = layers(), layers()
    save_weights(model, tmp_path)
    given = torch.randn(4, 128)
    captured = offload.capture(model, given, **({} if in_memory else {"weights": tmp_path}))
    new = {name: one.detach() for name, one in other.state_dict().items()}
    with torch.no_grad():
        before, after = model(given), other(given)
    for budget in (floor_of(captured), weight_bytes(captured.program) // 2, 10**9):
        with captured.load(weights_budget=budget) as run:
            if run.streaming is None:  # the model's tensors are used in place
                continue
            tickets = [run.submit(given) for _ in range(20)]
            run.streaming.replace(new)
            later = [run.submit(given) for _ in range(3)]
            for ticket in tickets:
                torch.testing.assert_close(ticket.result(), before)
            for ticket in later:
                torch.testing.assert_close(ticket.result(), after)


def test_replacing_from_another_thread_waits_for_what_was_submitted(tmp_path: Path) -> None:
    model, other = layers(), layers()
    save_weights(model, tmp_path)
    given = torch.randn(4, 128)
    captured = offload.capture(without_memory(layers), given, weights=tmp_path)
    states = [dict(one.state_dict()) for one in (model, other)]
    with torch.no_grad():
        expected = [model(given), other(given)]
    with captured.load(weights_budget=floor_of(captured)) as run:

        def replace() -> None:
            for turn in range(20):
                run.streaming.replace(states[1 - turn % 2])
                run.streaming.refresh()

        thread = threading.Thread(target=replace)
        thread.start()
        while thread.is_alive():
            for ticket in [run.submit(given) for _ in range(5)]:
                assert any(torch.allclose(ticket.result(), one, atol=1e-5) for one in expected)
        thread.join()
        torch.testing.assert_close(run(given), expected[0])
    with pytest.raises(offload.ExecutionError, match="closed"):
        run.streaming.replace(states[0])
    with pytest.raises(offload.ExecutionError, match="closed"):
        run.streaming.refresh()


def test_a_launch_cannot_replace_weights_of_its_own_executable(tmp_path: Path) -> None:
    """It would wait for its own end."""
    running: list[Executable] = []

    @torch.library.custom_op("offload_tests::replacing", mutates_args=())
    def replacing(x: torch.Tensor) -> torch.Tensor:
        if running:
            running[0].streaming.replace({"weight": torch.zeros(8, 8)})
        return x.clone()

    @replacing.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Replacing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return replacing(super().forward(x))

    model, given = Replacing(8, 8), torch.randn(2, 8)
    save_weights(model, tmp_path)
    with offload.capture(model, given, weights=tmp_path).load() as run, torch.no_grad():
        torch.testing.assert_close(run(given), model(given))
        running.append(run)
        for execute in (run, lambda x: run.submit(x).result()):
            with pytest.raises(offload.ExecutionError, match="executes the executable itself"):
                execute(given)
        tickets = [run.submit(given) for _ in range(3)]
        with pytest.raises(offload.ExecutionError, match="executes the executable itself"):
            run(given)
        for ticket in tickets:
            with pytest.raises(offload.ExecutionError, match="executes the executable itself"):
                ticket.wait()
        running.clear()
        torch.testing.assert_close(run(given), model(given))


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    model = mlp().eval()
    save_weights(model, tmp_path)
    captured = offload.capture(without_memory(mlp), torch.randn(3, 16), weights=tmp_path)
    given = torch.randn(3, 16)
    with captured.load(weights_budget=floor_of(captured)) as run, torch.no_grad():
        run(given)
        for parameter in model.parameters():
            parameter.mul_(2)
        path = tmp_path / "model.safetensors"
        content = safetensors.torch.save(dict(model.state_dict()))
        with path.open("r+b") as file:
            file.write(content)
        run.streaming.refresh()
        torch.testing.assert_close(run(given), model(given))


def test_replaced_weights_lie_as_the_old_ones_did() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 32).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    given, new = torch.randn(2, 32), torch.randn(32, 64)
    captured = offload.capture(Transposed(), given)
    with captured.load(weights_budget="1MiB") as run:
        run.streaming.replace({"weight": new})
        torch.testing.assert_close(run(given), given @ new)


def test_several_weights_are_replaced_together_or_not_at_all(tmp_path: Path) -> None:
    model = mlp().eval()
    save_weights(model, tmp_path)
    given = torch.randn(3, 16)
    captured = offload.capture(model, given, weights=tmp_path)
    gone = next(one for one in captured.bindings.stored.values() if one.name == "2.bias")
    gone = dataclasses.replace(gone, path=str(tmp_path / "gone"))
    with captured.load() as run, torch.no_grad():
        with pytest.raises(offload.FileError, match="gone"):
            run.streaming.replace({"0.weight": torch.zeros(32, 16), "2.bias": gone})
        torch.testing.assert_close(run(given), model(given))
