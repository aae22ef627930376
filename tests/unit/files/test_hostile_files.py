"""Opening malicious files: a single false entry at a time, each named in a FileError."""

from __future__ import annotations

import io
import json
import os
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hostile import archive, members, opened, tree, valid_file

import offload
from offload.files import open_saved
from offload.files.operators import find_safe_operator
from offload.interpreter.torch_names import find_overload


def launch_of(root: Any, operator: str) -> Any:
    return next(one for one in root["launches"] if one["operator"] == operator)


def first_view(launch: Any) -> Any:
    return next(one["view"] for one in launch["arguments"] if type(one) is dict and "view" in one)


def drop_a_result(root: Any) -> None:
    root["results"].pop()


def edit(path: str, value: Any) -> Callable[[Any], None]:
    """Set the value at a dotted path, such as `values.0.size_bytes`."""

    def change(root: Any) -> None:
        *way, last = path.split(".")
        for step in way:
            root = root[int(step) if isinstance(root, list) else step]
        root[int(last) if isinstance(root, list) else last] = value

    return change


def outputs_of(root: Any) -> set[int]:
    return {index for index, one in enumerate(root["values"]) if one["role"] == "output"}


LIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "newer": (edit("version", 3), "newer offload"),
    "other format": (edit("format", "torch"), "does not state"),
    "unknown key": (edit("extra", 1), "keys format, version"),
    "negative size": (
        edit("values.0.size_bytes", -1),
        r"values\[0\].size_bytes: expected an integer",
    ),
    "value too small": (edit("values.0.size_bytes", 4), "spans 32 bytes, and its size is 4"),
    "size as float": (edit("values.0.size_bytes", 32.0), "expected an integer"),
    "more than can be": (edit("values.0.size_bytes", 2**62), "more bytes than a machine"),
    "too many elements": (edit("values.0.shape", [2**40, 2**40]), "fewer than 2\\*\\*63 elements"),
    "unknown dtype": (edit("values.0.dtype", "_dynamo"), "expected a dtype"),
    "unknown role": (edit("values.0.role", "scratch"), "expected a role"),
    "input is an output": (edit("values.0.role", "output"), "values of role"),
    "view outside": (
        lambda root: first_view(launch_of(root, "aten::sort")).update(offset_bytes=2**20),
        "covers bytes 1048576",
    ),
    "view before": (
        lambda root: first_view(launch_of(root, "aten::sort")).update(offset_bytes=-4),
        "expected an integer from 0",
    ),
    "view inside an element": (
        lambda root: first_view(launch_of(root, "aten::sort")).update(offset_bytes=2),
        "covers bytes|inside an element",
    ),
    "view of no value": (
        lambda root: first_view(launch_of(root, "aten::sort")).update(value=10**6),
        "%1000000",
    ),
    "conjugate of a float": (
        lambda root: first_view(launch_of(root, "aten::sort")).update(conjugate=True),
        "conjugate of float32",
    ),
    "reads hidden": (
        lambda root: launch_of(root, "aten::sort").update(reads=[]),
        "not declared to read or write",
    ),
    "writes hidden": (
        lambda root: launch_of(root, "aten::sort").update(writes=[]),
        "exactly what it makes",
    ),
    "in-place write hidden": (
        lambda root: launch_of(root, "aten::add_.Tensor").update(writes=[]),
        "which is not listed as written",
    ),
    "argument missing": (
        lambda root: launch_of(root, "aten::sort")["arguments"].pop(),
        "takes 3 arguments",
    ),
    "argument of another type": (
        lambda root: launch_of(root, "aten::sort")["arguments"].__setitem__(1, "left"),
        "as dim",
    ),
    "result missing": (
        lambda root: launch_of(root, "aten::sort")["results"].pop(),
        "write exactly what it makes",
    ),
    "nobody makes the result": (
        lambda root: root["launches"].remove(
            next(one for one in root["launches"] if set(one["writes"]) & outputs_of(root))
        ),
        "is returned, and no launch writes it",
    ),
    "made twice": (
        lambda root: root["launches"].append(launch_of(root, "aten::sort")),
        "a second time",
    ),
    "used before it is made": (lambda root: root["launches"].reverse(), "before it is made"),
    "guarded without reading": (
        lambda root: launch_of(root, "aten::sort").update(guard=1.0),
        "nothing on the host",
    ),
    "launch is random twice": (edit("launches.0.random", 1), "true or false"),
    "result dropped": (drop_a_result, "role output|each result"),
    "result is an activation": (
        lambda root: root["results"][0]["view"].update(
            first_view(launch_of(root, "aten::sort")), conjugate=False
        ),
        "callers cannot see|not the input",
    ),
    "keyword that is no string": (edit("arguments_structure.children.1.kind", "list"), "tuple of"),
    "parameter named twice": (edit("keyword_only_names", ["x"]), "each parameter once"),
    "parameter without a name": (edit("keyword_only_names", [""]), "each parameter once"),
    "leaf out of range": (
        edit("arguments_structure.children.0.children.0.leaf", 9),
        "each input once",
    ),
    "weight without holder": (edit("weights.0.holders", []), "are missing"),
    "weight holds another": (edit("weights.0.holders.0.value", 0), "hold|covers"),
    "weight not listed": (lambda root: root["weights"].pop(), "role weight"),
    "no overlap": (
        edit("overlaps", [{"first": 0, "second": 1, "distance_bytes": 10**6}]),
        "that do not overlap",
    ),
    "overlap with itself": (
        edit("overlaps", [{"first": 0, "second": 0, "distance_bytes": 0}]),
        "not a pair",
    ),
    "another device": (
        lambda root: launch_of(root, "aten::_to_copy")["arguments"].__setitem__(
            3, {"symbol": {"kind": "device", "name": "cuda"}}
        ),
        "on device cuda",
    ),
    "attribute of torch": (
        lambda root: launch_of(root, "aten::_to_copy")["arguments"].__setitem__(
            1, {"symbol": {"kind": "dtype", "name": "_inductor"}}
        ),
        "expected a dtype",
    ),
    "generator": (
        lambda root: launch_of(root, "aten::bernoulli_.float")["arguments"].__setitem__(
            2, {"symbol": {"kind": "generator", "name": "3"}}
        ),
        "draws from generator 3",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_one_lie(tmp_path: Path, lie: str) -> None:
    change, message = LIES[lie]
    root = tree()
    change(root)
    with pytest.raises(offload.FileError, match=message):
        opened(archive(program=json.dumps(root).encode()), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 10**6, "not valid JSON"),
        (b'{"a":' * 10**5, "not valid JSON"),
        (b'{"format": NaN}', "NaN is not a JSON number"),
        (b'{"format": 1, "format": 1}', "repeated"),
        (b"9" * 10**5, "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[]", "does not state"),
        (b'{"format": "offload program", "version": true}', "expected an integer"),
    ],
)
def test_json_that_is_no_program(tmp_path: Path, text: bytes, message: str) -> None:
    with pytest.raises(offload.FileError, match=message):
        opened(archive(program=text), tmp_path)


def test_structures_may_not_nest_without_end(tmp_path: Path) -> None:
    root = tree()
    node: Any = {"kind": "constant", "constant": None}
    for _ in range(80):
        node = {"kind": "list", "type_name": "builtins.list", "keys": [], "children": [node]}
    root["result_structure"]["children"][-1] = node
    with pytest.raises(offload.FileError, match="nested containers"):
        opened(archive(program=json.dumps(root).encode()), tmp_path)


# ---- weights ------------------------------------------------------------------------------------


def with_header(header: bytes, content: bytes = b"") -> bytes:
    return archive(weights=struct.pack("<Q", len(header)) + header + content)


def test_a_weight_too_many_or_too_few(tmp_path: Path) -> None:
    arrays = safetensors.torch.load(members()[1])
    for change in ({"9999": torch.zeros(0, dtype=torch.uint8)}, {next(iter(arrays)): None}):
        other = {name: one for name, one in (arrays | change).items() if one is not None}
        with pytest.raises(offload.FileError, match="does not hold the program's weights"):
            opened(archive(weights=safetensors.torch.save(other)), tmp_path)


def test_weights_of_another_type_or_place(tmp_path: Path) -> None:
    raw = members()[1]
    size = int.from_bytes(raw[:8], "little")
    for old, new in ((b'"U8"', b'"I8"'), (b"data_offsets", b"data_offsetz"), (b"[0,", b"[4,")):
        header = raw[8 : 8 + size].replace(old, new)
        assert header != raw[8 : 8 + size]
        with pytest.raises(offload.FileError):
            opened(with_header(header, raw[8 + size :]), tmp_path)


@pytest.mark.parametrize("claimed", [2**63, 2**40, 2**27 + 1, 10**6])
def test_a_header_that_claims_more_than_the_file(tmp_path: Path, claimed: int) -> None:
    weights = struct.pack("<Q", claimed) + b"{}"
    with pytest.raises(offload.FileError, match="does not hold the program's weights"):
        opened(archive(weights=weights), tmp_path)


def test_a_changed_weight_fails_its_checksum(tmp_path: Path) -> None:
    content, weights = bytearray(valid_file()), members()[1]
    content[content.index(weights) + len(weights) - 1] ^= 1
    with pytest.raises(offload.FileError, match="CRC"):
        opened(bytes(content), tmp_path)


# ---- the zip ------------------------------------------------------------------------------------


def test_a_compressed_file_is_refused_unread(tmp_path: Path) -> None:
    bomb = archive(weights=bytes(10**8), compression=zipfile.ZIP_DEFLATED)
    assert len(bomb) < 10**6
    with pytest.raises(offload.FileError, match="compressed"):
        opened(bomb, tmp_path)


@pytest.mark.parametrize("names", [[], ["program.json"], ["weights.safetensors", "program.json"]])
def test_other_members(tmp_path: Path, names: list[str]) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        for name in names:
            target.writestr(name, b"{}")
    with pytest.raises(offload.FileError, match="does not consist of"):
        opened(buffer.getvalue(), tmp_path)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(offload.FileError, match="no such file"):
        open_saved(tmp_path / "missing")
    with pytest.raises(offload.FileError, match="not a regular file"):
        open_saved(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    begin = time.monotonic()
    with pytest.raises(offload.FileError, match="not a regular file"):
        open_saved(tmp_path / "pipe")
    assert time.monotonic() - begin < 10


# ---- operators ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operator",
    [
        "aten::from_file", "aten::set_", "aten::set_.source_Tensor", "aten::resize_",
        "aten::resize", "aten::resize.out", "aten::_resize_output_", "aten::as_strided",
        "aten::as_strided_", "prims::as_strided", "aten::transpose_", "aten::view", "aten::detach",
        "aten::record_stream", "aten::_pin_memory", "aten::pin_memory", "aten::set_data",
        "aten::_print", "aten::save", "aten::_cummax_helper", "aten::_lazy_clone",
        "aten::_backward", "aten::__init__", "aten::add.overloads", "aten::add.default",
        "os::system", "torchvision::nms", "", "aten::", "aten::mm\n", "prims::name",
        "aten::_cufft_set_plan_cache_max_size", "mkldnn::_linear_pointwise",
    ],
)  # fmt: skip
def test_unsafe_operators_are_refused_by_name(tmp_path: Path, operator: str) -> None:
    root = tree()
    launch_of(root, "aten::sort")["operator"] = operator
    with pytest.raises(offload.FileError, match="operator") as refused:
        opened(archive(program=json.dumps(root).encode()), tmp_path)
    assert operator.strip() in str(refused.value)


def test_no_operator_that_moves_memory_or_returns_a_view_is_safe() -> None:
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith(("aten::", "prims::")):
            continue
        found = find_overload(name)
        returns = [one.alias_info for one in found._schema.returns if one.alias_info is not None]
        if torch.Tag.inplace_view in found.tags or any(not one.is_write for one in returns):
            with pytest.raises(offload.FileError):
                find_safe_operator(name)


@pytest.mark.parametrize(
    "operator",
    [
        "aten::mm", "aten::add.Tensor", "aten::add_.Tensor", "aten::add.out", "aten::cat",
        "aten::convolution", "aten::_foreach_add_.Scalar", "aten::equal", "aten::native_dropout",
        "aten::_local_scalar_dense", "aten::full", "aten::as_strided_copy", "aten::_unsafe_view",
        "aten::_assert_async.msg", "prims::add", "aten::copy_", "aten::index_put_",
    ],
)  # fmt: skip
def test_ordinary_operators_are_safe(operator: str) -> None:
    assert find_safe_operator(operator)._schema.name == operator.partition(".")[0]
