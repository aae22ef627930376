"""Reads of a tensor on the host: refused with the user's line, or guarded at each execution."""

from __future__ import annotations

import collections
import io
import math
import pathlib
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checks import Call, assert_same, check, normal, normals, refusal

import offload

HERE = "test_host_reads.py:"


class Sequence:
    """A sequence by torch's definition: a length and items."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@torch.library.custom_op("offload_tests::largest_index", mutates_args=())
def largest_index(x: torch.Tensor) -> int:
    """A user's operator that returns a number, and has no tag."""
    return int(x.detach().numpy().argmax())


def seen_by(call):
    """The last element that a function gets from apply_ and its like."""
    seen = []

    def note(value):
        seen.append(value)
        return value

    call(note)
    return seen[-1]


n = 2  # the recorded value of the integer argument of the reads below

READS = {
    "item": lambda x, k: x * x[0].item(),
    "float": lambda x, k: x * float(x[0]),
    "int": lambda x, k: x * int(k),
    "bool": lambda x, k: x if bool(x[0] > 0) else -x,
    "complex": lambda x, k: x * complex(x[0]).real,
    "if": lambda x, k: x if x.sum() > 0 else -x,
    "and": lambda x, k: x * 2 if (x[0] > 0 and x[1] > 0) else x,
    "assert": lambda x, k: x if not (x < -1e9).any() else None,
    "in": lambda x, k: x if 0.5 in x else -x,
    "min of a list": lambda x, k: x * min([x[0], x[1]]),
    "sorted": lambda x, k: torch.stack(sorted([x[0], x[1]])),
    "round": lambda x, k: x * math.floor(x[0] * 10),
    "tolist": lambda x, k: x * x.tolist()[0],
    "numpy": lambda x, k: x * float(x.numpy()[0]),
    "numpy of detached": lambda x, k: x * float(x.detach().cpu().numpy()[0]),
    "asarray": lambda x, k: x * float(np.asarray(x)[0]),
    "numpy function": lambda x, k: x * float(np.sum(np.array([x[0], x[1]]))),
    "tensor of elements": lambda x, k: torch.tensor([x[0], x[1]]) * x[:2],
    "tensor of nested elements": lambda x, k: torch.tensor([[x[0]], [x[1]]]) * x[0],
    "tensor by keyword": lambda x, k: torch.tensor(data=[x[0], x[1]]) * x[:2],
    "tensor of a deque": lambda x, k: torch.tensor(collections.deque([x[0], x[1]])) * x[:2],
    "tensor of a sequence": lambda x, k: torch.tensor(Sequence([x[0], x[1]])) * x[:2],
    "as_tensor of a deque": lambda x, k: torch.as_tensor(collections.deque([x[0]])) * x[:2],
    "untagged operator": lambda x, k: (
        x if torch._nested_tensor_from_mask_left_aligned(x.view(1, 4, 1), x.view(1, 4) < 3) else -x
    ),
    "custom operator": lambda x, k: x * largest_index(x),
    "apply_": lambda x, k: x * seen_by(lambda note: x.clone().apply_(note)),
    "map_": lambda x, k: x * seen_by(lambda note: x.clone().map_(x, lambda one, _: note(one))),
    "map2_": lambda x, k: (
        x * seen_by(lambda note: x.clone().map2_(x, x, lambda one, *_: note(one)))
    ),
    "as_tensor": lambda x, k: torch.as_tensor([x[0], x[1]]) * x[:2],
    "asarray of torch": lambda x, k: torch.asarray([x[0], x[1]]) * x[:2],
    "new_tensor": lambda x, k: x.new_tensor([x[0], x[1]]) * x[:2],
    "new": lambda x, k: x.new([x[0], x[1]]) * x[:2],
    "Tensor": lambda x, k: torch.Tensor([x[0], x[1]]) * x[:2],
    "FloatTensor": lambda x, k: torch.FloatTensor([x[0], x[1]]) * x[:2],
    "scalar_tensor": lambda x, k: torch.scalar_tensor(x[0]) * x,
    "full": lambda x, k: torch.full((2,), x[0]) * x[:2],
    "fill value": lambda x, k: torch.arange(x[0].abs() + 1)[:1] * x[0],
    "index": lambda x, k: x[k] * x,
    "nested index": lambda x, k: x[[[k, k - 1]]] * 2,
    "slice": lambda x, k: x[k:] * 2,
    "range": lambda x, k: sum(x[step] for step in range(k)),
    "size": lambda x, k: torch.zeros(k) + x[0],
    "view": lambda x, k: x.view(k, -1) * 2,
    "expand": lambda x, k: x[0].expand(k, 3) * 2,
    "chunk": lambda x, k: x.chunk(k)[0] * 2,
    "dimension": lambda x, k: x.view(1, 2, 2).sum(k),
    "pad": lambda x, k: F.pad(x, (k, 0)),
    "split sizes": lambda x, k: x.split([k, 2])[0] * 2,
    "linspace": lambda x, k: torch.linspace(0, 1, k) * x[:2],
    "tensor_split": lambda x, k: x.tensor_split(k.view(1))[0] * 2,
    "tensor_split overload": lambda x, k: torch.ops.aten.tensor_split.tensor_indices_or_sections(
        x, k.view(1)
    )[0],
    "tensordot": lambda x, k: torch.tensordot(
        x.view(2, 2), x.view(2, 2), dims=torch.stack([k - 1, k - 2]).view(2, 1)
    ),
    "repeat_interleave": lambda x, k: x[:2].repeat_interleave(torch.stack([k, k])),
    "narrow": lambda x, k: x.narrow(0, k, 1) * 2,
    "one_hot": lambda x, k: F.one_hot(k.view(1), 4) * x,
    "bincount": lambda x, k: torch.bincount(k.view(1)),
    "equal": lambda x, k: x if torch.equal(x, x * 1) else -x,
    "allclose": lambda x, k: x if torch.allclose(x, x * 1) else -x,
    "format": lambda x, k: x * float(f"{x[0]}"),
    "storage": lambda x, k: x * x.untyped_storage()[3],
    "typed storage": lambda x, k: x * x.storage()[0],
    "storage bytes": lambda x, k: x * x.untyped_storage().tolist()[3],
    "pickle": lambda x, k: pickle.loads(pickle.dumps(x)) * x,
    "save and load": lambda x, k: x * save_and_load(x),
}

SHAPES = {
    "mask": lambda x, k: x[x > -10] * 2,
    "mask assigned": lambda x, k: x[x[:] > -10].sum(),
    "masked_select": lambda x, k: x.masked_select(x > -10),
    "nonzero": lambda x, k: x.nonzero(),
    "where": lambda x, k: torch.where(x > -10)[0],
    "argwhere": lambda x, k: torch.argwhere(x),
    "unique": lambda x, k: x.unique(),
    "packed sequence": lambda x, k: torch._pack_padded_sequence(
        x.view(2, 2), torch.stack([k, k - 1 + (x[1] > 1).long()]), True
    )[0],
    "padded to jagged": lambda x, k: torch.ops.aten._padded_dense_to_jagged_forward(
        x.view(1, 4, 1), [torch.stack([k - k, k])]
    ),
    "unique_consecutive": lambda x, k: torch.unique_consecutive(x),
}


def save_and_load(x: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def read_arguments(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([0.5, 1.5, 2.5, 3.5]) * scale, torch.tensor(n)


# Reads for which no guard can be made, because their values are not observed.
UNGUARDED = {"Tensor", "FloatTensor", "format", "storage", "typed storage", "storage bytes"}


UNGUARDED |= {"pickle", "save and load", "apply_", "map_", "map2_"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*READS, *SHAPES])
def test_host_reads_are_refused(kind):
    """By default, with the user's file and line."""
    read = {**READS, **SHAPES}[kind]
    assert HERE in refusal(read, *read_arguments())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(UNGUARDED))
def test_reads_that_cannot_be_guarded(kind):
    assert HERE in refusal(READS[kind], *read_arguments(), host_reads="guard")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in READS if kind not in UNGUARDED])
def test_guarded_reads(kind):
    """A guarded read holds for the recorded value and refuses others before anything changes."""
    read = READS[kind]
    with torch.no_grad(), offload.capture(read, host_reads="guard") as captured:
        captured(*read_arguments())
    assert_same(captured(*read_arguments()), read(*read_arguments()), kind)
    n_refused = 0
    for x, k in [
        (torch.tensor([-0.5, 0.5, 1.0, 1.5]), torch.tensor(n)),
        (torch.tensor([0.5, 0.75, 1.0, 1.5]), torch.tensor(n)),
        (torch.tensor([0.5, 1.5, 2.5, -3.5]), torch.tensor(1)),
        (torch.tensor([2e9, 1.5, 2.5, -3e9]), torch.tensor(3)),
    ]:
        try:
            got = captured(x, k)
        except offload.BindingError as error:
            n_refused += HERE in str(error)
        else:
            assert_same(got, read(x.clone(), k.clone()), f"{kind} with {x}, {k}")
    assert n_refused or kind in ("equal", "allclose")  # these compare x with itself


@pytest.mark.parametrize("kind", SHAPES)
def test_guarded_shapes(kind):
    read = SHAPES[kind]
    with torch.no_grad(), offload.capture(read, host_reads="guard") as captured:
        captured(*read_arguments())
    other = torch.tensor([4.5, 3.5, 2.5, 1.5])
    assert_same(captured(other, torch.tensor(n)), read(other, torch.tensor(n)))
    short = torch.tensor([0.0, 0.0, -20.0, -20.0])
    if read(short, torch.tensor(n)).shape != read(other, torch.tensor(n)).shape:
        with pytest.raises(offload.BindingError):
            captured(short, torch.tensor(n))


@pytest.mark.parametrize("package", ["torchvision", "offload_models"])
def test_lines_of_packages_whose_names_begin_alike(package):
    """Installed beside torch, or named after offload, a package is still the user's code."""
    beside = pathlib.Path(
        (torch if package.startswith("torch") else offload).__file__
    ).parent.parent
    place = str(beside / package / "model.py")
    names = {}
    exec(compile("def function(x):\n    return x * x.sum().item()\n", place, "exec"), names)
    assert f"{package}/model.py:2:" in refusal(names["function"], normal(2))


def test_guards_come_before_any_change():
    def function(x, scale):
        factor = scale.item()
        x.mul_(factor)
        return x + torch.rand(2)

    with torch.no_grad(), offload.capture(function, host_reads="guard") as captured:
        captured(normal(2), torch.tensor(2.0))
    x, generator = normal(2), torch.get_rng_state()
    before = x.clone()
    with pytest.raises(offload.BindingError, match=r"item|_local_scalar_dense"):
        captured(x, torch.tensor(3.0))
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), generator)
    captured(x, torch.tensor(2.0))
    assert torch.equal(x, before * 2)


def read_after_input(x, buffer):
    x.add_(1)
    return x * x.sum().item()


def read_after_random(x, buffer):
    noise = torch.rand(2)
    return noise * x.sum().item()


def read_after_buffer(x, buffer):
    buffer.add_(1)
    return x * x.sum().item()


def mask_after_input(x, buffer):
    x.add_(1)
    return x[x > 0]


@pytest.mark.parametrize(
    "function", [read_after_input, read_after_random, read_after_buffer, mask_after_input]
)
def test_guards_after_a_change_are_refused(function):
    buffer = torch.zeros(2)
    message = refusal(lambda x: function(x, buffer), torch.ones(2), host_reads="guard")
    assert "too late" in message
    assert HERE in message


def test_guards_are_told_with_their_lines():
    captured = offload.capture(
        lambda x: x if x.sum() > 0 else -x, torch.ones(3), host_reads="guard"
    )
    told = captured.program.host_reads
    assert told
    assert all(one.startswith("guarded: ") and HERE in one for one in told)
    assert offload.capture(torch.neg, torch.ones(3), host_reads="guard").program.host_reads == ()


def test_guards_tell_zeros_and_find_nan():
    def function(x, scale):
        return x / scale.item()

    with torch.no_grad(), offload.capture(function, host_reads="guard") as captured:
        captured(torch.ones(2), torch.tensor(0.0))
    with pytest.raises(offload.BindingError):
        captured(torch.ones(2), torch.tensor(-0.0))
    check(
        function,
        Call(torch.ones(2), torch.tensor(math.nan)),
        Call(torch.zeros(2), torch.tensor(math.nan)),
        host_reads="guard",
    )
    check(
        lambda x: x * len(x.tolist()),
        Call(torch.tensor([1.0, math.nan])),
        Call(torch.tensor([1.0, math.nan])),
        host_reads="guard",
    )


def test_guarded_array_read_after_a_write():
    """The array shows later writes, which the guard has not seen."""

    def function(x, y):
        doubled = x * 2
        seen = doubled.numpy()
        doubled.add_(y)
        return x * float(seen[0])

    with torch.no_grad():
        try:
            with offload.capture(function, host_reads="guard") as captured:
                captured(torch.ones(2), torch.ones(2))
        except offload.CaptureError:
            return
        got = captured(torch.ones(2), torch.full((2,), 5.0))
    assert torch.equal(got, torch.full((2,), 7.0))


def test_guarded_array_cannot_be_written():
    def function(x):
        seen = x.numpy()
        seen[0] = 5.0
        return x * 2

    with (
        pytest.raises(ValueError, match="read-only"),
        torch.no_grad(),
        offload.capture(function, host_reads="guard") as captured,
    ):
        captured(torch.ones(2))


def test_reads_of_constants_need_no_guard():
    """A value that depends on no input, weight or generator cannot change."""

    def function(x):
        steps = torch.arange(4)
        return x * steps[steps > 1].sum() * steps[2].item()

    check(function, *normals(2, 3))


def test_unknown_host_reads_option():
    with (
        pytest.raises(offload.CaptureError, match="avoid"),
        offload.capture(torch.sin, host_reads="never"),
    ):
        pass
