"""Made-up inputs have the recorded call's content, or content that any model can read."""

from __future__ import annotations

import pytest
import torch

import offload
from offload.interpreter.made_up_inputs import input_tensors, made_up_inputs, valid_bytes
from offload.program import BoundProgram
from offload.record import input_samples


def program_of(*inputs: torch.Tensor, function=lambda *given: [one.clone() for one in given]):
    with torch.no_grad():
        return offload.capture(function, *inputs).bound


def made(bound: BoundProgram, variant: int) -> list[torch.Tensor]:
    """The items of each input, as a vector."""
    contents = made_up_inputs(bound, variant)
    program = bound.program
    dtypes = [program.values[view.value].dtype for view in program.inputs]
    return [
        torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype))
        for content, dtype in zip(contents, dtypes, strict=True)
    ]


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([3, 0, 7]),
        torch.tensor([0.25, -3.5, float("-inf")]),
        torch.tensor([3, 0, 7], dtype=torch.bfloat16),
        torch.tensor([True, False, False]),
        torch.tensor([3 + 1j, 0, 7]),
    ],
)
def test_what_was_recorded_is_what_executes(x):
    """Memory that should not be read has the items in another order."""
    bound = program_of(x)
    first, second, third = (made(bound, variant)[0] for variant in range(3))
    assert torch.equal(first, x)
    assert torch.equal(second, x)
    assert torch.equal(third, x.flip(0))


@pytest.mark.parametrize(("number", "other"), [(5, 1), (1, 0), (0, 1)])
def test_items_that_are_all_the_same_become_others(number, other):
    bound = program_of(torch.full((3,), number))
    assert made(bound, 1)[0].tolist() == [number] * 3
    assert made(bound, 2)[0].tolist() == [other] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_zeros_are_no_numbers_to_prove_anything_with(dtype):
    """Nearly zero, so that as an index they are still 0."""
    bound = program_of(torch.zeros(100, dtype=dtype))
    first, second, _ = (made(bound, variant)[0] for variant in range(3))
    real = torch.view_as_real(first) if dtype.is_complex else first
    assert ((real >= 0) & (real < 0.001)).all()
    assert real.unique().numel() > 50
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_zeros_of_eight_bits_become_other_numbers_too(dtype):
    """Most numbers below 2**-10 are zeros there."""
    bound = program_of(torch.zeros(100, dtype=dtype))
    numbers = made(bound, 0)[0].float()
    assert ((numbers >= 0) & (numbers < 2**-6)).all()
    assert numbers.count_nonzero() > 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_numbers_stay_below_their_limit_when_they_are_rounded(dtype):
    """As an index they are 0, and 1 may be out of range."""
    name = str(dtype).removeprefix("torch.")
    content = valid_bytes(name, 2**16, torch.Generator().manual_seed(0))
    assert torch.frombuffer(bytearray(content), dtype=dtype).float().max() < 1


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_torchs_default_dtype_is_not_asked(default, dtype):
    expected = valid_bytes(dtype, 64, torch.Generator().manual_seed(0))
    torch.set_default_dtype(default)
    try:
        assert valid_bytes(dtype, 64, torch.Generator().manual_seed(0)) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_nobody_knows_is_valid_for_any_model():
    bound = BoundProgram(program_of(torch.randn(100), torch.arange(5)).program)
    numbers, integers = made(bound, 0)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert integers.tolist() == [0] * 5
    assert made(bound, 2)[1].tolist() == [1] * 5


def test_a_sample_is_the_beginning_before_the_call():
    x = torch.arange(4.0)
    bound = program_of(x[1:], function=lambda x: x.add_(10))
    assert bound.bindings.input_samples == (torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes(),)
    assert x.tolist() == [0, 11, 12, 13]


def test_long_inputs_repeat_their_beginning(monkeypatch):
    monkeypatch.setattr(input_samples, "SAMPLE_BYTES", 16)
    bound = program_of(torch.arange(7), torch.arange(2))
    assert [len(one) for one in bound.bindings.input_samples] == [16, 16]
    assert [one.tolist() for one in made(bound, 0)] == [[0, 1, 0, 1, 0, 1, 0], [0, 1]]


def test_samples_of_many_inputs_share_their_memory(monkeypatch):
    monkeypatch.setattr(input_samples, "SAMPLES_BYTES", 100)
    bound = program_of(*(torch.arange(8) for _ in range(3)))
    assert [len(one) for one in bound.bindings.input_samples] == [32] * 3


def test_integers_are_sampled_first_and_small_ones_whole(monkeypatch):
    """No other numbers are valid for them, while fractions may be repeated."""
    monkeypatch.setattr(input_samples, "SAMPLES_BYTES", 100)
    numbers = [torch.arange(16.0) for _ in range(3)]
    bound = program_of(*numbers, torch.arange(8), torch.arange(1), torch.ones(3).bool())
    assert [len(one) for one in bound.bindings.input_samples] == [16, 16, 16, 64, 8, 3]


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((5, 1), (7, 1)),
        ((5, 2), (7, 3)),
        ((3, 4, 2), (1, 7, 3)),
        ((2, 3), (0, 2)),
        ((3, 3), (2, 2)),
        ((2, 2), (300, 1)),
        ((4,), (1,)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
@pytest.mark.parametrize("most_bytes", [32, 2**20])
def test_what_lies_between_items_is_not_kept(monkeypatch, shape, strides, dtype, most_bytes):
    """It may belong to anything."""
    monkeypatch.setattr(input_samples, "SAMPLE_BYTES", most_bytes)
    memory = torch.ones(400).to(dtype)
    x = memory.as_strided(shape, strides, 3)
    (sample,) = input_samples.input_samples([x])
    places = [0]
    for size, stride in zip(shape, strides, strict=True):
        places = [place + index * stride for place in places for index in range(size)]
    expected = torch.zeros(max(places) + 1, dtype=dtype)
    expected[places] = 1
    row_bytes = max(strides) * dtype.itemsize
    if row_bytes <= most_bytes < expected.nbytes:
        most_bytes -= most_bytes % row_bytes
    assert sample == expected.numpy().tobytes()[:most_bytes]
    assert (memory == 1).all()


def test_long_strided_inputs_repeat_whole_rows(monkeypatch):
    """Otherwise items would fall into gaps, which hold nothing valid."""
    monkeypatch.setattr(input_samples, "SAMPLE_BYTES", 64)
    memory = torch.zeros(10, 3, dtype=torch.int64)
    memory[:, 1] = torch.arange(1, 11)
    bound = program_of(memory[:, 1])
    (x,) = input_tensors(bound, made_up_inputs(bound, 0))
    assert x.tolist() == [1, 2] * 5


def test_samples_of_inputs_in_each_others_gaps_have_the_items_of_both():
    """Otherwise zeros of one input would overwrite items of the other."""
    memory = torch.arange(1.0, 13.0).view(6, 2)

    def both(x, y):
        x.add_(1)
        return x + y

    bound = program_of(memory[:, :1], memory[:, 1:], function=both)
    tensors = input_tensors(bound, made_up_inputs(bound, 0))
    assert tensors[0].flatten().tolist() == [1, 3, 5, 7, 9, 11]
    assert tensors[1].flatten().tolist() == [2, 4, 6, 8, 10, 12]


def test_no_input_and_no_item():
    with offload.capture(lambda: torch.ones(2)) as captured:
        captured()
    assert made_up_inputs(captured.bound, 0) == []
    bound = program_of(torch.empty(0))
    assert made_up_inputs(bound, 0) == [b""]


def test_a_saved_program_holds_no_input(tmp_path):
    with torch.no_grad():
        captured = offload.capture(lambda x: x + 1, torch.randn(3))
    captured.save(tmp_path / "model.offload")
    opened = offload.open(tmp_path / "model.offload")
    assert opened.bindings.input_samples == ()


@pytest.mark.parametrize("x", [torch.full((3,), 5), torch.zeros(3), torch.randn(3)])
def test_torchs_default_device_is_not_asked(x):
    bound = program_of(x)
    with torch.device("meta"):
        contents = [made_up_inputs(bound, variant) for variant in range(3)]
        (tensor,) = input_tensors(bound, contents[0])
    assert contents == [made_up_inputs(bound, variant) for variant in range(3)]
    assert tensor.device.type == "cpu"
