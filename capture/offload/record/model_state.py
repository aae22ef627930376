"""The tensors that a model holds: their names, and whether a call changed them unseen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType

import torch

from offload.errors import CaptureError

# Storages up to this size are kept as they were before the call, so that a write that no schema
# declares is seen and can be undone; larger ones are summed once before and once after.
WATCHED_BYTES = 64 * 1024


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a uint8 tensor on the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _sum_of(content: torch.Tensor) -> int:
    words = content.numel() // 8
    return int(content[: words * 8].view(torch.int64).sum()) + int(content[words * 8 :].sum())


class StorageWatch:
    """Notices writes to one storage, and keeps what undoes them.

    Attributes:
        before: the storage's bytes before the call, of a small storage or once they had to be kept.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._is_small = storage.nbytes() <= WATCHED_BYTES
        self._content = bytes_of(storage)
        self.before = self._content.clone() if self._is_small else None
        self._latest = self.before
        self._sum = 0 if self._is_small else _sum_of(self._content)

    def keep_before(self) -> None:
        """Keep the bytes from before the call, ahead of the first write."""
        if self.before is None:
            self.before = self._content.clone()

    def changed(self) -> bool:
        """Whether a small storage was written since the last look; looks again."""
        if self._latest is None:
            return False
        if torch.equal(self._content, self._latest):
            return False
        self._latest = self._content.clone()
        return True

    def changed_unseen(self) -> bool:
        """Whether a storage that no launch wrote differs from before the call."""
        if self._is_small:
            return self.changed()
        return _sum_of(self._content) != self._sum


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """A tensor attribute of a model as it was before the call."""

    tensor: torch.Tensor
    identity: int
    layout: tuple[object, ...]

    def same(self, tensor: torch.Tensor) -> bool:
        """Whether the attribute is still this tensor, on the same storage and shaped alike."""
        now = _held(tensor)
        return tensor is self.tensor and (now.identity, now.layout) == (self.identity, self.layout)


def _held(tensor: torch.Tensor) -> _Held:
    layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return _Held(tensor, tensor.untyped_storage()._cdata, layout)


class ModelState:
    """The tensors of what is captured.

    Of a module: parameters, buffers and plain tensor attributes, submodules' included. Of a
    function: the tensors and modules that it closes over, has as defaults, or names as globals.

    Owner: one Recorder.
    """

    def __init__(self, function: object) -> None:
        self._function = function
        self._before = {name: _held(tensor) for name, tensor in self._tensors()}
        self._names: dict[int, str] = {}
        self._holders: dict[int, tuple[torch.Tensor, ...]] = {}
        self._watches: dict[int, StorageWatch] = {}
        for name, held in self._before.items():
            first = self._names.setdefault(held.identity, name)
            if first == name:
                self._watches[held.identity] = StorageWatch(held.tensor.untyped_storage())
            others = self._holders.get(held.identity, ())
            if not any(held.tensor is other for other in others):
                self._holders[held.identity] = (*others, held.tensor)

    def knows(self, identity: int) -> bool:
        """Whether a storage is the model's."""
        return identity in self._names

    def name(self, identity: int) -> str:
        """The name of the first attribute that holds a storage, or `constant`."""
        return self._names.get(identity, "constant")

    def holders(self, identity: int) -> tuple[torch.Tensor, ...]:
        """The model's tensors on a storage."""
        return self._holders.get(identity, ())

    def watch(self, storage: torch.UntypedStorage) -> StorageWatch:
        """The watch of a storage, since before the call if it is the model's."""
        return self._watches.get(storage._cdata) or StorageWatch(storage)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        found = _tensors_of(self._function, _FUNCTION_DEPTH)
        return ((name, tensor) for name, tensor in found if _is_watchable(tensor))

    def check(self, written: Mapping[int, bool]) -> None:
        """Compare with before the call; `written` tells storages that a launch wrote.

        Raises:
            CaptureError: an attribute was assigned, added, removed, or reshaped in place; or its
                content was changed by work that no launch did.
        """
        now = dict(self._tensors())
        for name in {**self._before, **now}:
            before, tensor = self._before.get(name), now.get(name)
            if before is None or tensor is None or not before.same(tensor):
                raise CaptureError(
                    f"the call assigned or reshaped the attribute or variable {name!r}, which a "
                    "replay would not do again: write it in place (self.x.copy_(...)), or pass it "
                    "as an argument and return it"
                )
        for identity, watch in self._watches.items():
            if not written.get(identity, False) and watch.changed_unseen():
                raise changed_unseen_error(self._names[identity])


def changed_unseen_error(name: str) -> CaptureError:
    """The error for a storage that changed without a launch."""
    return CaptureError(
        f"{name} was changed by work that the recorder cannot see (a custom kernel, NumPy, another "
        "thread, or an operator that does not declare it): express the change with torch operators "
        "on the calling thread"
    )


# How far functions that a function names are followed.
_FUNCTION_DEPTH = 2


def _tensors_of(thing: object, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a module, a function, or a container, with their names."""
    if isinstance(thing, torch.nn.Module):
        for prefix, module in thing.named_modules():
            for name, value in _attributes(module):
                for suffix, tensor in _tensors_in(value):
                    yield f"{prefix}.{name}{suffix}".removeprefix("."), tensor
    elif isinstance(thing, functools.partial):
        yield from _tensors_of(thing.func, depth)
    elif isinstance(thing, MethodType):
        yield from _tensors_of(thing.__self__, depth)
    elif isinstance(thing, FunctionType) and depth > 0:
        for name, value in _names_of(thing):
            for suffix, tensor in _tensors_in(value):
                yield f"{name}{suffix}", tensor
            for inner, tensor in _tensors_of(value, depth - 1):
                yield f"{name}.{inner}", tensor


def _names_of(function: FunctionType) -> Iterator[tuple[str, object]]:
    """What a function can reach by name: closed-over variables, defaults, globals in its code."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for position, value in enumerate(function.__defaults__ or ()):
        yield f"default {position}", value
    yield from (function.__kwdefaults__ or {}).items()
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    yield from module._parameters.items()
    yield from module._buffers.items()
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield name, value


def _tensors_in(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor, or the tensors directly inside a list, tuple or dict."""
    if isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                yield f"[{position}]", item
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, torch.Tensor):
                yield f"[{key!r}]", item


def _is_watchable(tensor: torch.Tensor) -> bool:
    return (
        not torch.nn.parameter.is_lazy(tensor)
        and not tensor.is_nested
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and torch._C._has_storage(tensor)
    )
