"""The engines that we are compared with, each as a function without arguments.

All run on as many threads as torch has when they are made. An engine's preparation of a call is
outside it: ONNX Runtime and OpenVINO keep their inputs and outputs at addresses bound once, which
spares them the work of a replay at new addresses.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from measurements import reason

Tensors = tuple[torch.Tensor, ...]
Peer = Callable[[torch.nn.Module, Tensors, Path], Callable[[], Any]]

LOOP_SOURCE = """
#include <torch/extension.h>
#include <ATen/CPUFunctions.h>
// The same out-variants as the replay of Elementwise100, called in a C++ loop: the floor.
at::Tensor loop(const at::Tensor& x, at::Tensor a, at::Tensor b) {
  c10::InferenceMode guard;
  at::cpu::sigmoid_out(a, x);
  at::cpu::clamp_min_out(b, a, 0);
  for (int i = 1; i < 50; ++i) {
    at::cpu::sigmoid_out(a, b);
    at::cpu::clamp_min_out(b, a, 0);
  }
  return b;
}
"""


def eager(model: torch.nn.Module, inputs: Tensors, folder: Path) -> Callable[[], Any]:
    """The model's own call."""
    return lambda: model(*inputs)


def torch_compile(model: torch.nn.Module, inputs: Tensors, folder: Path) -> Callable[[], Any]:
    """torch.compile with its defaults, compiled."""
    torch.compiler.reset()
    compiled = torch.compile(model)
    compiled(*inputs)
    return lambda: compiled(*inputs)


def aot_inductor(model: torch.nn.Module, inputs: Tensors, folder: Path) -> Callable[[], Any]:
    """An AOTInductor package, loaded."""
    return _aot_inductor(model, inputs, folder, {})


def tuned_aot_inductor(model: torch.nn.Module, inputs: Tensors, folder: Path) -> Callable[[], Any]:
    """As `aot_inductor`, with constants frozen, so packed, and kernels chosen by measurement."""
    settings = {
        "freezing": True,
        "max_autotune": True,
        "max_autotune_gemm_backends": "CPP,ATEN",
    }
    return _aot_inductor(model, inputs, folder, settings)


def _aot_inductor(
    model: torch.nn.Module, inputs: Tensors, folder: Path, settings: dict[str, Any]
) -> Callable[[], Any]:
    program = torch.export.export(model, inputs)
    path = folder / "model.pt2"
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs=settings
    )
    return open_aot_inductor(path, inputs)


def open_aot_inductor(path: Path, inputs: Tensors) -> Callable[[], Any]:
    """An AOTInductor package from its file."""
    loaded = torch._inductor.aoti_load_package(str(path))
    return lambda: loaded(*inputs)


def static_module(model: torch.nn.Module, inputs: Tensors, folder: Path) -> Callable[[], Any]:
    """Torch's StaticModule, over a frozen trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and warns at each step
        traced = torch.jit.freeze(torch.jit.trace(model, inputs))
        static = torch._C._jit_to_static_module(traced._c)
    return lambda: static(*inputs)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Suppress remarks on torchvision, which no model here uses."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def export_onnx(model: torch.nn.Module, inputs: Tensors, folder: Path) -> Path:
    """The model as an ONNX file, by torch's exporter."""
    path = folder / "model.onnx"
    with _quiet_exporter():
        program = torch.onnx.export(model, inputs, dynamo=True, verbose=False)
    assert program is not None
    program.save(str(path))
    return path


def onnx_runtime(model: torch.nn.Module, inputs: Tensors, folder: Path) -> Callable[[], Any]:
    """ONNX Runtime with io-binding."""
    return open_onnx_runtime(export_onnx(model, inputs, folder), inputs)


def open_onnx_runtime(path: Path, inputs: Tensors) -> Callable[[], Any]:
    """ONNX Runtime with io-binding, from a file: inputs are bound in place, once."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for declared, tensor in zip(session.get_inputs(), inputs, strict=True):
        array = tensor.numpy()
        binding.bind_input(declared.name, "cpu", 0, array.dtype, array.shape, tensor.data_ptr())
    binding.bind_output(session.get_outputs()[0].name, "cpu")

    def call() -> Any:
        session.run_with_iobinding(binding)
        return binding

    return call


def openvino(model: torch.nn.Module, inputs: Tensors, folder: Path) -> Callable[[], Any]:
    """OpenVINO."""
    return open_openvino(export_onnx(model, inputs, folder), inputs)


def open_openvino(path: Path, inputs: Tensors) -> Callable[[], Any]:
    """OpenVINO from an ONNX file, in float32: inputs are bound in place, once."""
    import openvino as ov

    core = ov.Core()
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = core.compile_model(core.read_model(str(path)), "CPU", options).create_infer_request()
    for index, tensor in enumerate(inputs):
        request.set_input_tensor(index, ov.Tensor(tensor.numpy(), shared_memory=True))

    def call() -> Any:
        request.infer()
        return request

    return call


def elementwise_loop(model: torch.nn.Module, inputs: Tensors, folder: Path) -> Callable[[], Any]:
    """A C++ loop over the out-variants of Elementwise100."""
    module = cpp_extension.load_inline("elementwise_loop", LOOP_SOURCE, functions=["loop"])
    (x,) = inputs
    a, b = torch.empty_like(x), torch.empty_like(x)
    return lambda: module.loop(x, a, b)


PEERS: Mapping[str, Peer] = {
    "eager": eager,
    "torch.compile": torch_compile,
    "AOTInductor": aot_inductor,
    "StaticModule": static_module,
    "ONNX Runtime": onnx_runtime,
    "OpenVINO": openvino,
}


def result_of(call: Callable[[], Any]) -> torch.Tensor:
    """Return the first result of a call, as a tensor."""
    result = call()
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, (list, tuple)):
        return result[0]
    if hasattr(result, "copy_outputs_to_cpu"):
        return torch.from_numpy(result.copy_outputs_to_cpu()[0])
    return torch.from_numpy(result.get_output_tensor(0).data).clone()


def prepare(
    peers: Mapping[str, Peer],
    model: torch.nn.Module,
    inputs: Tensors,
    expected: torch.Tensor,
    folder: Path,
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Prepare peers, each in a separate folder, and check their results.

    Returns:
        The peers with the expected result; and the others, with the reason.
    """
    present, absent = {}, {}
    for name, peer in peers.items():
        home = folder / name.replace(" ", "_")
        home.mkdir(exist_ok=True)
        try:
            call = peer(model, inputs, home)
            tolerance = 1e-4 if expected.dtype == torch.float32 else 3e-2
            found = result_of(call).to(expected.dtype)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        except Exception as error:  # any error of a peer is reported as its absence
            absent[name] = reason(error)
        else:
            present[name] = call
    return present, absent
