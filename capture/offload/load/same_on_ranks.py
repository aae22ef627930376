"""Ranks that load stages of one Program compare its launches, and the content of its weights."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from offload.console.progress import stage
from offload.errors import CaptureError
from offload.load.ranks import LoadedTogether
from offload.program import BoundProgram, Program

_DIGEST_BYTES = 6  # exact as a float64, in which ranks exchange numbers


def check_same_launches(program: Program, ranks: LoadedTogether) -> None:
    """Check that all ranks have recorded the same launches over the same Values.

    Raises:
        CaptureError: a launch differs; on all ranks.
        ExecutionError: a rank does not arrive in time.
    """
    own = [_text_number(text) for text in _launch_texts(program)]
    found = _gathered_if_differing(own, ranks)
    if found is None:
        return
    first = next(
        at for at, each in enumerate(itertools.zip_longest(*found.values())) if len(set(each)) > 1
    )
    others, usual = _others(found, first)
    n_launches = len(program.launches)
    here = f"launch {str(program.launches[first]).strip()}" if first < n_launches else "the results"
    raise CaptureError(
        f"ranks {others} have recorded another program than rank {usual}; the first difference, of "
        f"{n_launches} launches here, is {here}. All ranks capture the same call: the same model, "
        "optimizer and hyperparameters, and arguments of the same sizes"
    )


def check_same_weights(bound: BoundProgram, ranks: LoadedTogether) -> None:
    """Check that each weight in memory has the same elements on all ranks.

    A stage uses the weights of its own rank, so that others elsewhere, such as of another seed,
    would give results that no single process gives. Weights in files are not read.

    Args:
        bound: the whole Program, the same on all ranks.
        ranks: those that load its stages.

    Raises:
        CaptureError: a weight differs; on all ranks.
        ExecutionError: a rank does not arrive in time.
    """
    weights = sorted(bound.bindings.weights)
    own = []
    with stage("comparing weights between ranks", len(weights)) as progress:
        for value in weights:
            own.append(_content_number(bound.bindings.weights[value]))
            progress.reach(len(own))
    found = _gathered_if_differing(own, ranks)
    if found is None:
        return
    differing = [at for at, each in enumerate(zip(*found.values(), strict=True)) if _differ(each)]
    others, usual = _others(found, differing[0])
    raise CaptureError(
        f"ranks {others} hold other content than rank {usual} of {len(differing)} of the "
        f"{len(weights)} weights, such as {bound.program.values[weights[differing[0]]].name}. "
        "Stages begin with the same weights, gradients and state on all ranks: before the capture "
        "set the same seed on all ranks (torch.manual_seed) or load the same checkpoint, and give "
        "the captured call the same arguments; after steps of another executable in stages call "
        "its gather_state() on all ranks"
    )


def _launch_texts(program: Program) -> Iterator[str]:
    """Each launch with its Values, then inputs and results; names and lines are the rank's own."""
    for launch in program.launches:
        values = [
            dataclasses.replace(program.values[value], name="")
            for value in sorted(set(launch.touched()))
        ]
        yield repr((launch.name, launch.arguments, launch.results, values))
    yield repr((program.inputs, program.results))


def _gathered_if_differing(
    own: Sequence[float], ranks: LoadedTogether
) -> dict[int, tuple[float, ...]] | None:
    """By rank its numbers; None: they are equal on all."""
    whole = _text_number(repr(list(own)))
    if not _differ(one for (one,) in ranks.gathered([whole]).values()):
        return None
    return dict(sorted(ranks.gathered(own).items()))


def _others(found: dict[int, tuple[float, ...]], at: int) -> tuple[list[int], int]:
    """The ranks whose number there is not the usual one, and the first whose number is."""
    numbers = {rank: one[at] if at < len(one) else None for rank, one in found.items()}
    usual = Counter(numbers.values()).most_common(1)[0][0]  # the first of equally many
    others = [rank for rank, number in numbers.items() if number != usual]
    return others, next(rank for rank, number in numbers.items() if number == usual)


def _differ(numbers: Iterator[float] | Sequence[float]) -> bool:
    return len(set(numbers)) > 1


def _content_number(tensors: Sequence[torch.Tensor]) -> float:
    """The number of the elements of tensors, without what lies between them in memory."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for tensor in tensors:
        content = tensor.detach().cpu().contiguous()
        if size_bytes := content.nbytes:
            digest.update((ctypes.c_char * size_bytes).from_address(content.data_ptr()))
    return _number(digest)


def _text_number(text: str) -> float:
    return _number(hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES))


def _number(digest: hashlib.blake2b) -> float:
    """A digest (BLAKE2b, RFC 7693) as a number."""
    return float(int.from_bytes(digest.digest(), "little"))
