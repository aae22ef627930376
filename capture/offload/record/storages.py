"""Maps storages to Values: aliasing and writes as observed while a call is recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import cast

import torch

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.interpreter.device_formats import own_format
from offload.interpreter.eager_run import bytes_of
from offload.interpreter.torch_names import dtype_name
from offload.program import ITEM_BYTES, Role, TensorView, Value, span_bytes
from offload.record.device_formats import refuse_unwritten_in_own_format
from offload.record.host_constants import check_host_constant, check_read_unseen
from offload.record.model_state import ModelState, StorageWatch


@dataclasses.dataclass(slots=True)
class TrackedStorage:
    """A storage met while recording, and its Value.

    Attributes:
        storage: kept alive, so that its identity is not reused.
        base_bytes: where the Value begins in the storage.
        watch: for an input or weight, its watch for writes.
        holders: for a weight, the tensors that hold the storage.
        written: some launch wrote it.
        known: its content depends on no input, weight or generator, host constants excepted.
        foreign: a tensor that the call made on memory that is not torch's (NumPy's).
        exposed_at: where its memory was passed to NumPy, so that later writes would be visible
            there.
        unwritten_at_birth: made without content (`torch.empty`).
        nbytes_at_birth: the storage's size when it was met.
        kept_for_step: a gradient that the call made, which executions write where it lies.
    """

    value: Value
    storage: torch.UntypedStorage
    base_bytes: int
    watch: StorageWatch | None = None
    holders: tuple[torch.Tensor, ...] = ()
    written: bool = False
    known: bool = False
    foreign: bool = False
    exposed_at: str = ""
    unwritten_at_birth: bool = False
    nbytes_at_birth: int = 0
    kept_for_step: bool = False

    def __post_init__(self) -> None:
        self.nbytes_at_birth = self.storage.nbytes()

    @property
    def is_state(self) -> bool:
        """Whether it is visible to the caller: an input or a weight."""
        return self.value.role in (Role.INPUT, Role.WEIGHT)

    def content(self) -> torch.Tensor:
        """The storage's bytes now."""
        return bytes_of(self.storage)

    def keep_before(self) -> None:
        """Keep the bytes from before the call; called ahead of the first write."""
        if self.watch is not None:
            self.watch.keep_before()

    def kept(self) -> torch.Tensor:
        """The bytes from before the call.

        Raises:
            CaptureError: they were not kept, since the write to the storage was not observable.
        """
        if self.watch is None or self.watch.before is None:
            raise CaptureError(
                f"{self.value.name} was written by an operator that does not declare it, or by "
                "work that the recorder cannot see, and is too large to have been watched: write "
                "it with torch operators"
            )
        return self.watch.before

    def own_content(self) -> torch.Tensor:
        """The bytes of the Value now."""
        return self.content()[self.base_bytes : self.base_bytes + self.value.size_bytes]


class StorageTable:
    """All storages met in one recording.

    Owner: one Recorder. Not thread-safe: recording happens on one thread.

    Attributes:
        state: the state of the recorded model.
        device: the device of the recording; set when it begins.
    """

    def __init__(self, state: ModelState) -> None:
        self._by_identity: dict[int, TrackedStorage] = {}
        self._retired: list[TrackedStorage] = []
        self._twins: dict[int, TrackedStorage] = {}
        self.state = state
        self.device = torch.device("cpu")

    def __iter__(self) -> Iterator[TrackedStorage]:
        yield from self._retired
        yield from self._by_identity.values()

    def __len__(self) -> int:
        return len(self._retired) + len(self._by_identity)

    def find(self, tensor: torch.Tensor) -> TrackedStorage | None:
        """The storage that `tensor` views, if it was met before."""
        identity = tensor.untyped_storage()._cdata
        return self._by_identity.get(identity) or self._twins.get(identity)

    def of(self, tensor: torch.Tensor) -> TrackedStorage:
        """The storage that `tensor` views, which must have been met before."""
        tracked = self.find(tensor)
        assert tracked is not None
        return tracked

    def add_input(self, tensor: torch.Tensor, name: str) -> TrackedStorage:
        """Track an argument; its Value is the bytes that the tensor spans.

        Raises:
            CaptureError: it is neither on the device nor a host constant.
        """
        shape, strides, dtype = tuple(tensor.shape), tensor.stride(), dtype_name(tensor.dtype)
        value = Value(
            len(self), Role.INPUT, shape, strides, dtype, span_bytes(shape, strides, dtype), name
        )
        offset_bytes = _offset(tensor) * tensor.element_size()
        tracked = TrackedStorage(value, tensor.untyped_storage(), offset_bytes)
        return self._add(tracked, tensor)

    def add_weight(self, tensor: torch.Tensor) -> TrackedStorage:
        """Track a tensor that the model holds; its Value is the whole storage.

        Raises:
            CaptureError: it is neither on the device nor a host constant.
        """
        holders = self.state.holders(tensor.untyped_storage()._cdata) or (tensor,)
        if tensor.device != self.device:
            holders = tuple(one for one in holders if one.dim() == 0) or (tensor,)
        return self._add(self._held(holders), holders[0])

    def add_held(self, tensor: torch.Tensor, name: str) -> TrackedStorage:
        """Track a gradient that is held from now on and was not held before."""
        tracked = self._held((tensor,))
        tracked.kept_for_step = True
        tracked.value = dataclasses.replace(tracked.value, name=name)
        return self._add(tracked, tensor)

    def add_read_unseen(self, tensor: torch.Tensor) -> TrackedStorage:
        """Track a CPU tensor that the model holds and that unseen code may have read.

        It is a host constant, of any shape.

        Raises:
            CaptureError: it is too large to be compared at each execution.
        """
        tracked = self._held(self.state.holders(tensor.untyped_storage()._cdata))
        check_read_unseen(tracked, self.device)
        return self._insert(tracked, on_host=True)

    def _held(self, holders: tuple[torch.Tensor, ...]) -> TrackedStorage:
        first = holders[0]
        storage = first.untyped_storage()
        value = Value(
            len(self),
            Role.WEIGHT,
            tuple(first.shape),
            first.stride(),
            dtype_name(first.dtype),
            storage.nbytes(),
            self.state.name(storage._cdata),
            device_format=own_format(first),
        )
        return TrackedStorage(value, storage, 0, holders=holders)

    def add_made(self, tensor: torch.Tensor, name: str, *, unwritten: bool) -> TrackedStorage:
        """Track a storage that a launch made.

        Raises:
            CaptureError: it is neither on the device nor may become a host constant, or begins
                without content in a device-specific format.
        """
        storage = tensor.untyped_storage()
        value = Value(
            len(self),
            Role.ACTIVATION,
            tuple(tensor.shape),
            tensor.stride(),
            dtype_name(tensor.dtype),
            storage.nbytes(),
            name,
            device_format=own_format(tensor),
        )
        if unwritten:
            refuse_unwritten_in_own_format(value)
        return self._add(TrackedStorage(value, storage, 0, unwritten_at_birth=unwritten), tensor)

    def let_stand_for(self, fake: torch.Tensor, tracked: TrackedStorage) -> None:
        """Let `find` return a storage for its fake twin as well."""
        self._twins[fake.untyped_storage()._cdata] = tracked

    def _add(self, tracked: TrackedStorage, tensor: torch.Tensor) -> TrackedStorage:
        on_host = tensor.device != self.device
        if on_host:
            check_host_constant(tensor, tracked, self.device)
        return self._insert(tracked, on_host=on_host)

    def _insert(self, tracked: TrackedStorage, *, on_host: bool) -> TrackedStorage:
        if on_host:
            content = bytes(tracked.own_content().tolist())
            tracked.value = dataclasses.replace(tracked.value, host_content=content)
            tracked.known = tracked.is_state
        self._by_identity[tracked.storage._cdata] = tracked
        if tracked.is_state:
            tracked.watch = self.state.watch(tracked.storage)
        return tracked

    def replace_grown(self, tracked: TrackedStorage, tensor: torch.Tensor) -> TrackedStorage:
        """Track again an empty storage that an operator has resized (`out=torch.empty(0)`)."""
        del self._by_identity[tracked.storage._cdata]
        self._retired.append(tracked)
        return self.add_made(tensor, tracked.value.name, unwritten=True)

    def view(self, tensor: torch.Tensor, tracked: TrackedStorage) -> TensorView:
        """Describe `tensor` as a view of its Value.

        Raises:
            CaptureError: it reaches outside the Value (an as_strided beyond an input's own bytes).
        """
        dtype = dtype_name(tensor.dtype)
        shape, strides = tuple(tensor.shape), tensor.stride()
        offset_bytes = _offset(tensor) * ITEM_BYTES[dtype] - tracked.base_bytes
        if 0 in shape:
            offset_bytes = 0
        view = TensorView(
            tracked.value.index,
            offset_bytes,
            shape,
            strides,
            dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        value = tracked.value
        if not offset_bytes and (shape, strides, dtype) == (
            value.shape,
            value.strides,
            value.dtype,
        ):
            return view
        name, size_bytes = value.name, value.size_bytes
        if offset_bytes % ITEM_BYTES[dtype]:
            raise CaptureError(
                f"{user_location()}: a view of {name} as {dtype} begins at byte {offset_bytes} of "
                "it, not at a multiple of its item size: pass the argument as that dtype, or "
                "clone it"
            )
        if offset_bytes < 0 or view.end_bytes > size_bytes:
            raise CaptureError(
                f"{user_location()}: a view of {name} covers bytes {offset_bytes} to "
                f"{view.end_bytes}, outside its own 0 to {size_bytes}: pass the whole tensor as "
                "input"
            )
        return view


def _offset(tensor: torch.Tensor) -> int:
    """The offset of a tensor, in elements; an expression where sizes vary (`symbolic_sizes`)."""
    return cast(int, tensor.storage_offset())


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one on the same memory with a separate storage object.

    Two arguments may share a storage with each other or with a weight. The origin of a view in the
    forward would then be ambiguous, and Python's `is` would decide for later calls. The alias
    requires gradients if the tensor does: `matmul` and others choose their launches by that.
    """
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    content.set_(tensor.untyped_storage())
    other = torch.utils.dlpack.from_dlpack(content).untyped_storage()
    twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    twin.set_(other, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    if tensor.is_conj():
        twin = torch._conj(twin)
    if tensor.is_neg():
        twin = torch._neg_view(twin)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
    if isinstance(tensor, torch.nn.Buffer):
        twin = torch.nn.Buffer(twin, persistent=tensor.persistent)
    return twin.requires_grad_(tensor.requires_grad)
