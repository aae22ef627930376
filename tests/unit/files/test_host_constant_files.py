"""Host constants in files: saved with the Program, opened as separate tensors on the CPU."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.files import open_saved, save_program
from offload.load import dump as dumping
from offload.program import BoundProgram, Role, encode_program

NAN_WITH_PAYLOAD = torch.tensor(0x7FC01234, dtype=torch.int32).view(torch.float32)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(NAN_WITH_PAYLOAD.clone())
        self.shift = torch.tensor(1 - 2j)
        self.linear = nn.Linear(3, 3)

    def forward(self, x, factor):
        return self.linear(x) * self.scale * self.shift * factor


def make(model: Scaled, factor: torch.Tensor) -> BoundProgram:
    """Record as on a GPU, with the tensors of no dimensions on the CPU."""
    captured = offload.capture(model, torch.ones(2, 3), factor)
    program = captured.program
    contents = {index: held[0] for index, held in captured.bindings.weights.items()}
    contents[program.inputs[1].value] = factor
    values = [
        value
        if value.shape or value.index not in contents
        else dataclasses.replace(
            value,
            host_content=bytes(
                contents[value.index].detach().reshape(1).view(torch.uint8).tolist()
            ),
        )
        for value in program.values
    ]
    program = dataclasses.replace(program, values=tuple(values), device="cuda", device_index=1)
    return BoundProgram(program, captured.bindings)


@pytest.fixture
def model() -> Scaled:
    return Scaled()


@pytest.fixture
def bound(model) -> BoundProgram:
    return make(model, torch.tensor(-0.0))


def test_they_come_back_as_they_were_recorded(bound, tmp_path):
    path = tmp_path / "m.offload"
    save_program(bound, path)
    opened = open_saved(path).bound
    assert opened.program.values == bound.program.values
    contents = {one.name: one.host_content for one in opened.program.values if one.on_host}
    assert sorted(contents) == ["args[1]", "scale", "shift"]
    for value in opened.program.of_role(Role.WEIGHT):
        (held,) = opened.bindings.weights[value.index]
        if value.host_content is not None:
            assert held.device.type == "cpu"
            assert held.shape == ()
            assert bytes(held.untyped_storage()) == value.host_content
            held.fill_(3)  # separate from the Program's content
    assert contents["scale"] == (0x7FC01234).to_bytes(4, "little")
    assert open_saved(path).bound.program.values == bound.program.values
    with zipfile.ZipFile(path) as archive:  # their bytes are only in the program
        n_bytes = sum(
            one.size_bytes for one in bound.program.of_role(Role.WEIGHT) if not one.on_host
        )
        header = archive.read("weights.safetensors")
        assert len(header) - 8 - int.from_bytes(header[:8], "little") == n_bytes


def test_a_file_says_nothing_of_which_gpu_it_was(bound, tmp_path):
    save_program(bound, tmp_path / "one")
    save_program(
        dataclasses.replace(bound, program=dataclasses.replace(bound.program, device_index=0)),
        tmp_path / "other",
    )
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    if not torch.cuda.is_available():
        assert open_saved(tmp_path / "one").bound.program.device_index is None


def test_one_that_has_changed_cannot_be_saved(model, bound, tmp_path):
    with torch.no_grad():
        model.scale.fill_(math.nan)  # another NaN
    with pytest.raises(offload.FileError, match="scale has another value since the capture"):
        save_program(bound, tmp_path / "m.offload")
    with torch.no_grad():
        model.scale.copy_(NAN_WITH_PAYLOAD)
    save_program(bound, tmp_path / "m.offload")


def test_programs_without_any_are_written_as_ever(tmp_path):
    captured = offload.capture(torch.sin, torch.ones(3))
    captured.save(tmp_path / "m.offload")
    with zipfile.ZipFile(tmp_path / "m.offload") as archive:
        assert "host_content" not in archive.read("program.json").decode()


def value_of(root: Any, name: str) -> Any:
    return next(one for one in root["values"] if one["name"] == name)


def set_content(content: Any) -> Callable[[Any], None]:
    return lambda root: value_of(root, "scale").update(host_content=content)


def set_device(root: Any) -> None:
    root["device"] = "cpu"


def written(root: Any) -> None:
    index = root["values"].index(value_of(root, "scale"))
    root["launches"][1]["writes"].append(index)


def returned(root: Any) -> None:
    index = root["values"].index(value_of(root, "args[1]"))
    root["results"][0]["view"] = root["inputs"][1] | {"value": index}


def activation(root: Any) -> None:
    index = root["launches"][0]["writes"][0]
    root["values"][index]["host_content"] = "00000000"


def larger(root: Any) -> None:
    value_of(root, "scale").update(size_bytes=8, host_content="00" * 8)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (set_content("0000"), "has 2 bytes, and its size is 4"),
        (set_content("000000zz"), "expected bytes as hexadecimal digits"),
        (set_content("000"), "expected bytes as hexadecimal digits"),
        (set_content(None), "expected a string"),
        (set_device, "has the role input in a program on cpu"),
        (written, "is written or returned"),
        (returned, "is written or returned"),
        (activation, "has the role activation in a program on cuda"),
        (larger, "not a single float32"),
    ],
)
def test_lies_are_refused(bound, tmp_path, lie, message):
    path = tmp_path / "m.offload"
    save_program(bound, path)
    with pytest.raises(offload.FileError, match=message):
        open_saved(tampered(path, lie))


def tampered(path: Path, lie: Callable[[Any], None]) -> Path:
    with zipfile.ZipFile(path) as archive:
        root = json.loads(archive.read("program.json"))
        weights = archive.read("weights.safetensors")
    lie(root)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        target.writestr("program.json", json.dumps(root))
        target.writestr("weights.safetensors", weights)
    path.write_bytes(buffer.getvalue())
    return path


def test_dumps_keep_host_constants_without_their_content() -> None:
    small = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    program = offload.capture(small, torch.randn(2, 8)).program
    weight = next(value for value in program.values if value.name == "2.bias")
    data = encode_program(program)
    data["values"][weight.index] |= {"host_content": "00112233"}
    written = dumping._without_content(data)
    assert "00112233" not in json.dumps(written)
    assert written["values"][weight.index]["on_host"] is True
    assert data["values"][weight.index]["host_content"] == "00112233"
    assert all("on_host" not in one for one in written["values"] if one["name"] != "2.bias")
