"""Probe of offline models: when an execution reads its data buffers."""

from __future__ import annotations

import array
import ctypes
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from onnx_model import relu_model
from probe_device import COUNT, Device, device
from probing import NotAnswered, ProbeFailed, conclude, tell

MODEL_VARIABLE = "OFFLINE_MODEL"
"""The file of a model with one input and one output of floats; by default atc makes one."""


@dataclass
class _Model:
    """An offline model, and a dataset with one buffer for each of its sides."""

    number: int
    sizes_bytes: tuple[int, int]
    datasets: tuple[int, int]
    buffers: tuple[int, int]

    def bind(self, acl: Device, *addresses: int) -> None:
        for buffer, address, n_bytes in zip(self.buffers, addresses, self.sizes_bytes, strict=True):
            acl.call("aclUpdateDataBuffer", buffer, address, n_bytes)


def _made_by_atc(folder: Path, soc: str) -> Path:
    compiler = shutil.which("atc")
    if compiler is None:
        raise NotAnswered(f"there is no atc, and {MODEL_VARIABLE} names no model")
    source = folder / "relu.onnx"
    source.write_bytes(relu_model(COUNT))
    command = [compiler, f"--model={source}", "--framework=5", f"--soc_version={soc}"]
    done = subprocess.run(
        [*command, f"--output={folder / 'relu'}"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ProbeFailed(f"atc: {done.stdout[-300:]}")
    return folder / "relu.om"


def _load(acl: Device, path: Path) -> _Model:
    number, create = ctypes.c_uint32(), acl.library.aclmdlCreateDesc
    acl.call("aclmdlLoadFromFile", str(path).encode(), ctypes.byref(number))
    create.restype = ctypes.c_void_p
    description = create()
    acl.call("aclmdlGetDesc", description, number.value)
    sizes = []
    for side in ("Input", "Output"):
        ask = getattr(acl.library, f"aclmdlGet{side}SizeByIndex")
        ask.restype = ctypes.c_size_t
        sizes.append(ask(ctypes.c_void_p(description), ctypes.c_size_t(0)))
    datasets, buffers = [], []
    for n_bytes in sizes:
        make_dataset, make_buffer = acl.library.aclmdlCreateDataset, acl.library.aclCreateDataBuffer
        make_dataset.restype = make_buffer.restype = ctypes.c_void_p
        datasets.append(make_dataset())
        address = acl.malloc(n_bytes)
        buffers.append(make_buffer(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes)))
        acl.call("aclmdlAddDatasetBuffer", datasets[-1], buffers[-1])
    return _Model(number.value, tuple(sizes), tuple(datasets), tuple(buffers))


def data_buffers() -> None:
    """A7: a data buffer may change once aclmdlExecuteAsync has returned."""
    acl = device()
    with tempfile.TemporaryDirectory() as folder:
        ask = acl.library.aclrtGetSocName
        ask.restype = ctypes.c_char_p
        given = os.environ.get(MODEL_VARIABLE)
        path = Path(given) if given else _made_by_atc(Path(folder), ask().decode())
        model = _load(acl, path)
    in_bytes, out_bytes = model.sizes_bytes
    contents = [array.array("f", [value] * (in_bytes // 4)).tobytes() for value in (1.0, 2.0)]
    inputs = [acl.memory(content) for content in contents]
    outputs = [acl.memory(bytes(out_bytes)) for _ in range(3)]
    expected, stream = [], acl.stream()
    for address in inputs:
        model.bind(acl, address, outputs[2])
        acl.call("aclmdlExecute", model.number, *model.datasets)
        expected.append(acl.download(outputs[2], out_bytes))
    if expected[0] == expected[1]:
        raise ProbeFailed("the model gives one result for two inputs")
    acl.upload(outputs[2], bytes(out_bytes))
    with acl.held_back(stream):
        for address, result in zip(inputs, outputs[:2], strict=True):
            model.bind(acl, address, result)
            acl.call("aclmdlExecuteAsync", model.number, *model.datasets, stream)
        model.bind(acl, inputs[0], outputs[2])
    acl.synchronize(stream)
    found = [acl.download(address, out_bytes) for address in outputs]
    right = found == [*expected, bytes(out_bytes)]
    tell("outputs written", [content != bytes(out_bytes) for content in found])
    conclude(right, "" if right else "a buffer was read after the call had returned")
