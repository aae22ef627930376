"""Compiles the Triton kernels that a model launches: those not in the cache, for one GPU."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload.compile.cache import CacheRefused, KernelCache, open_cache, replace_cache
from offload.compile.device_making import (
    asked_target,
    kernel_document,
    kernel_of,
    run_worker,
    target_of,
)
from offload.compile.refusal import UnsupportedRegion
from offload.compile.uninterrupted import uninterrupted
from offload.console.progress import stage
from offload.errors import CaptureError, FileError
from offload.program import BoundProgram, DeviceKernel, TritonCode, TritonKernel
from offload.program.encode import encode_constant


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledTriton:
    """A compiled kernel.

    Attributes:
        kernel: its code.
        written: the names of the parameters through whose addresses it may write.
    """

    kernel: DeviceKernel
    written: frozenset[str]


def compiled_triton(
    kernel: TritonKernel, device: torch.device, cache_folder: Path | None = None
) -> CompiledTriton:
    """Compile a kernel for a GPU's architecture, or find it in the cache.

    Args:
        kernel: its grid makes no difference.
        device: the GPU.
        cache_folder: None: the user's.

    Raises:
        CaptureError: Triton is not installed or refuses the kernel, or the code needs what a launch
            cannot give it: clusters, a cooperative or programmatic launch, or scratch memory.
    """
    try:
        cache: KernelCache | None = open_cache(cache_folder)
    except CacheRefused:
        cache = None  # it is compiled at each load, in seconds
    asked = _asked(kernel, asked_target(device))
    key = f"{target_of(device)}-{asked['name']}"
    found = None if cache is None else cache.find_document(key, _compiled_of)
    if found is None:
        found = uninterrupted(functools.partial(_compiled, asked))
        if cache is not None:
            try:
                cache.keep_document(key, _document(found))
            except CacheRefused as error:
                replace_cache(cache_folder, str(error))
    return found


def with_triton_code(bound: BoundProgram, device: torch.device) -> BoundProgram:
    """The Program with the code of all its Triton kernels in its Bindings.

    Args:
        bound: some of its kernels may be compiled.
        device: the GPU that is to run it.

    Raises:
        CaptureError: as `compiled_triton`; the message names the launch.
    """
    missing = {
        one.callee: one
        for one in reversed(bound.program.launches)
        if isinstance(one.callee, TritonKernel)
        and bound.bindings.triton.get(one.callee, TritonCode()).compiled is None
    }
    if not missing:
        return bound
    codes = dict(bound.bindings.triton)
    with stage("compiling kernels", len(missing)) as current:
        for number, (kernel, launch) in enumerate(missing.items(), 1):
            try:
                code = compiled_triton(kernel, device).kernel
            except CaptureError as error:
                raise CaptureError(f"{launch.source}: {error}") from error
            codes[kernel] = dataclasses.replace(codes.get(kernel, TritonCode()), compiled=code)
            current.reach(number)
    bindings = dataclasses.replace(bound.bindings, triton=codes)
    return dataclasses.replace(bound, bindings=bindings)


def _asked(kernel: TritonKernel, target: Mapping[str, int]) -> dict[str, Any]:
    """What the worker is asked for; its name is the function's with a digest of everything."""
    try:
        constants = [[name, encode_constant(one, name)] for name, one in kernel.constants]
        options = [[name, encode_constant(one, name)] for name, one in kernel.options]
    except FileError as error:
        raise CaptureError(f"{kernel.name}: {error}") from None
    asked = {
        "function": kernel.function,
        "source": kernel.source,
        "signature": [list(one) for one in kernel.signature],
        "constants": constants,
        "divisible": list(kernel.divisible),
        "options": options,
        **target,
    }
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return {**asked, "name": f"{kernel.function}_{digest[:24]}"}


def _compiled(asked: Mapping[str, Any]) -> CompiledTriton:
    with tempfile.TemporaryDirectory(prefix="offload-") as folder:
        try:
            (found,) = run_worker([dict(asked)], Path(folder))
        except UnsupportedRegion as error:
            raise CaptureError(f"triton::{asked['function']} was not compiled: {error}") from error
        if refusal := found.get("refusal"):
            raise CaptureError(f"triton::{asked['function']} was not compiled: {refusal}")
        code = (Path(folder) / asked["name"]).read_bytes()
    kernel = DeviceKernel(
        str(found["entry"]),
        code,
        int(found["n_threads"]),
        int(found["shared_bytes"]),
        int(found["n_hidden"]),
        asked["source"],
        dict(asked["constants"]),
        tuple(found["kinds"]),
    )
    return CompiledTriton(kernel, frozenset(found["written"]))


def _document(found: CompiledTriton) -> dict[str, Any]:
    return {
        "name": found.kernel.name,
        "kernel": kernel_document(found.kernel),
        "written": sorted(found.written),
    }


def _compiled_of(document: Mapping[str, Any]) -> CompiledTriton:
    kernel = kernel_of(str(document["name"]), document["kernel"])
    return CompiledTriton(kernel, frozenset(map(str, document["written"])))
