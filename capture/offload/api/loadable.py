"""What is loaded by options: on one device, several, over ranks, or for sizes that vary."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import torch

from offload.backends import Backend
from offload.console.progress import Progress
from offload.costs import LaunchCosts
from offload.errors import BindingError
from offload.host import (
    ExecutableForEachSize,
    FamilyLoad,
    PaddedExecutable,
    SizedExecutable,
    Sizes,
    load_family,
    refuse_for_families,
)
from offload.interpreter.outside_graphs import outside_graphs
from offload.interpreter.settled_family import SettledFamily, settle_family
from offload.load.device_options import Watts, one_device, several_devices
from offload.load.devices import load_on_devices
from offload.load.launch_times import check_costs
from offload.load.pipeline import load_program
from offload.load.rank_stages import Pipeline, refuse_beside_pipeline
from offload.load.stages import load_stage
from offload.load.training_stages import is_training, load_training_stage
from offload.program import BoundProgram
from offload.program.family import BoundFamily
from offload.run import Executable
from offload.run.placed_executable import PlacedExecutable
from offload.run.stage_executable import StageExecutable
from offload.run.training_stage import TrainingStage
from offload.timeline import Scheduling


class Loadable:
    """A Program, or a Family, that `load` makes resident.

    Attributes:
        name: for messages.
    """

    name: str
    _bound_family: BoundFamily | None
    _loads: weakref.WeakSet[Executable]

    @property
    def bound(self) -> BoundProgram:
        """The Program with its live objects."""
        raise NotImplementedError

    @overload
    def load(
        self,
        device: str | torch.device | Backend | None = ...,
        *,
        scheduling: str | None = ...,
        verify: bool = ...,
        weights_budget: int | str | None = ...,
        share_store: bool = ...,
        fuse: bool | Literal["auto"] = ...,
        lanes: int | Literal["auto"] = ...,
        progress: Progress = ...,
        sizes: None = ...,
        groups: Mapping[str, Any] | None = ...,
        costs: LaunchCosts | None = ...,
    ) -> Executable: ...

    @overload
    def load(
        self,
        device: str | torch.device | Backend | None = ...,
        *,
        scheduling: str | None = ...,
        verify: bool = ...,
        fuse: bool | Literal["auto"] = ...,
        progress: Progress = ...,
        sizes: Sizes,
        host_cores: int | Literal["auto"] | None = ...,
    ) -> SizedExecutable | PaddedExecutable | ExecutableForEachSize: ...

    @overload
    def load(
        self,
        device: list[str | torch.device | Backend],
        *,
        objective: str = ...,
        placement: str = ...,
        watts: Sequence[Watts] | None = ...,
        max_slowdown: float | None = ...,
        costs: LaunchCosts | None = ...,
        scheduling: str | None = ...,
        verify: bool = ...,
        fuse: bool | Literal["auto"] = ...,
        lanes: int | Literal["auto"] = ...,
        progress: Progress = ...,
    ) -> PlacedExecutable: ...

    @overload
    def load(
        self,
        device: str | torch.device | Backend | None = ...,
        *,
        pipeline: Pipeline,
        scheduling: str | None = ...,
        verify: bool = ...,
        fuse: bool = ...,
        lanes: int | Literal["auto"] = ...,
        progress: Progress = ...,
    ) -> StageExecutable | TrainingStage: ...

    @outside_graphs
    def load(
        self,
        device: str | torch.device | Backend | list[str | torch.device | Backend] | None = None,
        *,
        scheduling: str | None = None,
        verify: bool = True,
        weights_budget: int | str | None = None,
        share_store: bool = True,
        fuse: bool | Literal["auto"] = False,
        lanes: int | Literal["auto"] = 1,
        progress: Progress = None,
        sizes: Sizes | None = None,
        groups: Mapping[str, Any] | None = None,
        objective: str | None = None,
        placement: str | None = None,
        costs: LaunchCosts | None = None,
        watts: Sequence[Watts] | None = None,
        max_slowdown: float | None = None,
        host_cores: int | Literal["auto"] | None = None,
        pipeline: Pipeline | None = None,
    ) -> (
        Executable
        | PaddedExecutable
        | ExecutableForEachSize
        | PlacedExecutable
        | StageExecutable
        | TrainingStage
    ):
        """Load the Program on a device as an executable.

        Args:
            device: a device type, which may have an index (`cuda:1`); a Backend with options of
                its own, such as `AscendBackend(capturer, refresh="gather")`; or a list of these,
                on which launches are placed by their durations and by those of transfers. One of a
                list must have the memory of the Program's tensors: the first such device is the
                one that callers see. None: the device of the recording, or the one for which the
                file was read.
            scheduling: `offload`: one task for the whole program. `host`: launch by launch, the
                baseline (on `npu` by torch's operators, which also run what no model can hold).
                `auto`: `offload`, or with `sizes` whichever executes the recorded sizes faster, by
                measurement; on `cuda` and `npu` the time to load a task counts. None: `offload`;
                with `sizes` on `cuda` and `npu`, `host`.
            verify: prove at load that a captured graph computes the same at other addresses, and
                time its launches where weights are streamed. The CPU backend always proves each
                launch at its first execution.
            weights_budget: the limit of the device memory for weights, in bytes, as text such as
                `2GiB`, or `auto` for the free memory. The other weights are streamed during
                executions, from the files of `capture(weights=)` or, on the CPU, from the model's
                tensors. These are read again after each write that torch counts and after each
                step of a `torch.optim` optimizer. After a write through `param.data`, NumPy or a
                storage, by a fused operator (`torch._fused_adam_`), or to a tensor made in
                inference mode, call `run.streaming.refresh()`. Their storages cannot be resized
                until the executable is closed. None: no limit; weights in files are read at load.
            share_store: all executables on a GPU or NPU share the host's copy of streamed files.
                False: this one has its own, which `run.streaming.replace` requires on an NPU while
                others share.
            fuse: replace launches by compiled kernels (on the CPU by a C++ compiler, on CUDA by
                Triton), cached in the user's cache folder. Results differ from eager's by
                rounding. At its first execution each kernel is proved to be at most 4 times as far
                from float64 as the launches it replaces; otherwise those run. `auto` (CPU): only
                kernels that are faster, by executions at the first load with this number of
                torch's threads; the choice is cached. False: torch's kernels, with eager's bits.
                With `sizes`: of promoted sizes.
            lanes: the maximum number of independent launches at once, 1 to 64. On the CPU lanes
                are threads. With 1, torch's threads share each launch. With more, a launch has one
                thread and the bits of `torch.set_num_threads(1)`; the other threads take part in
                an execution only if earlier ones were faster so. On CUDA lanes are branches of
                the graph, with the bits of one lane. `auto`: several lanes if calls are faster, by
                measurement. For a Program with collectives, 2 means one lane of launches, and one
                for the exchanges of each process group; `auto` decides for all ranks together.
            progress: of a load that reads weights or executes trials. None: on stderr if it is a
                terminal, for loads of more than two seconds. False: none. A function is called
                with (done, total, what), from 0 to the total: bytes of `reading weights`, at
                intervals of at most 8 MiB, and executions of `timing launches`. Weights that are
                streamed on the CPU are read twice. What the function raises ends the load.
            sizes: one executable for all sizes of a capture with `dynamic_shapes`. The host then
                launches the operators on `cuda` and `npu`, or with `scheduling="offload"` each
                choice of sizes is loaded as a task at its first occurrence. With `pad` sizes are
                padded to buckets. With `promoted` repeated sizes get executables of their own: on
                the CPU with kernels (`fuse`), by a thread for which no call waits; on `cuda` and
                `npu` as tasks, within a call. None: the recorded sizes alone.
            groups: process groups that replace recorded ones, by the names of these
                (`captured.program.groups`). All ranks of a group load at the same time.
            objective: of a list of devices: `latency` of a call, `throughput` of several submitted
                calls, or `energy` of a call on all devices. None: `latency`.
            placement: of a list of devices. `static`: launches stay where they are placed.
                `hybrid`: segments move to other devices, where they are loaded too, when
                executions take longer than predicted. `dynamic`: each execution runs a segment on
                the device that completes it first. None: `static`.
            costs: measured durations of launches of earlier loads (`offload.LaunchCosts`), used
                for lanes and devices. Missing ones are measured and added. None: launches are
                timed at each load.
            watts: for `energy`, an `offload.Watts(idle=, busy=)` for each device. None: measured
                by RAPL or NVML.
            max_slowdown: for `energy`, the limit of a call's latency as a multiple of the least
                one found, at least 1. None: 1.1.
            pipeline: divide the Program into stages, balanced by duration; each rank of a process
                group loads one of them, with its weights. All ranks have captured the same
                micro-batch, or the same training step with all micro-batches, and load at the same
                time.
            host_cores: with `sizes` on an Ascend device with kernels of a capturer: the number of
                cores, 1 to 64, for the stages of a launch at new sizes. 1: one stage after the
                other. 2: infer shapes and tile | write addresses and launch. 3: infer shapes and
                tile | write addresses | launch; further cores tile too. Cached sizes use the
                calling thread alone. `auto`: 1 or 3, by measurement. None: the environment
                variable MAX_RUNTIME_CORE_NUMBER, else 1.

        Returns:
            The executable, whose `explain()` states what was chosen and why.

        Raises:
            BackendUnavailable: the device is not available, cannot run this Program, or is not the
                one of its type that holds the Program's weights and inputs.
            CaptureError: the device cannot capture the Program, the proof failed, another rank
                refuses, or its Program has other collectives.
            BindingError: an option is invalid, excludes another one, or is not for this Program or
                device; a process group is missing or has other members than the recorded one; a
                weight has another shape, dtype or layout than the recorded one; OFFLOAD_DEBUG is
                no level.
            PlanError: the Program cannot be placed, the budget is too small, or the host lacks
                memory for streamed weights; the message states the required amount and its cause.
            FileError: a file of weights is missing or shorter than before, or the folder of
                OFFLOAD_DUMP is not writable.
            OutOfMemory: the device lacks memory.
            CostModelError: `costs` are of another machine.
            ExecutionError: the device failed, or another rank does not load within its group's
                timeout.
        """
        check_costs(costs, plans=lanes != 1 or isinstance(device, list))
        one = one_device(device)

        def load(
            bound: BoundProgram,
            fuse: bool | Literal["auto"] = False,
            progress: Progress = progress,
            device: str | torch.device | Backend | None = one,
        ) -> Executable:
            run = load_program(
                bound,
                device,
                scheduling=Scheduling.OFFLOAD if scheduling is None else scheduling,
                verify=verify,
                weights_budget=weights_budget,
                share_store=share_store,
                fuse=fuse,
                lanes=lanes,
                progress=progress,
                name=self.name,
                groups=groups,
                costs=costs,
            )
            self._loads.add(run)
            return run

        if pipeline is not None:
            refuse_beside_pipeline(
                pipeline,
                several_devices=device if isinstance(device, list) else None,
                objective=objective,
                placement=placement,
                sizes=sizes,
                groups=groups,
                weights_budget=weights_budget,
                watts=watts,
                max_slowdown=max_slowdown,
                costs=costs,
                host_cores=host_cores,
            )
            return self._load_stage(pipeline, lambda bound: load(bound, fuse), lanes, progress)
        on_several = (objective, placement, watts, max_slowdown)
        if isinstance(device, list) or any(one is not None for one in on_several):
            asked = several_devices(
                device,
                objective,
                placement,
                watts,
                max_slowdown,
                costs=costs,
                weights_budget=weights_budget,
                sizes=sizes,
                groups=groups,
                host_cores=host_cores,
            )
            return load_on_devices(
                self.bound,
                asked,
                lambda bound, backend: load(
                    bound, fuse if backend.capabilities.runs_kernels else False, device=backend
                ),
                progress,
            )
        if sizes is None:
            _refuse_host_cores(host_cores)
            return load(self.bound, fuse)
        family = self._varying(sizes)
        refuse_for_families(weights_budget=weights_budget, lanes=None if lanes == 1 else lanes)
        how = FamilyLoad(
            family,
            lambda: self._settled,
            sizes,
            load,
            fuse=fuse,
            scheduling=scheduling,
            verify=verify,
            progress=progress,
            name=self.name,
            host_cores=host_cores,
        )
        found = load_family(how, one)
        if isinstance(found, Executable):
            self._loads.add(found)
        return found

    def _load_stage(
        self,
        pipeline: Pipeline,
        load: Callable[[BoundProgram], Executable],
        lanes: int | Literal["auto"],
        progress: Progress,
    ) -> StageExecutable | TrainingStage:
        """Load this rank's stage of the Program, whose parts `load` makes executables.

        Raises:
            BindingError: `lanes` for a training step.
        """
        trains = is_training(self.bound.program)
        if trains and lanes != 1:
            raise BindingError(
                f"lanes={lanes!r}: a stage of a training step runs its launches in the order "
                "of its schedule: load without lanes="
            )
        return (load_training_stage if trains else load_stage)(
            self.bound, pipeline, load, self.name, progress
        )

    def _varying(self, sizes: object) -> BoundFamily:
        """The Family that `sizes` is for.

        Raises:
            BindingError: no sizes vary, or `sizes` is no Sizes.
        """
        if self._bound_family is None:
            raise BindingError(
                "sizes= is for a capture whose sizes may vary: capture with dynamic_shapes="
            )
        if not isinstance(sizes, Sizes):
            raise BindingError(
                f"sizes: expected offload.Sizes(...), got a {type(sizes).__qualname__}"
            )
        return self._bound_family

    @functools.cached_property
    def _settled(self) -> SettledFamily:
        """The Family in executable form, for all loads."""
        assert self._bound_family is not None
        return settle_family(self._bound_family)


def _refuse_host_cores(host_cores: object) -> None:
    if host_cores is not None:
        raise BindingError(
            f"host_cores={host_cores!r} is for sizes that vary, and a program of one size is "
            "prepared when it is loaded: load with sizes=, or without host_cores="
        )
