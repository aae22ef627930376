"""Programs that cannot be saved, and files that cannot be written or opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.files import open_saved, save_program


class Colour:
    """An argument that no file can hold."""


def test_an_object_among_the_arguments_is_named(tmp_path: Path) -> None:
    captured = offload.capture(lambda x, options: x + 1, torch.ones(2), {"colour": Colour()})
    with pytest.raises(offload.FileError, match=r"arguments\[0\]\[1\]\['colour'\] is a .*Colour"):
        save_program(captured.bound, tmp_path / "m.offload")
    assert list(tmp_path.iterdir()) == []


def test_a_generator_of_its_own_cannot_be_saved(tmp_path: Path) -> None:
    generator = torch.Generator()
    captured = offload.capture(lambda x: x + torch.randn(2, generator=generator), torch.ones(2))
    with pytest.raises(offload.FileError, match="generator of its own"):
        save_program(captured.bound, tmp_path / "m.offload")


def test_a_swapped_storage_cannot_be_saved(tmp_path: Path) -> None:
    model, x = torch.nn.Linear(3, 3), torch.ones(1, 3)
    with offload.capture(model) as captured:
        model(x)
    model.weight.data = torch.ones(9, 9)[:3, :3]
    with pytest.raises(offload.FileError, match=r"weight: it has another shape, dtype, strides"):
        save_program(captured.bound, tmp_path / "m.offload")


def test_an_operator_that_is_not_torchs_cannot_be_saved(tmp_path: Path) -> None:
    library = torch.library.Library("offload_test_files", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    captured = offload.capture(torch.ops.offload_test_files.twice, torch.ones(2))
    with pytest.raises(offload.FileError, match="offload_test_files::twice"):
        save_program(captured.bound, tmp_path / "m.offload")
    library._destroy()


def test_containers_nested_too_deeply_cannot_be_saved(tmp_path: Path) -> None:
    nested: Any = torch.ones(1)
    for _ in range(70):
        nested = [nested]
    captured = offload.capture(lambda tree: torch.ones(1) + 1, nested)
    with pytest.raises(offload.FileError, match="nested deeper"):
        save_program(captured.bound, tmp_path / "m.offload")


def test_a_weight_that_cannot_be_allocated_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.offload"
    save_program(offload.capture(torch.nn.Linear(3, 3), torch.ones(1, 3)).bound, path)

    def refuses(size_bytes: int, *, device: torch.device) -> torch.UntypedStorage:
        raise RuntimeError(f"{device} is busy\nException raised from allocate")

    monkeypatch.setattr(torch, "UntypedStorage", refuses)
    with pytest.raises(offload.FileError, match=r"36 bytes cannot be .* cpu: cpu is busy$"):
        open_saved(path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.offload"
    save_program(offload.capture(lambda x: x + 1, torch.ones(2)).bound, path)
    before = path.read_bytes()
    captured = offload.capture(lambda x, options: x + 1, torch.ones(2), Colour())
    with pytest.raises(offload.FileError):
        save_program(captured.bound, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("where", ["missing/m.offload", "taken"])
def test_a_path_that_cannot_be_written_is_a_file_error(tmp_path: Path, where: str) -> None:
    (tmp_path / "taken").mkdir()
    captured = offload.capture(lambda x: x + 1, torch.ones(2))
    with pytest.raises(offload.FileError, match="cannot be written"):
        save_program(captured.bound, tmp_path / where)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
