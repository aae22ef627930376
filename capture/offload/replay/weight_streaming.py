"""The weights of an executable that are streamed: its plan in words, counts, new content."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch

from offload import _native
from offload.backends import managed_weights, native_source
from offload.byte_sizes import show_bytes
from offload.errors import BindingError
from offload.program import Program, StoredTensor
from offload.streaming import Streaming
from offload.torch_names import find_dtype


class WeightStreaming:
    """The weights of one executable that lie in a memory of their own, and the transfers into it.

    Owner: an Executable. Thread: any.

    Attributes:
        plan: where weights lie, and the transfers of a pass.
    """

    def __init__(
        self,
        program: Program,
        plan: Streaming,
        stream: _native.WeightStream | _native.CudaWeightStream,
    ) -> None:
        self.plan = plan
        self._program = program
        self._stream = stream
        self._numbers = {value: number for number, value in enumerate(managed_weights(program))}

    @property
    def bytes_moved(self) -> int:
        """By transfers since the executable was loaded."""
        return self._stream.bytes_moved

    @property
    def wait_ns(self) -> int:
        """For which launches have waited for transfers since the executable was loaded.

        0 on a device that executes a graph: nobody knows when its launches began.
        """
        return self._stream.wait_ns

    def refresh(self) -> None:
        """Read all weights again, after they were changed where they are stored.

        Waits for what is in flight; the next execution sees the new content.

        Raises:
            ExecutionError: a file cannot be read any more.
        """
        self._stream.refresh()

    def replace(self, weights: Mapping[str, torch.Tensor | StoredTensor]) -> None:
        """Give weights other content from the next execution on, without loading again.

        Args:
            weights: by the weight's name, as the program prints it, or as it is stored, a tensor
                (copied) or its place in a file.

        Raises:
            BindingError: there is no such weight, or the new content has another shape or dtype;
                none has been replaced.
        """
        places = {self._program.values[value].name: value for value in self._numbers}
        places |= {
            stored.name: value
            for value, stored in self._program.stored.items()
            if value in self._numbers
        }
        for name, content in weights.items():
            if name not in places:
                raise BindingError(
                    f"{name}: no weight of this name is streamed or resident here; there are "
                    f"{', '.join(sorted(places))}"
                )
            _check_like(self._program, places[name], name, content)
        for name, content in weights.items():
            source = (
                content.detach().contiguous().clone().untyped_storage()
                if isinstance(content, torch.Tensor)
                else content
            )
            self._stream.replace(self._numbers[places[name]], native_source(source))

    def explain(self) -> str:
        """Say what stays, what is streamed, and what time a pass is predicted to take and why."""
        plan = self.plan
        streamed = [plan.pieces[one.piece] for one in plan.transfers]
        lines = [
            f"weights: {show_bytes(self._weight_bytes)}, of which {show_bytes(plan.resident_bytes)}"
            f" stay and {show_bytes(plan.transfer_bytes)} are streamed at each execution",
            f"budget {show_bytes(plan.budget_bytes)}: {show_bytes(plan.memory_bytes)} used, "
            f"{show_bytes(plan.ring_bytes)} of it as the ring of {len(streamed)} transfers",
            f"link: {show_bytes(plan.link.bytes_per_second)}/s and "
            f"{plan.link.overhead_ns / 1e3:.1f} us for each copy, as measured",
            f"predicted: {plan.period_ns / 1e6:.3f} ms; all weights resident "
            f"{plan.compute_ns / 1e6:.3f} ms; no plan is quicker than {plan.roofline_ns / 1e6:.3f} "
            f"ms ({plan.roofline_ns / plan.period_ns:.1%})"
            if plan.period_ns
            else "predicted: nothing to compute",
            f"least budget: {show_bytes(plan.floor.required_bytes)}, set by {plan.floor.name} "
            f"(ring {show_bytes(plan.floor.ring_bytes)}, resident "
            f"{show_bytes(plan.floor.resident_bytes)}), at which {plan.floor.period_ns / 1e6:.3f} "
            "ms are predicted",
        ]
        sizes = Counter[int]()
        for piece in streamed:
            sizes[piece.value] += piece.size_bytes
        for value, n_bytes in sizes.most_common():
            whole = self._program.values[value].size_bytes
            lines.append(
                f"  streamed: {self._program.values[value].name} {show_bytes(n_bytes)}"
                + (f" of {show_bytes(whole)}" if n_bytes < whole else "")
            )
        return "\n".join(lines)

    @property
    def _weight_bytes(self) -> int:
        return sum(self._program.values[value].size_bytes for value in self._numbers)


def _check_like(
    program: Program, value: int, name: str, content: torch.Tensor | StoredTensor
) -> None:
    expected = program.values[value]
    dtype = content.dtype if isinstance(content, torch.Tensor) else find_dtype(content.dtype)
    same = tuple(content.shape) == expected.shape and dtype == find_dtype(expected.dtype)
    n_bytes = math.prod(content.shape) * dtype.itemsize
    if not same or n_bytes != expected.size_bytes:
        raise BindingError(
            f"{name}: expected {expected.dtype}{list(expected.shape)}, contiguous, got "
            f"{str(dtype).removeprefix('torch.')}{list(content.shape)}"
        )
