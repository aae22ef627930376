"""The process groups of torch.distributed by name, and those of a Program among them."""

from __future__ import annotations

import hashlib
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from offload.errors import BindingError, CaptureError, ExecutionError
from offload.program import Group

# Process groups that may keep a message whose other rank never came.
_with_left_messages: weakref.WeakSet[Any] = weakref.WeakSet()

_lives: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def distributed() -> Any:
    """The module of torch's process groups if it is imported; None: there can be no group."""
    return sys.modules.get("torch.distributed.distributed_c10d")


def is_one_of_several() -> bool:
    """Whether this process is a rank of a world of more than one."""
    c10d = distributed()
    return c10d is not None and c10d.is_initialized() and c10d.get_world_size() > 1


def world() -> tuple[int, int]:
    """The rank of this process and the number of ranks; 0 and 1 without groups."""
    c10d = distributed()
    if c10d is None or not c10d.is_initialized():
        return 0, 1
    return c10d.get_rank(), c10d.get_world_size()


def group_here(name: str) -> Group:
    """The group of this name, as this process knows it.

    Raises:
        BindingError: there is no such group.
    """
    c10d = distributed()
    found = None if c10d is None or not c10d.is_initialized() else _registered(c10d, name)
    if found is None:
        raise BindingError(f"there is no process group {name!r} here{_there_are(c10d)}")
    ranks = tuple(c10d.get_process_group_ranks(found))
    return Group(name, ranks, c10d.get_rank(), c10d.get_world_size())


def active_groups() -> tuple[Group, ...]:
    """All groups that this process is a member of."""
    c10d = distributed()
    if c10d is None or not c10d.is_initialized():
        return ()
    names = {str(one) for one in c10d._world.pg_names.values()}
    return tuple(group_here(name) for name in sorted(names) if _registered(c10d, name) is not None)


def rank_in(group: Group) -> int:
    """The number of this process in a group."""
    return group.ranks.index(group.rank)


def timeout_s(name: str) -> float:
    """The seconds after which the group stops waiting for a member.

    This is the timeout of the group's backend (torch.distributed.Backend.Options).
    """
    found = distributed()._resolve_process_group(name)
    import torch  # noqa: PLC0415  (the module of groups is there, so that torch is)

    timeout = found._get_backend(torch.device("cpu")).options._timeout
    return float(timeout.total_seconds())


def life(name: str) -> str:
    """What distinguishes a group from earlier ones of its name; the same on all its ranks.

    Groups that are made again have the names, and often the store, of those that were destroyed.
    Gloo leaves each rank's address in the store, which is another one for each group. Empty: the
    addresses are not known, as with other backends, or where gloo connects at the first collective;
    or the group has been destroyed.
    """
    if os.environ.get("TORCH_GLOO_LAZY_INIT") == "1":  # some ranks would see all addresses
        return ""
    c10d = distributed()
    try:
        group = c10d._resolve_process_group(name)
    except RuntimeError:
        return ""
    if group not in _lives:
        kept = c10d._world.pg_map.get(group, (None, None))[1]
        if kept is None:
            return ""
        addresses = [f"cpu//0/{number}" for number in range(group.size())]
        found = b"".join(map(kept.get, addresses)) if kept.check(addresses) else b""
        _lives[group] = hashlib.sha256(found).hexdigest()[:16] if found else ""
    return _lives[group]


def broadcast(tensor: Any, source: int, name: str) -> None:
    """Give a contiguous tensor on all ranks of a group the content that it has on one.

    Args:
        tensor: of the same size on all ranks.
        source: the rank in the group whose content is sent.
        name: of the group.

    Raises:
        ExecutionError: a rank ended, or did not come within the group's timeout.
    """
    c10d = distributed()
    options = c10d.BroadcastOptions()
    options.rootRank = source
    try:
        c10d._resolve_process_group(name).broadcast([tensor], options).wait()
    except (RuntimeError, ValueError) as error:
        raise ExecutionError(
            f"a broadcast from rank {source} of group {name!r} failed, as when a rank ends or is "
            f"too late: {error}"
        ) from error


def send(tensor: Any, peer: int, tag: int, name: str) -> tuple[Any, Any]:
    """Begin to send a message, like the operator isend.

    That operator is not used: torch keeps its Work under two tensors
    (torch/csrc/distributed/c10d/Functional.cpp), and gloo's Work can be waited for only once.

    Args:
        tensor: the tensor to send.
        peer: the receiver's rank in the group.
        tag: of the message.
        name: of the group.

    Returns:
        The operator's result, and the Work to wait for.
    """
    work = distributed()._resolve_process_group(name).send([tensor], peer, tag)
    return tensor.new_empty(0), work


def note_left_message(name: str) -> None:
    """Note that this rank has begun a message in a group, and that its peer may never come to it.

    Gloo pairs the first of each tag, and so gives this message to the next that is received, or
    takes the next one that is sent.
    """
    group = _registered(distributed(), name)
    if group is not None:  # one that was destroyed carries no more messages
        _with_left_messages.add(group)


def check_no_message_left(name: str) -> None:
    """Check whether messages in a group reach their receivers.

    Raises:
        CaptureError: a message may be left there.
    """
    if _registered(distributed(), name) in _with_left_messages:
        raise CaptureError(
            f"in group {name!r} this rank has begun a message in an earlier capture or call of "
            "stages, which ended before its peer came to the message: the next message would be "
            "taken for it: make the groups again (destroy_process_group and init_process_group, or "
            "new_group)"
        )


def find_groups(
    recorded: Sequence[Group], given: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Find this process's groups for those of a Program.

    Args:
        recorded: the Program's groups.
        given: process groups to use instead, by recorded names.

    Returns:
        The names here, by recorded names.

    Raises:
        BindingError: there is no such group, it has another number of members, this process is
            another member, or the world has another size.
    """
    given = dict(given or {})
    if unknown := sorted(given.keys() - {one.name for one in recorded}):
        raise BindingError(
            f"groups: the program uses {[one.name for one in recorded]}, and none is called "
            f"{unknown[0]!r}"
        )
    found = {}
    for one in recorded:
        group = given.get(one.name)
        name = one.name if group is None else getattr(group, "group_name", None)
        if not isinstance(name, str):
            raise BindingError(
                f"groups: expected process groups, got a {type(group).__qualname__} for "
                f"{one.name!r}"
            )
        _check_same(one, name)
        found[one.name] = name
    return found


def _check_same(recorded: Group, name: str) -> None:
    made = f"the program was recorded with {recorded} of {recorded.world_size} in all"
    try:
        here = group_here(name)
    except BindingError as error:
        raise BindingError(
            f"{made}, and {error}: make the groups in the order of the recording "
            "(torch.distributed.init_process_group, new_group) before the program is loaded, or "
            f"give the one to use (load(groups={{{recorded.name!r}: group}}))"
        ) from None
    if here.world_size != recorded.world_size:
        raise BindingError(
            f"{made}, and this world has {here.world_size}: collectives of another number of "
            "ranks compute other results; start that number of ranks, or capture again"
        )
    if len(here.ranks) != len(recorded.ranks) or rank_in(here) != rank_in(recorded):
        raise BindingError(
            f"{made}, and {here} differs: give the one to use (load(groups={{{recorded.name!r}: "
            "group})), or capture again"
        )


def _registered(c10d: Any, name: str) -> Any:
    try:
        return c10d._resolve_process_group(name)
    except RuntimeError:  # torch knows no group of this name
        return None


def _there_are(c10d: Any) -> str:
    if c10d is None or not c10d.is_initialized():
        return ": torch.distributed is not initialised"
    names = sorted({str(one) for one in c10d._world.pg_names.values()})
    return f" (there are {', '.join(map(repr, names))})"
