"""Loading and execution of programs with collectives; each case runs on two ranks."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_checks import WORLD, alike, all_gather_single, begin, own, summed, summed_in_place, told
from ranks import main
from tensor_rank_cases import CASES as OF_TENSORS
from torch import nn

import offload
from offload.distributed.clocks import monotonic_ns
from offload.program import Kernel
from offload.timeline import SpanKind
from offload.timeline.rank_timelines import gather_timelines

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run it, in the order of this file."""
    CASES[function.__name__] = function
    return function


def mixed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Loops before, between and after the start and the wait, and one that is written in place."""
    started = torch.ops._c10d_functional.all_reduce((x * 2 + 1).relu(), "sum", WORLD)
    other = (y * y + 3).relu() * y
    z = torch.ops._c10d_functional.wait_tensor(started) * other + x
    z.mul_(0.5).add_(1)
    work = dist.all_reduce(z, async_op=True)
    between = (other - 1).abs() * 0.25
    work.wait()
    return z.neg().relu() + between * z


# ---- ways to load --------------------------------------------------------------------------------


@case
def fused() -> Any:
    """Kernels between collectives, which are not part of them; numbers that no rounding changes."""
    captured = offload.capture(mixed, own(16, 32), own(16, 32))
    run, twin = captured.load(fuse=True), captured.load()
    found = []
    for seed in range(1, 6):
        x, y = (own(16, 32, seed=one).round().clamp(-2, 2) for one in (seed, seed + 50))
        found.append([run(x, y), twin(x, y), mixed(x.clone(), y.clone())])
    launches = run.program.launches
    return {
        "same": [torch.equal(one, eager) for one, _, eager in found],
        "same unfused": [torch.equal(one, eager) for _, one, eager in found],
        "names": [
            "kernel" if isinstance(one.callee, Kernel) else one.name.partition("::")[2]
            for one in launches
        ],
        "failed": run.proof.n_failed,
    }


@case
def by_the_host() -> Any:
    captured = offload.capture(mixed, own(4, 8), own(4, 8))
    run = captured.load(scheduling="host")
    given = [(own(4, 8, seed=seed), own(4, 8, seed=seed + 9)) for seed in range(4)]
    return [torch.equal(run(*one), mixed(*(each.clone() for each in one))) for one in given]


@case
def on_lanes() -> Any:
    """A lane of launches and one of collectives: forced, chosen by calls; more are refused."""
    captured = offload.capture(mixed, own(4, 8), own(4, 8))
    x, y = own(4, 8, seed=1), own(4, 8, seed=2)
    runs = [captured.load(lanes=lanes) for lanes in (1, 2, "auto")]
    chosen = runs[2].overlap
    return {
        "more": told(lambda: captured.load(lanes=3)),
        "host": told(lambda: captured.load(lanes=2, scheduling="host")),
        "asked": [run.overlap and run.overlap.asked for run in runs],
        "kept": [run.overlap and run.overlap.is_kept for run in runs[:2]],
        "lanes": [[str(lane.kind) for lane in run.plan.lanes] for run in runs],
        "measured": chosen.recorded_ns > 0 and chosen.times.transfer_ns != (),
        "decision": [chosen.is_kept, chosen.predicted_ns, dict(chosen.measured_ns)],
        "explained": all("lanes=" in run.explain() for run in runs[1:]),
        "same": [torch.equal(run(x, y), mixed(x.clone(), y)) for run in runs],
    }


def independent(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sums that are waited for at once, and later launches that need none of them."""
    first = functional.all_reduce(x, "sum", dist.group.WORLD) + 1
    second = (y @ y).relu() @ y
    third = functional.all_reduce(second, "sum", dist.group.WORLD) * 2
    return first + third + y.exp() @ y


def asynchronous(x: torch.Tensor) -> torch.Tensor:
    """A collective in place, and launches that run until it is waited for."""
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    z = x.exp()
    work.wait()
    return y + z


@case
def compiled() -> Any:
    """Graphs that torch.compile traces; the second and third call execute."""
    found = {}
    for call in (summed, summed_in_place, asynchronous):
        graph = torch.compile(call, backend="offload")
        given = [own(8, seed=seed) for seed in range(3)]
        with torch.no_grad():
            found[call.__name__] = [
                torch.equal(graph(one.clone()), call(one.clone())) for one in given
            ]
    return found


@case
def moved_launches() -> Any:
    """Where the forced order starts and waits, and what timelines show of it."""
    captured = offload.capture(independent, own(64, 64), own(64, 64))
    run = captured.load(lanes=2)
    x, y = own(64, 64, seed=1), own(64, 64, seed=2)
    run(x, y)
    with run.timeline() as timeline:
        result = run(x, y)
    (execution,) = timeline.executions
    spans = execution.of_kind(SpanKind.COLLECTIVE)
    names = [one.name.partition("::")[2] for one in run.program.launches]
    return {
        "same": torch.equal(result, independent(x.clone(), y)),
        "recorded": [one.name.partition("::")[2] for one in captured.program.launches],
        "names": names,
        "bytes": [run.overlap.feature_map_bytes, run.plan.feature_map_bytes],
        "collectives": [[one.lane, one.launch] for one in spans],
        "ends": [one.begin_ns <= one.end_ns for one in spans],
    }


OFFSET_NS = 123_456_789_012
"""The lead of rank 1's clock."""


@case
def timelines_in_one_file() -> Any:
    """Both ranks record; rank 1's clock differs."""
    ahead_ns = OFFSET_NS * dist.get_rank()
    captured = offload.capture(independent, own(64, 64), own(64, 64))
    run = captured.load()
    x, y = own(64, 64, seed=1), own(64, 64, seed=2)
    run(x, y)
    with run.timeline() as timeline:
        run(x, y)
    timeline.origin_ns += ahead_ns
    found = gather_timelines(timeline, clock=lambda: monotonic_ns() + ahead_ns)
    timeline.origin_ns -= ahead_ns
    at_once = timeline.of_ranks()
    if found is None or at_once is None:
        return [found, at_once]
    path = Path(os.environ["RANKS_FOLDER"]) / "ranks.json"
    found.save(path)
    return {
        "offsets": [one.offset.offset_ns for one in found.ranks],
        "errors": [one.error_ns for one in found.ranks],
        "offsets of one clock": [one.offset.offset_ns for one in at_once.ranks],
        "errors of one clock": [one.error_ns for one in at_once.ranks],
        "trace": json.loads(path.read_text()),
    }


@case
def timelines_of_a_group() -> Any:
    """Only members gather; the second rank is in no group of the first."""
    group = dist.new_group([0])
    run = offload.capture(torch.relu, own(4)).load()
    with run.timeline() as timeline:
        run(own(4))
    if dist.get_rank() == 1:
        return told(lambda: timeline.of_ranks(group))
    found = timeline.of_ranks(group)
    return found and [one.rank for one in found.ranks]


@case
def refused() -> Any:
    captured = offload.capture(summed, own(8))
    asked = [{"weights_budget": one} for one in (0, "1MiB", "auto")]
    found = [told(lambda one=one: captured.load(**one)) for one in [*asked, {"fuse": "auto"}]]
    found.append(told(lambda: captured.load(sizes=offload.Sizes())))
    sizes = {"x": {0: torch.export.Dim("n", min=2, max=64)}}
    found.append(told(lambda: offload.capture(summed, own(8), dynamic_shapes=sizes)))
    found.append(told(lambda: offload.diagnose(summed, own(8))))
    return [found, torch.equal(captured.load()(own(8, seed=1)), summed(own(8, seed=1)))]


@case
def weights_in_files() -> Any:
    """Weights that are all read from a file at the load."""
    path = Path(os.environ["RANKS_FOLDER"]) / f"of{dist.get_rank()}.safetensors"
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(16, 16).requires_grad_(False)
    safetensors.torch.save_file(model.state_dict(), path)

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = model.weight, model.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.linear(x, self.weight, self.bias)
            return functional.all_reduce(y, "sum", WORLD) * 2

    run = offload.capture(Summed(), alike(2, 16), weights=path).load()
    x = alike(2, 16, seed=1)
    return torch.equal(run(x), functional.all_reduce(model(x), "sum", WORLD) * 2)


# ---- executions ----------------------------------------------------------------------------------


@case
def nothing_grows() -> Any:
    """Live objects, collectives in flight by torch's count, and resident bytes after executions."""
    shape = (128, 128)
    run = offload.capture(mixed, own(*shape), own(*shape)).load()
    x, y = own(*shape, seed=1), own(*shape, seed=2)

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    for _ in range(200):
        run(x, y)
    before = alive(), resident_bytes()
    for _ in range(400):  # each gives 64 KiB
        run(x, y)
    grown_bytes = resident_bytes() - before[1]
    works = torch._C._distributed_c10d._get_work_registry_size()
    return {"tensors": alive() - before[0], "bytes": grown_bytes, "works": works}


@case
def results_are_kept() -> Any:
    """No later execution overwrites an earlier result."""
    run = offload.capture(lambda x: (all_gather_single(x, 0, WORLD), summed(x)), own(6)).load()
    given = [own(6, seed=seed) for seed in range(6)]
    results = [run(x) for x in given]
    expected = [(all_gather_single(x, 0, WORLD), summed(x)) for x in given]
    return [
        torch.equal(got, eager)
        for pair in zip(results, expected, strict=True)
        for got, eager in zip(*pair, strict=True)
    ]


@case
def closed_while_one_is_queued() -> Any:
    """Closing waits for an execution whose other rank comes later."""
    run = offload.capture(summed, own(5)).load()
    x = own(5, seed=1)
    if dist.get_rank() == 0:
        ticket = run.submit(x)
        run.close()
        found = ticket.result()
    else:
        time.sleep(0.3)
        found = run(x)
        run.close()
    return torch.equal(found, summed(x))


@case
def two_groups_on_two_threads() -> Any:
    groups = [dist.new_group([0, 1]) for _ in range(2)]

    def call_of(group: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: functional.all_reduce(x + 1, "sum", group) * 2

    runs = [offload.capture(call_of(group), own(32)).load() for group in groups]
    x = own(32, seed=1)
    expected = call_of(groups[0])(x)
    same: list[bool] = []
    threads = [
        threading.Thread(
            target=lambda run=run: same.extend(torch.equal(run(x), expected) for _ in range(100))
        )
        for run in runs
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return [len(same), all(same)]


@case
def loaded_on_two_threads() -> Any:
    """While one thread loads, another asks for a load with the same group, and one with another."""
    own_group = dist.new_group([0, 1])

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", own_group)

    one, other = offload.capture(summed, own(6)), offload.capture(doubled, own(6))
    told_beside: list[Any] = []

    def load_beside(*_: Any) -> None:
        if told_beside:
            return
        told_beside.append(None)  # loads on the other thread say their progress as well
        with ThreadPoolExecutor(1) as thread:
            told_beside[0] = thread.submit(told, one.load).result()
            told_beside.append(thread.submit(lambda: other.load(progress=False)).result())

    run = one.load(lanes="auto", progress=load_beside)  # which executes, and so tells
    x = own(6, seed=2)
    executables = (run, told_beside[1], one.load(progress=False))
    expected = (summed(x), doubled(x), summed(x))
    same = [torch.equal(each(x), y) for each, y in zip(executables, expected, strict=True)]
    return {"refused": told_beside[0], "same": same}


@case
def forked() -> Any:
    """A forked child has the group and none of its threads; the parent continues."""
    run = offload.capture(summed, own(5)).load()
    expected = run(own(5))
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, "|".join(told(lambda: run(own(5)))).encode())
        os._exit(0)
    os.close(writes)
    said = os.read(reads, 4096).decode()
    os.waitpid(child, 0)
    return [said, torch.equal(run(own(5)), expected)]


if __name__ == "__main__":
    main(CASES | OF_TENSORS, begin, dist.destroy_process_group)
