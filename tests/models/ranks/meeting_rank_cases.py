"""Cases of four ranks in groups that overlap, of which some ranks refuse what others record."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import main

import offload
from offload.distributed import Rendezvous, rendezvous
from offload.program.collectives import Meeting

TIMEOUT = timedelta(seconds=30)
CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run the case."""
    CASES[function.__name__] = function
    return function


def told(call: Callable[[], object]) -> str:
    """The class and the message of a call's error; empty: it made none."""
    try:
        call()
    except offload.OffloadError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def group_of(*divided: list[int]) -> Any:
    """Make groups on all ranks; return this rank's."""
    made = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in divided]
    return next(one for one, ranks in zip(made, divided, strict=True) if dist.get_rank() in ranks)


def refusing(*ranks: int, groups: list[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function over groups, which these ranks refuse before their first collective."""

    def call(x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() in ranks and x.sum().item() > 0:
            x = x + 1
        for group in groups:
            x = functional.all_reduce(x * 2, "sum", group)
        return x

    return call


def captured(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    return told(lambda: offload.capture(function, torch.ones(4)))


@case
def recorded_alone_before() -> Any:
    """Rank 0 alone has recorded a call of the same name, so that it has recorded one more."""
    if dist.get_rank() == 0:

        def call(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        offload.capture(call, torch.ones(4))
    dist.barrier()
    groups = [dist.group.WORLD]
    return captured(refusing(1, groups=groups)), captured(refusing(groups=groups))


@case
def refused_by_a_rank_two_groups_away() -> Any:
    """Rank 2 shares no group of the call with rank 1, which refuses; ranks 0 and 3 do."""
    groups = [group_of([0, 1], [2, 3]), group_of([0, 2], [1, 3])]
    return captured(refusing(1, groups=groups)), captured(refusing(groups=groups))


@case
def refused_in_a_group_of_some() -> Any:
    """Ranks 0 and 1 refuse a call that ranks 2 and 3 do not make; then all record another one."""
    group = group_of([0, 1], [2, 3])
    first = captured(refusing(1, groups=[group])) if dist.get_rank() < 2 else "not called"
    return first, captured(refusing(groups=[dist.group.WORLD]))


@case
def refused_beside_another_recording() -> Any:
    """Rank 1 records with rank 2 and refuses, where rank 0 waits for it in another group."""
    dist.barrier()
    with_two, with_zero = dist.new_group([1, 2], timeout=TIMEOUT), dist.new_group([0, 1])
    found = {}
    if dist.get_rank() in (1, 2):
        found["first"] = captured(refusing(1, groups=[with_two]))
    if dist.get_rank() in (0, 1):
        found["second"] = captured(refusing(groups=[with_zero]))
    return found


@case
def refused_before_a_message() -> Any:
    """One of two refuses where the other has begun a message; then both record a message.

    Gloo keeps what was begun for the next message of its tag, so a group is used once.
    """
    rank = dist.get_rank()

    def exchange(group: Any, *, refuses: int | None = None) -> Callable[[torch.Tensor], Any]:
        def call(x: torch.Tensor) -> torch.Tensor:
            if refuses == rank and x.sum().item() > 0:
                x = x + 1
            if rank == 0:
                dist.send(x, 1, group=group)
            else:
                dist.recv(x, 0, group=group)
            return x + 1

        return call

    groups = [dist.new_group([0, 1], timeout=TIMEOUT) for _ in range(4)]
    if rank > 1:
        return None
    torch.manual_seed(0)
    linear = [torch.nn.Linear(4, 4).requires_grad_(False) for _ in range(2)]
    layers = offload.capture(torch.nn.Sequential(*linear), torch.ones(4))
    found = []
    for refuses, (once, again) in enumerate(zip(groups[::2], groups[1::2], strict=True)):
        program = offload.capture(exchange(once), torch.ones(4))
        if refuses == rank:
            time.sleep(0.3)
        found.append(captured(exchange(once, refuses=refuses)))
        stages = offload.Pipeline(2, once)
        found += [captured(exchange(once)), told(program.load)]
        found.append(told(functools.partial(layers.load, pipeline=stages)))
        found.append(captured(exchange(again)))
    return found


@case
def refused_at_another_line() -> Any:
    """Ranks record from different lines, of which one refuses: the others do after some time."""
    call, again = (refusing(*ranks, groups=[dist.group.WORLD]) for ranks in ((0,), ()))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_DOUBTED_S", 2.0)
        for number, one in enumerate((call, again)):
            # No earlier case has refused a work of this name, which would be doubted as well.
            one.__name__ = f"at_other_lines_{number}"
            if dist.get_rank() == 0:
                found.append(captured(one))
            else:
                found.append(told(functools.partial(offload.capture, one, torch.ones(4))))
            dist.barrier()
    return found


@case
def refused_at_the_load() -> Any:
    """Rank 1 gives groups or options that its load refuses."""
    program = offload.capture(refusing(groups=[dist.group.WORLD]), torch.ones(4))
    found = []
    for bad in ({"groups": {"7": dist.group.WORLD}}, {"weights_budget": 1000}):
        options = bad if dist.get_rank() == 1 else {}
        found += [told(functools.partial(program.load, **options)), told(program.load)]
    return found


@case
def refused_in_a_loop() -> Any:
    """One line records functions of one name, of which rank 1 refuses one without collectives."""

    def first(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if dist.get_rank() == 1 and x.sum().item() > 0 else x * 2

    found = []
    for one in (first, *(refusing(groups=[dist.group.WORLD]) for _ in range(2))):
        one.__name__ = "layer"
        dist.barrier()  # all come at once, so that none waits for as long as a refusal is doubted
        found.append(captured(one))
    return found


@case
def recorded_more_often() -> Any:
    """Rank 0 has recorded one more function of a name from a line, where all record then."""
    found = []
    every = [refusing(*ranks, groups=[dist.group.WORLD]) for ranks in ((), (1,), ())]
    alone: Callable[[torch.Tensor], torch.Tensor] = lambda x: x * 2  # noqa: E731
    for one in [alone, *every] if dist.get_rank() == 0 else every:
        one.__name__ = "repeated"
        found.append(captured(one))
    return found[-3:]


@case
def words_in_the_store() -> Any:
    """The number of keys in the store after captures, loads and a refusal, and after more."""
    store = dist.distributed_c10d._get_default_store()

    def n_keys() -> int:
        store.num_keys()  # behind all that this rank has written
        dist.barrier()
        found = store.num_keys()
        dist.barrier()
        return int(found)

    program = offload.capture(refusing(groups=[dist.group.WORLD]), torch.ones(4))
    found = []
    for _ in range(4):
        captured(refusing(groups=[dist.group.WORLD]))
        program.load()
        found.append(n_keys())
    return found


class Step(NamedTuple):
    """A meeting of a group, or of a sender and a receiver in it."""

    group: int
    sender: int | None
    receiver: int | None


_MEMBERS = ([0, 1, 2, 3], [0, 1], [2, 3], [0, 2], [1, 3], [1, 2, 3])


def ranks_of(step: Step) -> set[int]:
    """Those that meet, by rank in the world."""
    members = _MEMBERS[step.group]
    if step.sender is None or step.receiver is None:
        return set(members)
    return {members[step.sender], members[step.receiver]}


def random_steps(chosen: random.Random) -> tuple[list[Step], set[int]]:
    """Meetings of one work, each with a rank of an earlier one, and all their ranks."""
    steps: list[Step] = []
    ranks: set[int] = set()
    for _ in range(chosen.randint(1, 4)):
        group = chosen.randrange(len(_MEMBERS))
        pair = chosen.sample(range(len(_MEMBERS[group])), 2)
        step = Step(group, *(pair if chosen.random() < 0.4 else (None, None)))
        if not ranks or ranks & ranks_of(step):
            steps.append(step)
            ranks |= ranks_of(step)
    return steps, ranks


def outcome(names: list[str], name: str, steps: list[Step], refuses_at: int | None) -> str:
    """How one rank's work ends, which it refuses before a step, or not."""
    meetings = Rendezvous("capture", name)
    own = [one for one in steps if dist.get_rank() in ranks_of(one)]
    try:
        for number, one in enumerate(own):
            if refuses_at == number:
                raise offload.CaptureError("own")
            meetings.come(Meeting(names[one.group], one.sender, one.receiver, str(one))).wait()
        if refuses_at is not None:
            raise offload.CaptureError("own")
        meetings.agree("the end")
    except offload.OffloadError as error:
        meetings.refuse(str(error))
        return "refused" if isinstance(error, offload.CaptureError) else str(error)
    return "agreed"


@case
def random_works() -> Any:
    """Works over random groups, which random ranks refuse, and works of single ranks beside them.

    A rank of a work refuses it if, and only if, some rank does.
    """
    rank, seed = dist.get_rank(), 11
    groups = [dist.group.WORLD, *(dist.new_group(one, timeout=TIMEOUT) for one in _MEMBERS[1:])]
    names = [getattr(one, "group_name", "") for one in groups]
    chosen, own = random.Random(seed), random.Random(seed + 1 + rank)
    wrong, n_refused = [], 0
    for number in range(120):
        steps, ranks = random_steps(chosen)
        is_refused = chosen.random() < 0.5
        refusing = {
            one: chosen.randint(0, len(steps))
            for one in sorted(ranks)
            if chosen.random() < 0.35 and is_refused
        }
        if own.random() < 0.2:
            Rendezvous("capture", "alone").refuse("of its own")
        if rank not in ranks:
            continue
        time.sleep(own.random() * 0.004)
        found = outcome(names, f"work over {steps}", steps, refusing.get(rank))
        if found != ("refused" if refusing else "agreed"):
            wrong.append(f"{number}: {steps}, refused by {refusing}: {found}")
        n_refused += bool(refusing)
    return wrong, n_refused


def begin() -> None:
    """Meet the other ranks."""
    dist.init_process_group("gloo", timeout=TIMEOUT)


def make_groups_again() -> None:
    """Destroy all groups and make that of all ranks again, over the same store.

    Gloo finds addresses of destroyed groups there, so that all remove theirs in between. Others may
    be reading this rank's address until they have come here, too.
    """
    made = dict(dist.distributed_c10d._world.pg_map)
    n_ranks, store = dist.get_world_size(), dist.distributed_c10d._get_default_store()
    meet(store, n_ranks, "to be made again")
    dist.destroy_process_group()
    for group, (_, kept) in made.items():
        kept.delete_key(f"cpu//0/{group.rank()}")
    meet(store, n_ranks, "made again")
    begin()


def meet(store: dist.Store, n_ranks: int, what: str) -> None:
    """Wait until as many ranks have come, each as often as this one."""
    number = store.add(what, 1)
    last = -(-number // n_ranks) * n_ranks
    if number == last:
        store.set(f"{what}/{last}", "")
    store.wait([f"{what}/{last}"])


@case
def groups_made_again() -> Any:
    """A group of a name, in which a rank has waited in vain, and later ones, of other members."""
    make_groups_again()
    rank, found = dist.get_rank(), []
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        found.append(captured(refusing(groups=[group])))
    for members in ([0, 1], [0, 2]):
        make_groups_again()
        group = dist.new_group(members, timeout=TIMEOUT)
        if rank in members:
            found += [captured(refusing(groups=[group])) for _ in range(2)]
    return found


if __name__ == "__main__":
    main(CASES, begin, dist.destroy_process_group)
