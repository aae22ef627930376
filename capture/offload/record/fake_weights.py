"""A model whose weights are in files, recorded under fake tensors: no weight is in memory.

Fake tensors have shapes, strides and devices, and no content (torch's FakeTensorMode), so the model
may be larger than memory, or built on the meta device. During the recording its parameters and
buffers are fake tensors; a fake twin stands in for any other tensor that it holds in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from offload.errors import CaptureError, FileError
from offload.interpreter.cuda_guard import keep_cuda_guard
from offload.interpreter.device_formats import own_format
from offload.interpreter.eager_run import bytes_of
from offload.interpreter.torch_names import dtype_name
from offload.program import ITEM_BYTES, StoredTensor, span_bytes
from offload.program.structure import OpaqueStructure, flatten
from offload.record.callables import module_of
from offload.record.compiled_callables import ORIGINAL_PREFIX
from offload.record.fake_results import device_rule
from offload.record.host_constants import may_be_host_constant
from offload.record.operators import is_tensor
from offload.record.recording_device import find_device

if TYPE_CHECKING:
    from offload.record.storages import TrackedStorage


class FakeWeights:
    """The fake tensors of one recording, and the tensors that they represent.

    Owner: one Recorder. Thread: that of the recording; during `given` no other thread may use the
    model.

    Attributes:
        mode: the mode under which everything runs.
        device: the device of all fake tensors.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        device: torch.device,
        has_same_content: Callable[[StoredTensor, StoredTensor], bool],
    ) -> None:
        """Begin without fake tensors.

        Args:
            stored: by the name of the parameter or buffer in the model.
            device: the device for which the Program is recorded.
            has_same_content: reads and compares two stored tensors.
        """
        self._has_same_content = has_same_content
        keep_cuda_guard()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        self._stored = stored
        self._files: dict[int, StoredTensor] = {}  # by identity of the fake storage
        self._originals: dict[int, torch.Tensor] = {}  # by id of the fake tensor
        self._storages: dict[int, torch.UntypedStorage] = {}  # that fake storages represent
        self._twins: dict[int, torch.Tensor] = {}  # by id of the model's tensor
        self._in_files: dict[int, list[tuple[int, int, str]]] = {}  # bytes, by storage's identity
        self._fakes: list[torch.Tensor] = []  # kept, so that identities are not reused

    @contextlib.contextmanager
    def given(self, function: Callable[..., Any]) -> Iterator[None]:
        """Let the model hold fake parameters and buffers.

        Raises:
            CaptureError: the callable is not a module, or is scripted; a parameter has no shape
                yet; or a tensor of a file shares memory with another tensor of the model.
            FileError: a parameter, a persistent buffer, or another buffer on the meta device is in
                no file; a tensor in a file has another shape or dtype; or a tensor that is stored
                under several of its names has other content under each.
        """
        model = module_of(function)
        if model is None:
            raise CaptureError(
                "weights= names the parameters of a module: capture the nn.Module itself, not "
                f"a {type(function).__qualname__}"
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise CaptureError(
                "weights= cannot give a ScriptModule other parameters: capture the original "
                "nn.Module"
            )
        self._make_twins(model)
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for module in model.modules():
                holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for holder in holders:
                    for name, tensor in holder.items():
                        if tensor is not None:
                            replaced.append((holder, name, tensor))
                            holder[name] = self._twins[id(tensor)]
            self._refresh_lists(model)
            yield
        finally:
            for holder, name, tensor in replaced:
                holder[name] = tensor
            self._refresh_lists(model)

    def _refresh_lists(self, model: torch.nn.Module) -> None:
        """Refresh the parameter lists that recurrent layers keep, and whose age they check.

        On accelerators these layers would also lay out anew parameters without memory; there the
        call is refused.
        """
        for module in model.modules():
            if isinstance(module, torch.nn.RNNBase) and self.device.type == "cpu":
                module._init_flat_weights()

    def _make_twins(self, model: torch.nn.Module) -> None:
        """Make a fake twin of each parameter and buffer."""
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        every = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        for name, tensor in every:
            if torch.nn.parameter.is_lazy(tensor):
                raise CaptureError(
                    f"{name} has no shape yet: call the model once before capturing it"
                )
            names.setdefault(id(tensor), []).append(name.replace(ORIGINAL_PREFIX, ""))
            tensors[id(tensor)] = tensor
        self._refuse_absent(_saved_names(model), names, tensors)
        for one in names.values():
            self._refuse_untied(one)
        for key, tensor in tensors.items():
            if self._find(names[key]):
                self._note_bytes(tensor, names[key][0])
        self._twins = {key: self._twin(tensor, names[key]) for key, tensor in tensors.items()}

    def _refuse_absent(
        self, saved: set[str], names: dict[int, list[str]], tensors: dict[int, torch.Tensor]
    ) -> None:
        """Refuse files that lack a tensor that was saved, or that has no content elsewhere.

        Raises:
            FileError: a file lacks such a tensor.
        """
        absent = {
            key: f"{' = '.join(names[key])} {dtype_name(tensor.dtype)}{list(tensor.shape)}"
            for key, tensor in tensors.items()
            if (tensor.is_meta or not saved.isdisjoint(names[key])) and not self._find(names[key])
        }
        if not absent:
            return
        known = {name for one in names.values() for name in one}
        others = sorted(self._stored.keys() - known)
        what = (
            f"the files lack {len(absent)} of the model's {len(tensors)} tensors: "
            f"{_listed(list(absent.values()))}."
        )
        if others:
            what += f" They have {len(others)} that the model does not have: {_listed(others)}."
        if any(not saved.isdisjoint(names[key]) for key in absent):
            what += (
                " Capture the module that was saved, under the names of its state_dict: where a "
                "library saves under other names, save it with safetensors.torch.save_model. The "
                "content of these tensors in memory is not used instead"
            )
        else:
            what += (
                " These are buffers that are not saved (persistent=False), which must be made "
                "outside of the meta device (accelerate.init_empty_weights leaves them there)"
            )
        raise FileError(what)

    def _refuse_untied(self, names: list[str]) -> None:
        """Refuse files that hold a tensor of the model under two names with different content.

        Raises:
            FileError: the contents differ, or cannot be read.
        """
        stored = [self._stored[name] for name in names if name in self._stored]
        for first, other in itertools.pairwise(stored):
            if not self._has_same_content(first, other):
                raise FileError(
                    f"{other.path}: {first.name} and {other.name} are one tensor in the model, and "
                    "have different content in the files: build the model without tying them, or "
                    "leave one of them out"
                )

    def _note_bytes(self, tensor: torch.Tensor, name: str) -> None:
        """Note the memory that the files represent, which must belong to a single tensor."""
        self._refuse_shared(tensor, name)
        begin, end = _span(tensor)
        spans = self._in_files.setdefault(tensor.untyped_storage()._cdata, [])
        spans.append((begin, end, name))

    def _refuse_shared(self, tensor: torch.Tensor, name: str) -> None:
        begin, end = _span(tensor)
        for other_begin, other_end, other in self._in_files.get(
            tensor.untyped_storage()._cdata, ()
        ):
            if begin < other_end and other_begin < end:
                raise CaptureError(
                    f"{name} shares memory with {other}, whose content is in the files: the "
                    "shared part is not known. Let the model hold the same Parameter twice, or "
                    f"compute the view in the forward from {other}"
                )

    def _find(self, names: list[str]) -> StoredTensor | None:
        return next((self._stored[name] for name in names if name in self._stored), None)

    def _twin(self, tensor: torch.Tensor, names: list[str]) -> torch.Tensor:
        stored = self._find(names)
        if stored is None:
            return self.of(tensor, names[0])
        if stored.shape != tuple(tensor.shape) or stored.dtype != dtype_name(tensor.dtype):
            advice = "build the model as it was saved"
            if stored.dtype not in ITEM_BYTES:
                advice = "torch has no such dtype, so save it as another"
            raise FileError(
                f"{stored.path}: {stored.name} is {stored.dtype}{list(stored.shape)}, and in the "
                f"model {dtype_name(tensor.dtype)}{list(tensor.shape)}: {advice}"
            )
        fake = self.empty(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        self._files[fake.untyped_storage()._cdata] = stored
        self._fakes.append(fake)
        return fake

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake contiguous tensor of this one's shape and dtype."""
        with self.mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)

    def deciding(self) -> contextlib.AbstractContextManager[None]:
        """The context in which the recorder itself inspects tensors, outside the call."""
        return contextlib.nullcontext()

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """The context of the recorded call."""
        return contextlib.nullcontext()

    def rule(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """The callable that says what an operator returns."""
        return device_rule(func, self.device)

    def input(self, tensor: torch.Tensor, leaf: int) -> torch.Tensor:
        """A fake tensor like the argument at this position, on separate memory."""
        n_items = 1 + sum(
            (size - 1) * stride
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            if math.prod(tensor.shape)
        )
        with self.mode:
            memory = torch.empty(n_items, dtype=tensor.dtype, device=self.device)
            fake = memory.as_strided(tensor.shape, tensor.stride())
            if tensor.is_conj():
                fake = torch._conj(fake)
            if tensor.is_neg():
                fake = torch._neg_view(fake)
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        self._keep(fake)
        return fake.requires_grad_(tensor.requires_grad)

    def _keep(self, fake: torch.Tensor) -> None:
        """Keep a fake tensor, so that its identity is not reused."""
        self._fakes.append(fake)

    def of_model(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The twin of a parameter or buffer of the model, which a list may hold as well."""
        return self._twins.get(id(tensor))

    def of(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The fake twin of a tensor in memory; views of one storage have twins on one storage.

        Args:
            tensor: the tensor that the twin represents.
            name: of the tensor or of its user, for the message.

        Raises:
            CaptureError: it lies on another device or in a device-specific format, or views memory
                whose content is in a file.
        """
        if isinstance(tensor, FakeTensor):
            return tensor
        device_format = own_format(tensor)
        if device_format:
            raise CaptureError(
                f"{name} lies in the device's format {device_format}, which a fake tensor does "
                "not have: with weights= cast it with torch_npu.npu_format_cast(tensor, 2) before "
                "the capture"
            )
        self._refuse_shared(tensor, name)
        if tensor.device != self.device and not may_be_host_constant(tensor):
            raise CaptureError(
                f"a tensor of shape {list(tensor.shape)} is on {tensor.device}, and the inputs on "
                f"{self.device}: move what the files do not hold there"
            )
        if not _is_whole(tensor):
            self._make_whole(tensor.untyped_storage())
        fake = self.mode.fake_tensor_converter.from_real_tensor(self.mode, tensor)
        self._originals.setdefault(id(fake), tensor)
        self._fakes.append(fake)
        return fake

    def _make_whole(self, storage: torch.UntypedStorage) -> None:
        """Give the fake storage all bytes of the original: the first view may show a part."""
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage
            converter = self.mode.fake_tensor_converter
            self._fakes.append(converter.from_real_tensor(self.mode, bytes_of(storage)))

    def files_of(self, weights: Mapping[int, TrackedStorage]) -> dict[int, StoredTensor]:
        """The weights on fake storages, by index, with their place in a file."""
        return {
            index: self._files[one.storage._cdata]
            for index, one in weights.items()
            if one.storage._cdata in self._files
        }

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in memory that a fake tensor represents; another tensor represents itself."""
        return self._originals.get(id(tensor), tensor)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows all bytes of its storage."""
    n_bytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and n_bytes == tensor.untyped_storage().nbytes()


def _saved_names(model: torch.nn.Module) -> set[str]:
    """The names of parameters and buffers in a `state_dict`: all but non-persistent buffers."""
    unsaved = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    every = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name.replace(ORIGINAL_PREFIX, "") for name in {name for name, _ in every} - unsaved}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if names[8:] else "")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The begin and end of the bytes of its storage that a tensor covers."""
    dtype = dtype_name(tensor.dtype)
    begin = int(tensor.storage_offset()) * ITEM_BYTES[dtype]
    return begin, begin + span_bytes(tuple(tensor.shape), tensor.stride(), dtype)


def device_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device of the tensors among a call's arguments; the CPU if there are no tensors.

    Raises:
        CaptureError: they lie on more than one accelerator.
    """
    try:
        tensors, _ = flatten((args, kwargs), is_tensor, share_same=False)
    except OpaqueStructure:  # the recorder refuses it by name
        tensors = []
    return find_device(tensors)
