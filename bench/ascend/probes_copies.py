"""Probes of copies: staged ones, and those that read their addresses from memory."""

from __future__ import annotations

import ctypes

from probe_device import (
    INNER_DEVICE_TO_DEVICE,
    TENSOR_BYTES,
    device,
    floats,
    words,
)
from probing import conclude, tell

_SIZES_BYTES = (64, 4096, 1 << 20)


def staged_copies(memory: str) -> None:
    """A4: the source of kind 5 may change as soon as the call has returned."""
    acl = device()
    stream, works = acl.stream(), {}
    for n_bytes in _SIZES_BYTES:
        if memory == "pinned":
            source = acl.make("aclrtMallocHost", n_bytes)
        else:
            kept = ctypes.create_string_buffer(n_bytes)
            source = ctypes.addressof(kept)
        target = acl.memory(bytes(n_bytes))
        ctypes.memset(source, 1, n_bytes)
        with acl.held_back(stream):
            acl.stage(target, ctypes.c_void_p(source), n_bytes, stream)
            ctypes.memset(source, 2, n_bytes)
        acl.synchronize(stream)
        works[n_bytes] = acl.download(target, n_bytes) == b"\1" * n_bytes
    tell("right, by bytes", works)
    conclude(all(works.values()), "" if all(works.values()) else "the source was read too late")


def readdressed_copies(shift_bytes: str) -> None:
    """A5: a captured copy takes both addresses from memory, when it runs."""
    acl = device()
    shift, stream = int(shift_bytes), acl.stream()
    sources = [acl.memory(bytes(shift) + floats(first)) + shift for first in (1, 2, 3)]
    targets = [acl.memory(bytes(shift + TENSOR_BYTES)) + shift for _ in sources]
    table = acl.memory(words(targets[0], sources[0]))
    place = (table, TENSOR_BYTES, 0, table + 8, TENSOR_BYTES, 0, INNER_DEVICE_TO_DEVICE, stream)
    with acl.capture(stream) as models:
        acl.call("aclrtMemcpyAsyncWithOffset", *place)
    with acl.held_back(stream):
        for source, target in zip(sources[1:], targets[1:], strict=True):
            acl.stage(table, words(target, source), 16, stream)
            acl.execute(models[0], stream)
    acl.synchronize(stream)
    found = [acl.download(target, TENSOR_BYTES) for target in targets]
    right = found == [bytes(TENSOR_BYTES), floats(2), floats(3)]
    tell("targets written", [content != bytes(TENSOR_BYTES) for content in found])
    conclude(right, "" if right else "it took the addresses of its capture, or other bytes")
