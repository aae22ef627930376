"""Makes kernels for a GPU: those not in the cache are lowered, compiled and kept."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offload.compile.cache import CacheRefused, KernelCache, open_cache, replace_cache
from offload.compile.device_proof import DeviceProof
from offload.compile.loops import Word
from offload.compile.packing import Packing
from offload.compile.refusal import PassingRefusal, UnsupportedRegion
from offload.compile.regions import Region
from offload.compile.uninterrupted import uninterrupted
from offload.console.progress import stage
from offload.program import DeviceCall, DeviceFunction, DeviceKernel, Number, Pointer, Program

if TYPE_CHECKING:
    from offload.compile.triton_loops import TritonCall, TritonLoops

_WORKER = Path(__file__).with_name("triton_worker.py")
_LIMIT_S = 600.0  # for the kernels of one region; Triton takes about a second for each


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceEntry:
    """What is kept for a region: `calls`, or why there are none (`refusal`).

    Attributes:
        calls: of its kernels, in order.
        scratch_bytes: of each range of scratch memory that they take.
        refusal: why the region has no kernels, for messages.
        is_lasting: another attempt would end the same way. Only such entries are kept.
    """

    calls: tuple[DeviceCall, ...] = ()
    scratch_bytes: tuple[int, ...] = ()
    refusal: str = ""
    is_lasting: bool = True

    def to_document(self) -> dict[str, Any]:
        """The entry as JSON; each kernel once."""
        kernels = {one.kernel.name: one.kernel for one in self.calls}
        return {
            "kernels": {name: kernel_document(kernel) for name, kernel in kernels.items()},
            "calls": [
                [one.kernel.name, one.grid, [_parameter_document(two) for two in one.parameters]]
                for one in self.calls
            ],
            "scratch_bytes": self.scratch_bytes,
            "refusal": self.refusal,
        }

    @staticmethod
    def of_document(document: Mapping[str, Any]) -> DeviceEntry:
        """The entry of a document."""
        kernels = {
            str(name): kernel_of(str(name), one) for name, one in document["kernels"].items()
        }
        calls = tuple(
            DeviceCall(
                kernels[name],
                (int(grid[0]), int(grid[1]), int(grid[2])),
                tuple(_parameter(one) for one in parameters),
            )
            for name, grid, parameters in document["calls"]
        )
        scratch_bytes = tuple(int(one) for one in document["scratch_bytes"])
        return DeviceEntry(calls, scratch_bytes, str(document["refusal"]))


class DeviceKernels:
    """Kernels of regions for one GPU: found in the cache, or made and kept there.

    Attributes:
        entries: of each requested region, by its key.
    """

    def __init__(self, device: torch.device, cache_folder: Path | None = None) -> None:
        """Open the cache, or one of this process; without either, all regions are refused.

        Args:
            device: whose kind of GPU the kernels are for.
            cache_folder: None: the user's.
        """
        self.entries: dict[str, DeviceEntry] = {}
        self._device = device
        self._folder = cache_folder
        self._refusal = ""
        try:
            self._cache: KernelCache | None = open_cache(cache_folder)
        except CacheRefused as error:
            self._cache, self._refusal = None, str(error)

    @property
    def cache_refusal(self) -> str:
        """Why kernels are kept only for this process; empty if also for others."""
        return self._refusal if self._cache is None else self._cache.refusal

    def make(self, wanted: Mapping[str, Region | Packing]) -> None:
        """Make an entry for each region that has none, in this process or another."""
        missing = {}
        target = target_of(self._device) if wanted else ""
        for key, one in wanted.items():
            if key in self.entries:
                continue
            found = None
            if self._cache is not None:
                found = self._cache.find_document(f"{target}-{key}", DeviceEntry.of_document)
            if found is None:
                missing[key] = one
            else:
                self.entries[key] = found
        if not missing:
            return
        with stage("making kernels", len(missing)) as current:
            for number, (key, one) in enumerate(missing.items(), 1):
                assert isinstance(one, Region)  # nothing is packed for a device
                self.entries[key] = self._made(one.extracted.program)
                self._keep(f"{target}-{key}", self.entries[key])
                current.reach(number)

    def function(
        self, key: str, name: str, replaces: Program, *, n_derived: int = 0, sums: int = -1
    ) -> tuple[DeviceFunction, DeviceProof]:
        """A region's function, which must exist, and its proof."""
        assert n_derived == 0  # as nothing is packed for a device
        proof = DeviceProof(name, replaces, sums)
        return DeviceFunction(self.entries[key].calls, proof.prove), proof

    def _made(self, program: Program) -> DeviceEntry:
        try:
            return uninterrupted(functools.partial(_entry, program, self._device))
        except PassingRefusal as error:
            return DeviceEntry(refusal=str(error), is_lasting=False)
        except UnsupportedRegion as error:
            return DeviceEntry(refusal=str(error))

    def _keep(self, key: str, entry: DeviceEntry) -> None:
        if self._cache is None or not entry.is_lasting:
            return
        try:
            self._cache.keep_document(key, entry.to_document())
        except CacheRefused as error:
            self._cache = replace_cache(self._folder, str(error))


def target_of(device: torch.device) -> str:
    """What the kernels depend on besides what the cache's folder names."""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        version = "none"
    properties = torch.cuda.get_device_properties(device)
    content = json.dumps([version, _architecture_of(device), properties.multi_processor_count])
    return f"cuda-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def asked_target(device: torch.device) -> dict[str, int]:
    """The properties of a GPU for which the worker compiles."""
    properties: Any = torch.cuda.get_device_properties(device)
    return {
        "architecture": _architecture_of(device),
        "most_shared_bytes": properties.shared_memory_per_block_optin,
    }


def _architecture_of(device: torch.device) -> int:
    """A GPU's architecture as Triton counts: 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _entry(program: Program, device: torch.device) -> DeviceEntry:
    """Lower and compile a region.

    Raises:
        UnsupportedRegion: it has no kernels.
    """
    from offload.compile import triton_loops  # noqa: PLC0415 - takes seconds

    try:
        metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise PassingRefusal("triton, which compiles kernels for a GPU, is not installed") from None
    loops = triton_loops.lower(program, device)
    with tempfile.TemporaryDirectory(prefix="offload-") as folder:
        made = _compiled(loops, asked_target(device), Path(folder))
        calls = tuple(
            _call(call, found, Path(folder), len(program.inputs))
            for call, found in zip(loops.calls, made, strict=True)
        )
    return DeviceEntry(calls, loops.scratch_bytes)


def _compiled(loops: TritonLoops, target: Mapping[str, int], folder: Path) -> list[dict[str, Any]]:
    """What the worker says of each call's kernel; its code lies in the folder.

    Raises:
        UnsupportedRegion: Triton refuses one.
        PassingRefusal: the worker failed.
    """
    asked = [
        {
            "name": call.kernel.name,
            "source": call.kernel.source,
            **target,
            "arguments": [one if isinstance(one, int) else 0 for one in call.arguments],
        }
        for call in loops.calls
    ]
    found = run_worker(asked, folder)
    for one in found:
        if refusal := one.get("refusal"):
            raise UnsupportedRegion(refusal)
    return found


def run_worker(asked: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Let the worker compile kernels.

    Args:
        asked: as the worker takes it.
        folder: an empty one, for the code.

    Raises:
        PassingRefusal: it failed.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)  # it would compile nothing
    environment["TRITON_CACHE_DIR"] = str(folder / "triton")  # others may write to the default one
    failed = "the process that compiles kernels failed"
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_WORKER), str(folder)],  # -P: not this package's modules
            input=json.dumps({"kernels": asked}),
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
            env=environment,
            cwd=folder,
        )
        found: list[dict[str, Any]] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PassingRefusal(f"{failed}: {error}") from error
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise PassingRefusal(f"{failed}: {last}") from None
    return found


def _call(call: TritonCall, found: Mapping[str, Any], folder: Path, n_inputs: int) -> DeviceCall:
    for position in found["written"]:
        argument = call.arguments[position]
        if isinstance(argument, Word) and argument.number < n_inputs:
            raise UnsupportedRegion("Inductor writes an input")
    kernel = DeviceKernel(
        call.kernel.name,
        (folder / call.kernel.name).read_bytes(),
        int(found["n_threads"]),
        int(found["shared_bytes"]),
        int(found["n_hidden"]),
        call.kernel.source,
        found["constants"],
        tuple(found["kinds"]),
    )
    parameters: list[Pointer | Number] = []
    for position, size_bytes in found["parameters"]:
        argument = call.arguments[position]
        if isinstance(argument, Word) == bool(size_bytes):
            raise UnsupportedRegion("Triton takes an address where Inductor passes a number")
        if isinstance(argument, Word):
            parameters.append(Pointer(argument.number, argument.offset_bytes))
        else:
            parameters.append(Number(argument, size_bytes))
    grid = found["grid"]
    return DeviceCall(kernel, (grid[0], grid[1], grid[2]), tuple(parameters))


# ---- documents -----------------------------------------------------------------------------------


def kernel_document(kernel: DeviceKernel) -> dict[str, Any]:
    """A kernel as JSON, without its name."""
    document = {
        one.name: getattr(kernel, one.name)
        for one in dataclasses.fields(kernel)
        if one.name not in ("name", "code")
    }
    document["constants"] = dict(kernel.constants)
    return {**document, "code": base64.b64encode(kernel.code).decode()}


def kernel_of(name: str, document: Mapping[str, Any]) -> DeviceKernel:
    """The kernel of a document."""
    return DeviceKernel(
        name,
        base64.b64decode(document["code"], validate=True),
        int(document["n_threads"]),
        int(document["shared_bytes"]),
        int(document["n_hidden"]),
        str(document["source"]),
        dict(document["constants"]),
        tuple(document["kinds"]),
    )


def _parameter_document(one: Pointer | Number) -> list[Any]:
    if isinstance(one, Pointer):
        return ["pointer", one.word, one.offset_bytes]
    return ["number", one.value, one.size_bytes]


def _parameter(document: Sequence[Any]) -> Pointer | Number:
    kind, first, second = document
    if kind not in ("pointer", "number"):
        raise ValueError(f"a parameter of the kind {kind}")
    return (Pointer if kind == "pointer" else Number)(int(first), int(second))
