"""Identities that a recording under fake tensors must keep apart, and files that change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from stored import save_weights, without_memory
from torch import nn

import offload


class Shared(nn.Module):
    """Two Parameters on one memory, and a view of it that no module knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = nn.Parameter(self.first.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.part = self.linear.weight.data[:3]

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x), self.part * 2


class Listing(nn.Module):
    """Also holds a parameter in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.tied = [self.linear.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.tied[0]


class Seeding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.generator.manual_seed(7)
        return self.linear(x) + torch.rand(4, generator=self.generator)


@pytest.mark.parametrize("model_class", [Shared, Viewing])
def test_memory_that_a_file_stands_for_in_part_is_refused(
    tmp_path: Path, model_class: type[nn.Module]
) -> None:
    content = {name: one.clone() for name, one in model_class().state_dict().items()}
    safetensors.torch.save_file(content, tmp_path / "model.safetensors")
    with pytest.raises(offload.CaptureError, match="shares memory with"):
        offload.capture(model_class(), torch.randn(2, 8), weights=tmp_path)


def test_a_parameter_in_a_list_is_the_one_in_the_file(tmp_path: Path) -> None:
    model = Listing()
    save_weights(model, tmp_path)
    given = torch.randn(2, 8)
    for other in (Listing(), without_memory(Listing)):
        captured = offload.capture(other, given, weights=tmp_path)
        assert len(captured.bindings.stored) == 1
        assert not captured.bindings.weights
        with captured.load() as run, torch.no_grad():
            torch.testing.assert_close(run(given), model(given))


@pytest.mark.parametrize("layer_class", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_read_the_file(tmp_path: Path, layer_class: Any) -> None:
    def build() -> Any:
        return layer_class(16, 16, 2)

    model = build()
    save_weights(model, tmp_path)
    given = torch.randn(5, 2, 16)
    for other in (build(), without_memory(build)):
        before = list(other._flat_weights)
        captured = offload.capture(other, given, weights=tmp_path)
        assert all(one is now for one, now in zip(before, other._flat_weights, strict=True))
        assert len(captured.bindings.stored) == 8
        with captured.load() as run, torch.no_grad():
            torch.testing.assert_close(run(given)[0], model(given)[0])


def test_a_generator_that_the_call_seeds_is_refused(tmp_path: Path) -> None:
    model = Seeding()
    save_weights(model, tmp_path)
    state = model.generator.get_state()
    with pytest.raises(offload.CaptureError, match="seeds or restores"):
        offload.capture(model, torch.randn(2, 4), weights=tmp_path)
    assert torch.equal(model.generator.get_state(), state)


def test_a_generator_that_the_call_makes_is_refused() -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3, generator=torch.Generator().manual_seed(3))

    with pytest.raises(offload.CaptureError, match="Generator that the call made"):
        offload.capture(draw, torch.zeros(3))


def test_generators_are_left_as_they_were(tmp_path: Path) -> None:
    class Drawing(nn.Linear):
        def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            return super().forward(x) + torch.rand(4, generator=generator)

    model = Drawing(4, 4)
    save_weights(model, tmp_path)
    given, own = torch.randn(2, 4), torch.Generator().manual_seed(5)
    states = own.get_state(), torch.get_rng_state()
    captured = offload.capture(model, given, own, weights=tmp_path)
    assert torch.equal(own.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    with captured.load() as run, torch.no_grad():
        got = run(given, own)
        torch.testing.assert_close(got, model(given, own.manual_seed(5)))


def test_files_with_nothing_of_the_model_are_refused(tmp_path: Path) -> None:
    save_weights(nn.Sequential(nn.Sequential(nn.Linear(4, 4))), tmp_path)
    message = (
        r"lack 2 of the model's 2 tensors: 0\.weight .*that the model does not have: 0\.0\.bias"
    )
    with pytest.raises(offload.FileError, match=message):
        offload.capture(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), weights=tmp_path)


def deep() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def without_one(content: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in content.items() if name != "2.weight"}


def renamed(content: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [name.replace("4.", "last.").replace("5.", "head.") for name in content]
    return dict(zip(names, content.values(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_one, r"lack 1 of the model's 12 tensors: 2\.weight float32\[8, 8\]\. Capture"),
        (
            renamed,
            r"lack 4 .*: 4\.weight .*, 5\.bias float32\[8\]\. They have 4 .*not have: head\.bias",
        ),
        (lambda content: {"0.bias": content["0.bias"]}, r"lack 11 .* and 3 more\."),
    ],
)
@pytest.mark.parametrize("build", [deep, lambda: without_memory(deep)])
def test_what_a_model_in_memory_holds_is_not_taken_for_what_the_files_lack(
    tmp_path: Path, build: Any, change: Any, message: str
) -> None:
    content = change({name: one.clone() for name, one in deep().state_dict().items()})
    safetensors.torch.save_file(content, tmp_path / "model.safetensors")
    with pytest.raises(offload.FileError, match=message):
        offload.capture(build(), torch.randn(2, 8), weights=tmp_path)


class Buffered(nn.Linear):
    """A buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("scale", torch.rand(8))
        self.register_buffer("offset", torch.rand(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.offset


def test_only_buffers_that_are_saved_must_be_in_files(tmp_path: Path) -> None:
    model, given = Buffered(), torch.randn(2, 8)
    content = dict(model.state_dict())
    safetensors.torch.save_file(content, tmp_path / "model.safetensors")
    captured = offload.capture(model, given, weights=tmp_path)
    assert "in memory, and not in the files: offset (32 bytes)" in captured.explain()
    with torch.no_grad():
        torch.testing.assert_close(captured(given), model(given))
    del content["scale"]
    safetensors.torch.save_file(content, tmp_path / "model.safetensors")
    with pytest.raises(offload.FileError, match=r"lack 1 of the model's 4 tensors: scale"):
        offload.capture(Buffered(), given, weights=tmp_path)


def test_an_operator_that_only_computing_could_explain_is_refused(tmp_path: Path) -> None:
    @torch.library.custom_op("offload_tests::opaque_shape", mutates_args=())
    def opaque_shape(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    class Calling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return opaque_shape(super().forward(x))

    save_weights(Calling(4, 4), tmp_path)
    with pytest.raises(offload.CaptureError, match="register a fake implementation"):
        offload.capture(Calling(4, 4), torch.randn(2, 4), weights=tmp_path)


def test_a_script_module_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    save_weights(model, tmp_path)
    scripted = torch.jit.trace(model, torch.randn(2, 4))
    with pytest.raises(offload.CaptureError, match="ScriptModule"):
        offload.capture(scripted, torch.randn(2, 4), weights=tmp_path)


def test_conjugate_inputs_stay_conjugate(tmp_path: Path) -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(8, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model = Scaling()
    save_weights(model, tmp_path)
    given = torch.randn(3, 8, dtype=torch.complex64).conj()
    captured = offload.capture(model, given, weights=tmp_path)
    assert captured.program.inputs[0].conjugate
    with captured.load() as run, torch.no_grad():
        torch.testing.assert_close(run(given), model(given))


def test_a_weight_of_no_bytes(tmp_path: Path) -> None:
    class Joining(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.none = nn.Parameter(torch.zeros(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.none, super().forward(x)])

    model = Joining()
    save_weights(model, tmp_path)
    given = torch.randn(2, 4)
    captured = offload.capture(model, given, weights=tmp_path)
    with captured.load() as run, torch.no_grad():
        torch.testing.assert_close(run(given), model(given))


def test_a_file_with_another_layout_than_when_it_was_captured_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    save_weights(model, tmp_path)
    given = torch.randn(2, 64)
    captured = offload.capture(model, given, weights=tmp_path)
    path, whole = tmp_path / "model.safetensors", (tmp_path / "model.safetensors").read_bytes()
    with captured.load() as run, torch.no_grad():
        safetensors.torch.save_file(dict(model.state_dict()), path, metadata={"step": "1" * 64})
        with pytest.raises(offload.FileError, match=r"0\.\w+ was .* at byte .*capture again"):
            captured.load()
        with pytest.raises(offload.FileError, match="capture again"):
            run.streaming.refresh()
        path.write_bytes(whole)
        run.streaming.refresh()
        torch.testing.assert_close(run(given), model(given))


def test_a_file_that_is_written_while_it_is_used_is_refused_until_it_is_read_again(
    tmp_path: Path,
) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))

    model, other = build(), build()
    save_weights(model, tmp_path)
    given = torch.randn(2, 64)
    captured = offload.capture(without_memory(build), given, weights=tmp_path)
    content = safetensors.torch.save(dict(other.state_dict()))
    with captured.load(weights_budget=2 * 64 * 64 * 4) as run, torch.no_grad():
        torch.testing.assert_close(run(given), model(given))
        assert run.streaming.plan.transfers
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.write(content)
        with pytest.raises(offload.ExecutionError, match="it was written after it was opened"):
            _ = [run(given) for _ in range(3)]
        run.streaming.refresh()
        torch.testing.assert_close(run(given), other(given))


def test_a_parameter_without_a_shape_is_refused(tmp_path: Path) -> None:
    save_weights(nn.Linear(4, 4), tmp_path)
    with pytest.raises(offload.CaptureError, match="weight has no shape yet"):
        offload.capture(nn.LazyLinear(4), torch.randn(2, 4), weights=tmp_path)


def test_buffers_may_be_parts_of_one_memory(tmp_path: Path) -> None:
    class Parts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.whole = torch.arange(80.0).view(10, 8)
            self.register_buffer("head", self.whole[:4].data, persistent=False)
            self.register_buffer("tail", self.whole[6:].data, persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.head - 2 * self.tail + self.whole[3:7]

    model = Parts()
    save_weights(model, tmp_path)
    given = torch.randn(4, 8)
    captured = offload.capture(model, given, weights=tmp_path)
    with captured.load() as run, torch.no_grad():
        torch.testing.assert_close(run(given), model(given))
        model.whole.neg_()
        torch.testing.assert_close(run(given), model(given))


def test_running_statistics_are_written_though_no_schema_says_so(tmp_path: Path) -> None:
    class Norm(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = self.weight, self.bias, self.running_mean, self.running_var
            return torch.ops.aten.native_batch_norm(x, *state, self.training, 0.1, 1e-5)[0]

    save_weights(Norm(8), tmp_path)
    given = torch.randn(4, 8)
    for training, n_written in ((True, 2), (False, 0)):
        captured = offload.capture(Norm(8).train(training), given, weights=tmp_path)
        program = captured.program
        written = {index for launch in program.launches for index in launch.writes}
        assert len(written & captured.bindings.stored.keys()) == n_written


class Tied(nn.Module):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


@pytest.mark.parametrize("build", [Tied, lambda: without_memory(Tied)])
def test_one_tensor_under_two_names_has_one_content(tmp_path: Path, build: Any) -> None:
    model, given = Tied(), torch.arange(5)
    content = {name: one.clone() for name, one in model.state_dict().items()}
    safetensors.torch.save_file(content, tmp_path / "model.safetensors")
    captured = offload.capture(build(), given, weights=tmp_path)
    assert len(captured.bindings.stored) == 1
    with captured.load() as run, torch.no_grad():
        torch.testing.assert_close(run(given), model(given))
    content["head.weight"][-1, -1] += 1
    safetensors.torch.save_file(content, tmp_path / "model.safetensors")
    message = r"embedding\.weight and head\.weight are one tensor in the model, and have different"
    with pytest.raises(offload.FileError, match=message):
        offload.capture(build(), given, weights=tmp_path)


def test_a_dtype_that_torch_lacks_is_refused_where_the_model_asks_for_it(tmp_path: Path) -> None:
    header = {
        "weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]},
        "scales": {"dtype": "F4", "shape": [4], "data_offsets": [64, 66]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(66))
    model, given = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    with offload.capture(model, given, weights=tmp_path).load() as run:
        assert torch.equal(run(given), torch.zeros(2, 4))
    model.register_buffer("scales", torch.zeros(4))
    with pytest.raises(offload.FileError, match=r"scales is F4\[4\].*torch has no such dtype"):
        offload.capture(model, given, weights=tmp_path)
