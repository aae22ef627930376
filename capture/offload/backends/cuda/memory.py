"""Device memory by the driver's API, for the proof: allocated, copied, freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import torch

from offload.backends.cuda.driver import call, driver_bindings
from offload.errors import OutOfMemory
from offload.native import _native

T = TypeVar("T")


class DeviceMemory:
    """Blocks of device memory, all freed at the end of the with-block.

    Thread: the one that made it. Its device's primary context, which torch also uses, is current
    inside the block.
    """

    def __init__(self, device: int, torch_device: torch.device | None = None) -> None:
        """Use a device, with torch's name for it if that is not its GPU of this number."""
        self._device = device
        self._torch_device = torch_device or torch.device("cuda", device)
        self._blocks: list[int] = []
        self._before: Any = None

    def __enter__(self) -> DeviceMemory:
        """Make the device's context current.

        Raises:
            ExecutionError: the driver failed.
        """
        device = call("cuDeviceGet", self._device)
        context = call("cuDevicePrimaryCtxRetain", device)
        self._before = call("cuCtxGetCurrent")
        call("cuCtxSetCurrent", context)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Free everything; errors of a device that has already failed are not raised again."""
        driver = driver_bindings()
        for address in self._blocks:
            driver.cuMemFree(address)
        driver.cuCtxSetCurrent(self._before)
        driver.cuDevicePrimaryCtxRelease(self._device)

    def allocate(self, size_bytes: int) -> int:
        """Allocate memory that holds zeros, at least 256 bytes.

        Raises:
            OutOfMemory: there is none left; the message says how to omit the proof.
        """
        n_bytes = max(size_bytes, 256)
        try:
            address = _allocate(n_bytes)
        except OutOfMemory as error:
            raise OutOfMemory(
                f"the proof needs another {n_bytes} bytes of device memory ({error}); "
                "load(verify=False) leaves it out"
            ) from error
        self._blocks.append(address)
        self.fill(address, n_bytes)
        return address

    def free(self, address: int) -> None:
        """Free one block.

        Raises:
            ExecutionError: the driver failed.
        """
        self._blocks.remove(address)
        call("cuMemFree", address)

    def fill(self, address: int, size_bytes: int) -> None:
        """Write zeros, and wait for them.

        Raises:
            ExecutionError: the driver failed, or the device in earlier work.
        """
        if size_bytes:
            call("cuMemsetD8Async", address, 0, size_bytes, 0)
            call("cuStreamSynchronize", 0)

    def write(self, address: int, content: bytes) -> None:
        """Copy from the host.

        Raises:
            ExecutionError: the driver failed.
        """
        if content:
            call("cuMemcpyHtoD", address, content, len(content))

    def chunks(self, address: int, size_bytes: int, chunk_bytes: int) -> Iterator[torch.Tensor]:
        """Yield its bytes (uint8) in place, in order, in chunks of `chunk_bytes` except the last.

        The user of a chunk waits for torch's work on it before the memory is written again.
        """
        for begin in range(0, size_bytes, chunk_bytes):
            yield self.tensor(address + begin, min(chunk_bytes, size_bytes - begin))

    def tensor(self, address: int, size_bytes: int) -> torch.Tensor:
        """The memory there as bytes; its owner keeps it alive."""
        return _native.cuda_tensor_at(address, size_bytes, str(self._torch_device))

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Copy on the device, and wait for it.

        Raises:
            ExecutionError: the driver failed, or the device in earlier work.
        """
        if size_bytes:
            call("cuMemcpyDtoDAsync", destination, source, size_bytes, 0)
            call("cuStreamSynchronize", 0)


def _allocate(n_bytes: int) -> int:
    return with_memory_of_torch(lambda: int(call("cuMemAlloc", n_bytes)))


def with_memory_of_torch(allocate: Callable[[], T]) -> T:
    """Call `allocate`; if memory runs out, once more without the cache of torch's allocator.

    Raises:
        OutOfMemory: there is still no memory.
    """
    try:
        return allocate()
    except OutOfMemory:
        if not torch.cuda.is_available():
            raise
        torch.cuda.empty_cache()
        return allocate()
