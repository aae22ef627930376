"""Programs: the recorded launches of a model over values, without addresses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from offload.console.amounts import show_count
from offload.console.text import one_line
from offload.program.collectives import Group
from offload.program.launch import Kernel, Launch, Opaque
from offload.program.structure import Structure
from offload.program.values import PLACED_ROLES, Role, TensorView, Value


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A tensor of the model's result.

    Attributes:
        view: where it lies.
        input_leaf: the input whose own tensor object is returned, or -1.
    """

    view: TensorView
    input_leaf: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """Two inputs that overlapped while one of them was written: they must overlap again.

    `distance_bytes` is the second input's address minus the first's.
    """

    first: int
    second: int
    distance_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """The state of the recorded call; an execution under another state is refused.

    Attributes:
        state: autocast and the default dtype, packed by the native side.
        training: whether the module that was called (`Bindings.root`) was in training mode.
    """

    state: int
    training: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """Launches over Values in recorded order, for the device type of the recording.

    Plain data: its tensors, generators, callables, classes and other objects are in its `Bindings`.

    Attributes:
        device: the device type, such as `cpu`.
        device_index: which accelerator of that type; None on the CPU, and if the Program is on no
            accelerator of this machine.
        inputs: the whole view of each input tensor, in the order of `arguments_structure`.
        results: the tensors of the result, in the order of `result_structure`.
        arguments_structure, result_structure: their nesting, as from `plain_structure`.
        overlaps: inputs that must overlap as recorded, because one of them is written.
        weight_views: for each Value of role weight the view of each tensor that held it at the
            recording (several if parameters share a storage).
        parameter_names: names of the callable's positional parameters, to accept keywords; empty
            for positional-only ones.
        keyword_only_names: names of its other parameters. Any other keyword went into the
            callable's **kwargs.
        host_reads: where the model would have read a tensor on the host, for messages.
        versions: of the libraries that recorded it.
        groups: the process groups of its collectives, by name.
        unchecked: why it is unknown whether the launches do all that the callable does, for
            messages; empty if it was checked.
        notes: what else is to be known of the recording, for messages. Not in files.
        caller: the state of the recorded call; None in a Program from a file, which computes what
            was recorded under any state.
    """

    device: str
    values: tuple[Value, ...]
    launches: tuple[Launch, ...]
    inputs: tuple[TensorView, ...]
    results: tuple[Result, ...]
    arguments_structure: Structure
    result_structure: Structure
    overlaps: tuple[Overlap, ...] = ()
    weight_views: Mapping[int, tuple[TensorView, ...]] = dataclasses.field(default_factory=dict)
    parameter_names: tuple[str, ...] = ()
    keyword_only_names: tuple[str, ...] = ()
    host_reads: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    device_index: int | None = None
    groups: tuple[Group, ...] = ()
    unchecked: str = ""
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    caller: Caller | None = dataclasses.field(default=None, compare=False, repr=False)

    def of_role(self, role: Role) -> tuple[Value, ...]:
        """The Values of one role, in order."""
        return tuple(value for value in self.values if value.role is role)

    @property
    def packed_weights(self) -> frozenset[int]:
        """The weights from which packed Values are derived for kernels."""
        return frozenset(
            index
            for launch in self.launches
            if isinstance(launch.callee, Kernel) and launch.callee.derives
            for index in launch.reads
        )

    @functools.cached_property
    def opaque(self) -> Opaque | None:
        """The callee of the single launch of an opaque Program; None if all launches were seen.

        For each tensor of the Program's results, that launch's result is the view of the Value that
        it makes.
        """
        callees = (launch.callee for launch in self.launches)
        return next((one for one in callees if isinstance(one, Opaque)), None)

    @property
    def written_values(self) -> frozenset[int]:
        """The Values that launches write; for an opaque launch all inputs too.

        A write of the same bytes is not seen there.
        """
        written = frozenset(index for launch in self.launches for index in launch.writes)
        return written if self.opaque is None else written.union(one.value for one in self.inputs)

    @property
    def is_random(self) -> bool:
        """Whether a launch draws from a generator."""
        return any(launch.random for launch in self.launches)

    @property
    def leaves_something(self) -> bool:
        """Whether executions leave visible changes, so that their order matters."""
        state = (Role.INPUT, Role.WEIGHT)
        return any(
            launch.effects or any(self.values[index].role in state for index in launch.writes)
            for launch in self.launches
        )

    def __str__(self) -> str:
        lines = [
            f"program on {self.device}: {show_count(len(self.launches), 'launch', 'launches')}, "
            f"{show_count(len(self.values), 'value')}"
        ]
        lines += [
            f"  {value.role:<10} %{value.index} {value.dtype}{list(value.shape)} "
            f"{value.size_bytes} B  {one_line(value.name)}{'  constant on the CPU' * value.on_host}"
            f"{f'  in {value.device_format}' if value.device_format else ''}"
            for value in self.values
            if value.role not in PLACED_ROLES
        ]
        lines += [f"  {one_line(str(group))}" for group in self.groups]
        lines += [f"  {launch}" for launch in self.launches]
        returned = ", ".join(str(result.view) for result in self.results)
        return "\n".join([*lines, f"  return {returned}"])
