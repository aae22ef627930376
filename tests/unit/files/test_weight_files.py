"""Where tensors lie in safetensors files: as the library writes them, refused when damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from offload.errors import FileError
from offload.files import find_stored_tensors, has_same_content
from offload.interpreter.torch_names import find_dtype
from offload.program import StoredTensor

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
    torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def content_of(stored: StoredTensor) -> torch.Tensor:
    with Path(stored.path).open("rb") as file:
        file.seek(stored.offset_bytes)
        content = bytearray(file.read(stored.size_bytes))
    tensor = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
    return tensor.view(find_dtype(stored.dtype)).reshape(stored.shape)


def write(path: Path, header: Any, content: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def test_every_dtype_and_shape_is_found_where_the_library_has_written_it(tmp_path: Path) -> None:
    tensors = {str(one): torch.arange(12).reshape(3, 4).to(one) for one in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = find_stored_tensors(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        content = content_of(found[name])
        assert content.dtype == tensor.dtype
        assert content.shape == tensor.shape
        assert content.flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))


def test_a_folder_is_all_of_its_files(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    safetensors.torch.save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    (tmp_path / "readme.txt").write_text("not weights")
    found = find_stored_tensors(str(tmp_path))
    assert {name: Path(one.path).name for name, one in found.items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }


def test_with_an_index_only_what_it_names_counts(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "old.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert content_of(find_stored_tensors(tmp_path)["a"]).tolist() == [1, 1]


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(FileError, match=r"two.safetensors: it has a tensor 'a', and so has .*one"):
        find_stored_tensors(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"b": "one.safetensors"}}, "says that 'b' is in it, and it is not"),
        ({"weight_map": {"a": "gone.safetensors"}}, r"gone.safetensors: cannot be read"),
        ({"weight_map": {"a": "../one.safetensors"}}, "not a file of this folder"),
        ({"weight_map": ["a"]}, "expected an object"),
        ({}, "no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, index: Any, message: str) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileError, match=message):
        find_stored_tensors(tmp_path)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": GOOD | {"dtype": "float32"}}, "expected a dtype as BOOL"),
        ({"a": GOOD | {"dtype": "F4", "data_offsets": [8, 4]}}, "expected a range of"),
        ({"a": GOOD | {"dtype": "F4", "data_offsets": [0, 9]}}, "end at byte .*, and the file at"),
        ({"a": GOOD | {"shape": [3]}}, "expected a range of 12 bytes"),
        ({"a": GOOD | {"data_offsets": [8, 0]}}, "expected a range of 8 bytes"),
        ({"a": GOOD | {"data_offsets": [0, 8, 16]}}, "expected a range of 8 bytes"),
        ({"a": GOOD | {"data_offsets": [8, 16]}}, "end at byte .*, and the file at byte"),
        ({"a": GOOD | {"more": 1}}, "an object with the keys"),
        ({"a": GOOD | {"shape": [-2]}}, "an integer from 0"),
        ([], "expected an object"),
        (b"{", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "a key is repeated"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    path = write(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(FileError, match=message):
        find_stored_tensors(path)


def test_a_dtype_that_torch_lacks_is_told_by_its_name(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F4", "shape": [6], "data_offsets": [0, 3]}, "b": GOOD}
    header["b"] = GOOD | {"data_offsets": [3, 11]}
    found = find_stored_tensors(write(tmp_path / "model.safetensors", header, bytes(11)))
    assert (found["a"].dtype, found["a"].shape, found["a"].size_bytes) == ("F4", (6,), 3)
    assert content_of(found["b"]).tolist() == [0, 0]


def test_content_is_compared_to_its_last_byte(tmp_path: Path) -> None:
    one = torch.zeros(2**20 + 100)  # in blocks of 1 MiB
    tensors = {"one": one, "same": one.clone(), "long": torch.zeros(2**20 + 101)}
    tensors |= {f"other {at}": one.clone() for at in (0, 2**18, 2**20 + 99)}
    for name, tensor in tensors.items():
        if name.startswith("other"):
            tensor[int(name.split()[1])] = 1
    tensors["bits"] = one.view(torch.int32).clone()
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    found = find_stored_tensors(tmp_path)
    same = {name for name in found if has_same_content(found["one"], found[name])}
    assert same == {"one", "same"}
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FileError, match="one ends before"):
        has_same_content(found["one"], found["same"])


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(FileError, match=r"expected the path of a safetensors file .* got a dict"):
        find_stored_tensors({"a": torch.ones(2)})


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.ones(100)}, path)
    content = path.read_bytes()
    for n_bytes in (0, 4, 8, 40, len(content) - 1):
        path.write_bytes(content[:n_bytes])
        if n_bytes == 0:
            assert find_stored_tensors(write(path, {})) == {}
            continue
        with pytest.raises(FileError, match=r"model.safetensors"):
            find_stored_tensors(path)


def test_a_header_that_is_said_to_be_huge_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(FileError, match="a header of 9223372036854775808 bytes"):
        find_stored_tensors(path)


def test_no_such_folder_and_an_empty_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="there is no such file or folder"):
        find_stored_tensors(tmp_path / "none")
    with pytest.raises(FileError, match=r"there are no \*.safetensors files"):
        find_stored_tensors(tmp_path)
