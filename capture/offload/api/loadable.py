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
        """Make the Program resident on a device.

        Args:
            device: device type, which may have an index (`cuda:1`); by default what the Program
                was recorded on, or to which its file was read. Or a backend with options of its
                own, such as `AscendBackend(capturer, refresh="gather")`. Or a list of devices, at
                least one of which has the memory that the Program's tensors are in; the first such
                one has what callers see. Each launch is placed on one of them, by what launches
                and transfers take, and calls are executed on several where that is quicker.
            scheduling: `offload` delivers the program as one task; `host` launch by launch, the
                baseline that it is compared with (on device `npu` by torch's own operators, which
                also run what cannot be captured as a model). None: as one task; with `sizes` on
                `cuda` and `npu` by the host, instead of one task for each choice of sizes. `auto`:
                likewise, but with `sizes` whichever executes the recorded sizes quicker; on `cuda`
                and `npu` the load of a task counts too, and with `promoted` the measurements serve
                the first promotions. `explain()` states why.
            verify: prove at load that a captured graph computes the same at other addresses, and
                time its launches where weights are streamed. The cpu backend proves each launch
                when it is first executed, whatever is said here.
            weights_budget: all memory of the device that weights may use: bytes, text such as
                `2GiB`, or `auto` for what is free. What does not fit is streamed from the files of
                `capture(weights=)`, or on the CPU from the model's own tensors, while launches run.
                None: weights are used where they are; those in files are all read. Under a budget
                the model's own tensors are read again once they were written, as torch counts it,
                and after each step of a `torch.optim` optimizer; after writing through
                `param.data`, NumPy or a storage, by a fused operator itself
                (`torch._fused_adam_`), or to tensors made in inference mode, call
                `run.streaming.refresh()`. Their storages cannot be resized until the executable is
                closed.
            share_store: let what is streamed from files to a GPU or NPU lie once in the host's
                memory for all executables on the device that need it. False: this one has memory
                of its own, as it needs on an NPU for `run.streaming.replace` while others share.
            fuse: let compiled kernels take the place of launches (on the CPU by a C++ compiler, on
                CUDA by Triton; they are kept in the user's folder for caches). Results then
                differ from eager's by rounding: at its first execution each kernel is proved to be
                at most 4 times as far from float64 as the launches that it replaces, else these
                run. "auto" (CPU): only where kernels are quicker, by executions of both on made-up
                inputs at the first load with this number of torch's threads; the choice is kept
                beside the kernels. False: torch's own kernels, with eager's bits. `explain()` says
                what was fused, what not, and why. With `sizes`, for those that are promoted.
            lanes: let launches that do not depend on one another run at once, on at most so many
                lanes (1 to 64). On the cpu backend these are threads: 1 shares each launch among as
                many as torch is set to; with more a launch has one thread, so results have the bits
                of `torch.set_num_threads(1)`, and threads beside the caller's take part in an
                execution only where the executions before show that this pays. On CUDA they are
                branches of the graph, with the bits of one lane. Lanes are planned by the durations
                of launches on made-up inputs. "auto": several if executions show that calls are
                quicker than on one lane (on the CPU with one thread, and with torch's). `explain()`
                says what was chosen, and why. For a Program with collectives, 2 is one lane of
                launches, and lanes for the exchanges of process groups: collectives start early and
                are waited for late. "auto" takes 2 if calls are then quicker on all ranks.
            progress: of a load that reads weights. None shows it on stderr, where that is a
                terminal, once two seconds have passed or are expected to; False shows nothing. A
                function is called with (done, total, what): `reading weights` counts their bytes,
                after each 8 MiB or less, and `timing launches` executions. Each begins at 0 and
                reaches its total where it succeeds. Where some weights are streamed on the CPU
                they are read twice, before launches are timed and after. What the function raises
                ends the load.
            sizes: of a capture with dynamic_shapes=: give an executable for all sizes that its
                Family accepts: one resident, which takes other sizes in place. On `cuda` and `npu`
                the host launches its operators; with scheduling="offload" each choice of sizes is
                loaded there as a separate task when it first occurs. With `pad` buckets are loaded.
                With `promoted` sizes that repeat get separate executables: on the CPU with kernels
                (`fuse`), made by a thread for which no call waits; on `cuda` and `npu` as tasks,
                each made within the call that it is due at. None: the recorded sizes alone.
            groups: of a Program whose ranks exchange tensors, process groups to use in the place of
                recorded ones, by the names of these (`captured.program.groups`). The others are
                found by their names. All ranks of a group load at once.
            objective: of a placement on several devices: `latency`, the time of a call,
                `throughput`, the time between results where several are submitted, or `energy`,
                what a call draws on all devices together. None: `latency`.
            placement: on several devices. `static` keeps each launch where it was placed; `hybrid`
                moves segments to other devices, where they are loaded as well, once executions take
                longer than expected; `dynamic` chooses at each execution whichever device has a
                segment done first. None: `static`.
            costs: durations of launches that former loads have measured (`offload.LaunchCosts`), by
                which lanes and devices are planned without timing launches again. Unknown ones are
                measured, and added. None: launches are timed at each load.
            watts: of `energy`, an `offload.Watts(idle=, busy=)` for each device. None: they are
                read while the devices are idle and busy, by RAPL or NVML; `explain()` says which.
            max_slowdown: of `energy`, how many times the least latency that is found a call may
                take, 1 or more. None: 1.1.
            pipeline: cut the Program into stages, of which each rank of a process group loads one,
                with the weights of that one. All ranks have captured the same micro-batch, or the
                same training step with all its micro-batches, and load at once; the stages are cut
                where the slowest takes least.
            host_cores: with `sizes`, where the host launches a capturer's kernels on an Ascend
                device: on how many cores (1 to 64) it carries out the stages of a launch at new
                sizes. 1: one after the other. 2: infer shapes and tile | write addresses and
                launch. 3: infer shapes and tile | write addresses | launch; more of them tile as
                well. At sizes that are kept the calling thread does everything. "auto": 3 where an
                execution at new sizes is quicker so than on 1; `explain()` has both times. None:
                the environment variable MAX_RUNTIME_CORE_NUMBER, else 1.

        Raises:
            BackendUnavailable: the device is not available here, it cannot run this Program, or the
                Program's weights and inputs are on another one of its type.
            CaptureError: the device cannot capture the Program, or the proof failed; or another
                rank refuses, or its Program has other collectives.
            BindingError: a process group is not here, or has other members than the recorded one;
                a Program that `pipeline` cannot cut, or an option that excludes it;
                there is no such scheduling; `fuse`, `lanes` or `progress` is invalid; `costs` is no
                LaunchCosts, or nothing is planned by it; lanes
                for what runs on one (weights in files or under a budget, the host's scheduling, a
                step that trains), or more than 2 with collectives; `weights_budget` or
                `fuse="auto"` for a Program with collectives; `sizes` is no Sizes, or given where
                none vary, or beside a budget or lanes; `host_cores` is no such number, or more than
                1 where stages stay on one core; `promoted` is given without `fuse` where that is
                needed, with another scheduling than `auto` on `cuda` and `npu`, or where the
                program leaves more than results; OFFLOAD_DEBUG is no level; or a weight has
                another shape, dtype or layout than when it was recorded.
            PlanError: the Program cannot be placed, the budget is too small, or the host has no
                room for what is streamed: the message says what is needed, and what sets it.
            FileError: a weight's file is missing, or shorter than before; or the folder of
                OFFLOAD_DUMP cannot be written to.
            OutOfMemory: the device has no memory for what is loaded.
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
