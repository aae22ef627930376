"""The tensors that a model holds: their names, and unseen changes by a call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Set

import torch

from offload.errors import CaptureError
from offload.interpreter.eager_run import bytes_of
from offload.record.compiled_callables import ORIGINAL_PREFIX
from offload.record.operators import has_plain_memory, is_wrapper
from offload.record.python_state import PythonState
from offload.record.trained_state import TrainedState

# Storages up to this size are copied before the call, so that a write that no schema declares is
# seen and can be undone; for larger storages a checksum is taken before and after.
WATCHED_BYTES = 64 * 1024


@functools.cache
def _ramp(device: torch.device) -> torch.Tensor:
    """Odd numbers that weigh 64-bit words."""
    with torch.inference_mode(False):
        return torch.arange(2048, device=device) * 2 + 1


def _checksum(content: torch.Tensor) -> tuple[int, ...]:
    """Numbers that reveal a change of the bytes, or of their order.

    Each 64-bit word is weighed by the product of two odd numbers, one for its row and one for its
    column in a block, modulo 2**64: no change of one word goes unseen. That takes 1.7 times as
    long as a plain sum, and less than half as long as a CRC.
    """
    n_words = content.numel() // 8
    ramp = _ramp(content.device)
    sums = []
    for block in content[: n_words * 8].view(torch.int64).split(len(ramp) ** 2):
        n_rows, n_rest = divmod(len(block), len(ramp))
        rows = block[: n_rows * len(ramp)].view(n_rows, len(ramp))
        rest = block[len(block) - n_rest :]
        if content.device.type == "cpu":
            sums.append(torch.dot(torch.mv(rows.t(), ramp[:n_rows]), ramp))
            sums.append(torch.dot(rest, ramp[:n_rest]))
        else:  # accelerators do not multiply integer matrices
            sums.append(((rows * ramp).sum(1) * ramp[:n_rows]).sum())
            sums.append((rest * ramp[:n_rest]).sum())
    return (*map(int, sums), *content[n_words * 8 :].tolist())


class StorageWatch:
    """Notices writes to one storage, and keeps the bytes that undo them.

    Attributes:
        before: the storage's bytes before the call, for a small storage or once they had to be
            kept.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._is_small = storage.nbytes() <= WATCHED_BYTES
        self._content = bytes_of(storage)
        self.before = self._content.clone() if self._is_small else None
        self._latest = self.before
        self._checksum = () if self._is_small else _checksum(self._content)

    def keep_before(self) -> None:
        """Keep the bytes from before the call; called ahead of the first write."""
        if self.before is None:
            self.before = self._content.clone()

    def changed(self) -> bool:
        """Whether a small storage was written since the last check; checks again."""
        if self._latest is None:
            return False
        if torch.equal(self._content, self._latest):
            return False
        self._latest = self._content.clone()
        return True

    def differs(self) -> bool:
        """Whether the storage differs from before the call."""
        if self._is_small and self.before is not None:
            return not torch.equal(self._content, self.before)
        return _checksum(self._content) != self._checksum


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """A tensor attribute of a model as it was before the call."""

    tensor: torch.Tensor = dataclasses.field(compare=False)
    identity: int
    layout: tuple[object, ...]

    def same(self) -> bool:
        """Whether the tensor still has the same storage and shape."""
        return _held(self.tensor) == self


def _held(tensor: torch.Tensor) -> _Held:
    layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return _Held(tensor, tensor.untyped_storage()._cdata, layout)


class ModelState:
    """The state of a captured callable: its tensors and its Python state.

    Owner: one Recorder.

    Attributes:
        python_state: the state that it holds in Python.
        generators: the random generators that the callable can reach.
        trained: the state that a step trains; None for a call that does not train.
    """

    def __init__(self, function: object, *, trains: bool = False) -> None:
        self.python_state = PythonState(function, trains=trains)
        self.trained = TrainedState(self.python_state) if trains else None
        self.generators = tuple(self.python_state.generators)
        self._held: list[tuple[str, _Held]] = []
        self._names: dict[int, str] = {}
        self._holders: dict[int, tuple[torch.Tensor, ...]] = {}
        self._watches: dict[int, StorageWatch] = {}
        self._unwatched: dict[int, str] = {}  # by id; python_state keeps the tensors
        of_steps = () if self.trained is None else self.trained.named_tensors()
        self._wrapped: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for path, tensor in self._taken_apart((*self.python_state.tensors, *of_steps)):
            if not has_plain_memory(tensor):
                self._unwatched.setdefault(id(tensor), path.removeprefix("self."))
                continue
            name = path.removeprefix("self.").replace(ORIGINAL_PREFIX, "")
            held = _held(tensor)
            self._held.append((name, held))
            if held.identity not in self._names:
                self._names[held.identity] = name
                watch = self.watch(tensor.untyped_storage())
                if watch is not None:
                    self._watches[held.identity] = watch
            others = self._holders.get(held.identity, ())
            if not any(tensor is other for other in others):
                self._holders[held.identity] = (*others, tensor)

    def _taken_apart(
        self, named: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors; wrappers such as DTensor yield the tensors that they hold."""
        for path, tensor in named:
            if not is_wrapper(type(tensor)):
                yield path, tensor
                continue
            attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            held = [(f"{path}.{name}", getattr(tensor, name)) for name in attributes]
            parts = [(name, one) for name, one in held if isinstance(one, torch.Tensor)]
            self._wrapped += [(name, tensor, part) for name, part in parts]
            yield from self._taken_apart(parts)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that the callable can reach and whose memory can be watched."""
        return (held.tensor for _, held in self._held)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `tensors`, each with the names of the attributes that hold it."""
        return ((name, held.tensor) for name, held in self._held)

    def knows(self, identity: int) -> bool:
        """Whether a storage belongs to the model."""
        return identity in self._names

    def name(self, identity: int) -> str:
        """The name of the first attribute that holds a storage, or `constant`."""
        return self._names.get(identity, "constant")

    def unwatched_name(self, tensor: torch.Tensor) -> str:
        """The name of the first attribute that is this tensor without plain memory, or empty."""
        return self._unwatched.get(id(tensor), "")

    def holders(self, identity: int) -> tuple[torch.Tensor, ...]:
        """The model's tensors on a storage."""
        return self._holders.get(identity, ())

    def watch(self, storage: torch.UntypedStorage) -> StorageWatch | None:
        """The watch of a storage, since before the call if the model holds it.

        None for a fake tensor's storage, which has no content.
        """
        if storage.device.type == "meta":
            return None
        return self._watches.get(storage._cdata) or StorageWatch(storage)

    def keep_before(self) -> None:
        """Keep the bytes of all state that an unobservable call may write.

        Only small parameters: a copy of all could take as much memory as the model.
        """
        for identity, watch in self._watches.items():
            if not all(isinstance(one, torch.nn.Parameter) for one in self._holders[identity]):
                watch.keep_before()

    def check_python(self) -> None:
        """Compare the Python state, and the storages of its tensors, with those before the call.

        Raises:
            CaptureError: an attribute or variable was assigned, added, removed, or reshaped in
                place.
        """
        self.python_state.check()
        for path, wrapper, part in self._wrapped:
            if getattr(wrapper, path.rpartition(".")[2]) is not part:
                raise CaptureError(
                    f"the call gave {path!r} another tensor, which a replay would not do again: "
                    "write it in place"
                )
        for name, held in self._held:
            if not held.same():
                raise CaptureError(
                    f"the call reshaped the attribute or variable {name!r}, or gave it another "
                    "storage, which a replay would not do again: write it in place "
                    "(self.x.copy_(...)), or pass it as an argument and return it"
                )

    def changed(self, written: Set[int]) -> Iterator[torch.Tensor]:
        """Yield a tensor for each storage whose content differs from before the call.

        Args:
            written: storages that need no check.
        """
        for identity, watch in self._watches.items():
            if identity not in written and watch.differs():
                yield self._holders[identity][0]


def changed_unseen_error(name: str) -> CaptureError:
    """The error for a storage that changed without a launch."""
    return CaptureError(
        f"{name} was changed by work that the recorder cannot see (a custom kernel, NumPy, another "
        "thread, or an operator that does not declare it): express the change with torch operators "
        "on the calling thread"
    )
