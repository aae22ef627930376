"""Recording a model whose weights are in files: nothing is computed, and nothing is in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from stored import save_weights, without_memory
from stored_models import MODELS, mlp
from torch import nn

import offload
from offload.interpreter.eager_run import EagerRun
from offload.program import Bindings, BoundProgram


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any, torch.Tensor, Path]:
    """A model in memory, the same without memory, an input, the folder of its weights."""
    build, make = MODELS[request.param]
    model = build().eval()
    save_weights(model, tmp_path)
    return model, without_memory(build), make(), tmp_path


def run_eagerly(bound: BoundProgram, folder: Path, given: torch.Tensor) -> list[torch.Tensor]:
    """The results of a Program by plain torch calls, with its weights read from the file."""
    program, bindings = bound.program, bound.bindings
    content = safetensors.torch.load_file(folder / "model.safetensors")
    bases = {  # cloned, since alignment may decide which kernel runs
        index: (content[one.name].clone().untyped_storage(), 0)
        for index, one in bindings.stored.items()
    }
    bases |= {index: (held[0].untyped_storage(), 0) for index, held in bindings.weights.items()}
    bases |= {view.value: (given.clone().untyped_storage(), 0) for view in program.inputs}
    run = EagerRun(bound, bases, None)
    with torch.no_grad():
        for launch in program.launches:
            run.keep(launch, run.call(launch)())
    return [run.tensor(result.view) for result in program.results]


def test_the_program_computes_what_the_model_does(
    case: tuple[Any, Any, torch.Tensor, Path],
) -> None:
    model, unbuilt, given, folder = case
    with offload.capture(unbuilt, weights=folder) as captured:
        unbuilt(given)
    with torch.no_grad():
        expected = model(given)
    tensors = list(expected.values()) if isinstance(expected, dict) else [expected]
    for got, tensor in zip(run_eagerly(captured.bound, folder, given), tensors, strict=True):
        assert torch.equal(got, tensor)


@pytest.mark.slow
def test_the_launches_are_those_of_a_recording_in_memory(
    case: tuple[Any, Any, torch.Tensor, Path],
) -> None:
    model, unbuilt, given, folder = case
    with torch.no_grad():
        in_memory = offload.capture(model, given)
    captured = offload.capture(unbuilt, given, weights=folder)
    program, stored = captured.program, captured.bindings.stored
    operators = [launch.name for launch in program.launches]
    kept = [launch.name for launch in in_memory.program.launches]
    literals = {"aten::clone", "aten::sum"}  # folded where they have content
    assert [one for one in operators if one not in literals] == [
        one for one in kept if one not in literals
    ]
    read = {view.value for launch in program.launches for view in launch.views()}
    assert stored.keys() <= read
    held = in_memory.bindings
    assert len(stored) == len(held.weights) - len(in_memory_alone(held, model))


def in_memory_alone(bindings: Bindings, model: nn.Module) -> list[torch.Tensor]:
    """In-memory weights of a recording that the model does not hold: folded constants."""
    state = {tensor.data_ptr() for tensor in model.state_dict().values()}
    held = [tensors[0] for tensors in bindings.weights.values()]
    return [tensor for tensor in held if tensor.data_ptr() not in state]


@pytest.mark.slow
def test_the_model_is_as_it_was(case: tuple[Any, Any, torch.Tensor, Path]) -> None:
    _, unbuilt, given, folder = case
    before = dict(unbuilt.named_parameters(remove_duplicate=False))
    buffers = dict(unbuilt.named_buffers())
    offload.capture(unbuilt, given, weights=folder)
    after = dict(unbuilt.named_parameters(remove_duplicate=False))
    assert all(after[name] is one for name, one in before.items())
    assert all(dict(unbuilt.named_buffers())[name] is one for name, one in buffers.items())
    with pytest.raises(ZeroDivisionError):
        offload.capture(Failing(unbuilt), given, weights=prefixed(folder))
    assert all(
        dict(unbuilt.named_parameters(remove_duplicate=False))[name] is one
        for name, one in before.items()
    )


class Failing(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


def prefixed(folder: Path) -> Path:
    """The same weights under their names in `Failing`."""
    content = safetensors.torch.load_file(folder / "model.safetensors")
    target = folder / "prefixed.safetensors"
    safetensors.torch.save_file({f"model.{name}": one for name, one in content.items()}, target)
    return target


def test_a_model_in_memory_is_recorded_without_being_computed(tmp_path: Path) -> None:
    model = mlp().eval()
    save_weights(model, tmp_path)
    called = []
    model[0].register_forward_hook(lambda module, args, result: called.append(type(result)))
    captured = offload.capture(model, torch.randn(3, 16), weights=tmp_path)
    assert [one.__name__ for one in called] == ["FakeTensor"] * 2  # tried, then recorded
    assert not captured.bindings.weights
    assert captured.recorded_result.shape == (3, 4)


def test_what_is_in_no_file_must_be_in_memory(tmp_path: Path) -> None:
    model = mlp().eval()
    save_weights(model, tmp_path)
    unbuilt = without_memory(mlp)
    unbuilt.register_buffer("offset", torch.randn(4), persistent=False)
    unbuilt.forward = lambda x: nn.Sequential.forward(unbuilt, x) + unbuilt.offset
    given = torch.randn(3, 16)
    bound = offload.capture(unbuilt, given, weights=tmp_path).bound
    held = [tensor for tensors in bound.bindings.weights.values() for tensor in tensors]
    assert any(tensor is unbuilt.offset for tensor in held)
    (got,) = run_eagerly(bound, tmp_path, given)
    with torch.no_grad():
        assert torch.equal(got, model(given) + unbuilt.offset)
    unbuilt.offset = torch.empty(4, device="meta")
    with pytest.raises(offload.FileError, match=r"lack 1 of .* offset float32\[4\].*outside of"):
        offload.capture(unbuilt, given, weights=tmp_path)


def test_a_tensor_that_a_closure_holds_is_a_weight_in_memory(tmp_path: Path) -> None:
    model = mlp().eval()
    save_weights(model, tmp_path)
    table = torch.randn(8, 4)

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = without_memory(mlp)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x) + table[2:5] * table.view(4, 8)[0, 1]

    given = torch.randn(3, 16)
    content = safetensors.torch.load_file(tmp_path / "model.safetensors")
    renamed = {f"model.{name}": one for name, one in content.items()}
    safetensors.torch.save_file(renamed, tmp_path / "model.safetensors")
    bound = offload.capture(Looking(), given, weights=tmp_path).bound
    assert [one.untyped_storage().data_ptr() for (one,) in bound.bindings.weights.values()] == [
        table.data_ptr()
    ]
    (got,) = run_eagerly(bound, tmp_path, given)
    with torch.no_grad():
        assert torch.equal(got, model(given) + table[2:5] * table.view(4, 8)[0, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda content: content | {"0.weight": torch.ones(16, 32)},
            r"0.weight is float32\[16, 32\]",
        ),
        (lambda content: {n: t.half() for n, t in content.items()}, "is float16"),
        (lambda content: {n: t for n, t in content.items() if n != "2.bias"}, "2.bias float32"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    content = change(dict(mlp().state_dict()))
    safetensors.torch.save_file(content, tmp_path / "model.safetensors")
    with pytest.raises(offload.FileError, match=message):
        offload.capture(without_memory(mlp), torch.randn(3, 16), weights=tmp_path)


def test_reads_on_the_host_are_refused(tmp_path: Path) -> None:
    class Reading(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if super().forward(x).sum().item() > 0 else -x

    save_weights(Reading(4, 4), tmp_path)
    with torch.device("meta"):
        model = Reading(4, 4)
    with pytest.raises(offload.CaptureError, match="reads a tensor's value on the host"):
        offload.capture(model, torch.randn(2, 4), weights=tmp_path)
    with pytest.raises(offload.CaptureError, match="no values to read"):
        offload.capture(model, torch.randn(2, 4), weights=tmp_path, host_reads="guard")


def test_a_function_has_no_names_for_weights(tmp_path: Path) -> None:
    save_weights(mlp(), tmp_path)
    with pytest.raises(offload.CaptureError, match=r"capture the nn.Module itself, not a function"):
        offload.capture(lambda x: x + 1, torch.randn(2), weights=tmp_path)


def test_a_program_without_its_weights_cannot_be_saved(tmp_path: Path) -> None:
    save_weights(mlp(), tmp_path)
    captured = offload.capture(without_memory(mlp), torch.randn(3, 16), weights=tmp_path)
    with pytest.raises(offload.FileError, match=r"0.weight is in .*model.safetensors"):
        captured.save(tmp_path / "program.offload")
    assert not (tmp_path / "program.offload").exists()
