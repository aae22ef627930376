"""Ranks that load stages of one Program compare the content of its weights."""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Sequence

import torch

from offload.console.progress import stage
from offload.errors import CaptureError
from offload.interpreter.eager_run import bytes_of
from offload.load.ranks import LoadedTogether
from offload.program import BoundProgram

_DIGEST_BYTES = 6  # exact as a float64, in which ranks exchange numbers


def check_same_weights(bound: BoundProgram, ranks: LoadedTogether) -> None:
    """Check that each weight in memory has the same bytes on all ranks.

    A stage uses the weights of its own rank, so that other bytes elsewhere, such as of another
    seed, would give results that no single process gives. Ranks exchange digests (BLAKE2b, RFC
    7693). Weights in files are not read.

    Args:
        bound: the whole Program, the same on all ranks.
        ranks: those that load its stages.

    Raises:
        CaptureError: a weight differs; on all ranks.
        ExecutionError: a rank does not arrive in time.
    """
    weights = sorted(bound.bindings.weights)
    with stage("comparing weights between ranks", len(weights)) as progress:
        own = []
        for value in weights:
            own.append(_digest(bound.bindings.weights[value][0].untyped_storage()))
            progress.reach(len(own))
    if len(set(ranks.gathered([_folded(own)]).values())) == 1:
        return
    found = ranks.gathered(own)
    differing = [
        weight
        for weight, digests in zip(weights, zip(*found.values(), strict=True), strict=True)
        if len(set(digests)) > 1
    ]
    first = weights.index(differing[0])
    usual = Counter(one[first] for one in found.values()).most_common(1)[0][0]
    others = sorted(rank for rank, one in found.items() if one[first] != usual)
    raise CaptureError(
        f"ranks hold other content of {len(differing)} of {len(weights)} weights: "
        f"{bound.program.values[differing[0]].name} differs on ranks {others} from rank "
        f"{min(found.keys() - set(others))}. Stages begin with the same weights, gradients and "
        "state on all ranks: before the capture seed all ranks alike (torch.manual_seed) or load "
        "one checkpoint, and give the captured call the same arguments; after steps of another "
        "executable in stages call its gather_state() on all ranks"
    )


def _digest(storage: torch.UntypedStorage) -> float:
    content = bytes_of(storage)
    size_bytes = content.numel()
    if not size_bytes:
        return 0.0
    memory = (ctypes.c_char * size_bytes).from_address(content.data_ptr())
    return _number(hashlib.blake2b(memory, digest_size=_DIGEST_BYTES))


def _folded(digests: Sequence[float]) -> float:
    return _number(hashlib.blake2b(repr(digests).encode(), digest_size=_DIGEST_BYTES))


def _number(digest: hashlib.blake2b) -> float:
    return float(int.from_bytes(digest.digest(), "little"))
