"""The engines that we are measured against, each as a function of no arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

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


def torch_compile(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """torch.compile with its defaults, warmed up."""
    compiled = torch.compile(model)
    compiled(x)
    return lambda: compiled(x)


def aot_inductor(model: torch.nn.Module, x: torch.Tensor, folder: Path) -> Callable[[], Any]:
    """An AOTInductor package, loaded."""
    program = torch.export.export(model, (x,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "m.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    return lambda: loaded(x)


def static_module(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """Torch's StaticModule, over a frozen trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.freeze(torch.jit.trace(model, x))
        static = torch._C._jit_to_static_module(traced._c)
    return lambda: static(x)


def elementwise_loop(x: torch.Tensor) -> Callable[[], Any]:
    """A C++ loop over the out-variants of Elementwise100."""
    module = cpp_extension.load_inline("elementwise_loop", LOOP_SOURCE, functions=["loop"])
    a, b = torch.empty_like(x), torch.empty_like(x)
    return lambda: module.loop(x, a, b)
