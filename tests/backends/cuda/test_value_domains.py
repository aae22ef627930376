"""Operators that fail on the device for some values: nothing executes on values that they refuse.

Kernels of the simulated device are torch's operators of the CPU, which raise for the same values as
a GPU's asserts. An error in a kernel fails the device permanently, as an assert does.
"""

from __future__ import annotations

import pytest
import torch
from stored import save_weights, without_memory
from torch.nn import functional

import offload
from offload.backends.captured.relocation.weight_stand_ins import WeightStandIns
from offload.interpreter.made_up_inputs import made_up_inputs

TABLE = torch.arange(12.0).view(4, 3)
PROBABILITIES = torch.tensor([[0.0, 1.0], [0.25, 0.75], [1.0, 0.0]])

# By name the function and valid inputs for it: zeros, numbers between 0 and 1, and one integer
# everywhere are not valid.
CASES = {
    "embedding from one on": (
        lambda ids: functional.embedding(ids - 1, TABLE),
        (torch.tensor([4, 1, 2]),),
    ),
    "index_select by fractions from one on": (
        lambda x: TABLE.index_select(0, x.long() - 1),
        (torch.tensor([1.0, 4.0, 3.0]),),
    ),
    "gather": (lambda x, ids: x.gather(1, ids - 2), (torch.randn(2, 3), torch.tensor([[4], [2]]))),
    "scatter": (
        lambda x, ids: torch.zeros(2, 3).scatter(1, ids - 2, x),
        (torch.randn(2, 1), torch.tensor([[4], [2]])),
    ),
    "nll_loss": (
        lambda x, target: functional.nll_loss(x.log_softmax(1), target - 1),
        (torch.randn(3, 4), torch.tensor([1, 4, 2])),
    ),
    "cross_entropy": (
        lambda x, target: functional.cross_entropy(x, target - 1),
        (torch.randn(3, 4), torch.tensor([1, 4, 2])),
    ),
    "binary_cross_entropy": (
        lambda x, y: functional.binary_cross_entropy(x - 1, y),
        (torch.rand(5) + 1, torch.rand(5)),
    ),
    "embedding_bag": (
        lambda ids, starts: functional.embedding_bag(ids, TABLE, starts - 1),
        (torch.tensor([3, 0, 2]), torch.tensor([1, 2])),
    ),
    "cholesky": (torch.linalg.cholesky, (torch.eye(3) * 2.5 + 0.25,)),
    "solve": (torch.linalg.solve, (torch.eye(3) + 0.5, torch.randn(3, 2))),
    "integer division": (lambda x, y: x // y, (torch.tensor([7, 8]), torch.tensor([2, 3]))),
    "a long input": (
        lambda ids: functional.embedding(ids - 1, TABLE).sum(0),
        (torch.randint(1, 5, (300_000,), generator=torch.Generator().manual_seed(0)),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_proof_runs_on_values_that_the_model_takes(backend, name):
    function, inputs = CASES[name]
    with torch.no_grad():
        run = offload.capture(function, *inputs).load(backend.name)
        again = [one.clone() for one in inputs]
        torch.testing.assert_close(run(*again), function(*inputs))


@pytest.mark.parametrize("name", ["embedding from one on", "nll_loss", "integer division"])
def test_a_device_fails_where_the_values_are_nobodys(backend, name, tmp_path):
    """A file holds no inputs: without the proof such a model loads and executes."""
    function, inputs = CASES[name]
    with torch.no_grad():
        offload.capture(function, *inputs).save(tmp_path / "model.offload")
        opened = offload.open(tmp_path / "model.offload")
        run = opened.load(backend.name, verify=False)
        torch.testing.assert_close(run(*inputs), function(*inputs))
        with pytest.raises(offload.ExecutionError):
            opened.load(backend.name)


def test_probabilities_stay_such():
    """Rows with a nonzero sum and non-negative numbers, in executed inputs."""
    with torch.no_grad(), offload.capture(lambda x: torch.multinomial(x, 1)) as captured:
        captured(PROBABILITIES)
    for variant in range(2):
        (content,) = made_up_inputs(captured.bound, variant)
        rows = torch.frombuffer(bytearray(content), dtype=torch.float32).view(3, 2)
        assert torch.multinomial(rows, 1).flatten().tolist()[::2] == [1, 0]


class Reordered(torch.nn.Module):
    """Rows of a table, by a one-based order in the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(3, 64, 64))
        self.register_buffer("order", torch.tensor([3, 1, 2]))

    def forward(self, x):
        return x * self.table.index_select(0, self.order - 1)


@pytest.mark.usefixtures("small_granules")
def test_indices_in_files_are_read_for_the_proof(backend, tmp_path):
    model, x = Reordered().eval(), torch.randn(3, 64, 64)
    save_weights(model, tmp_path)
    with torch.no_grad():
        captured = offload.capture(without_memory(Reordered), x, weights=tmp_path)
        with captured.load(backend.name) as run:
            torch.testing.assert_close(run(x), model(x))


class HostMemory:
    """Blocks of the host, by number."""

    def __init__(self) -> None:
        self.blocks: list[bytearray] = []

    def allocate(self, size_bytes: int) -> int:
        self.blocks.append(bytearray(size_bytes))
        return len(self.blocks) << 32

    def write(self, address: int, content: bytes) -> None:
        begin = address % 2**32
        self.blocks[(address >> 32) - 1][begin : begin + len(content)] = content


class Matrix(torch.nn.Module):
    """One product, of a weight in any dtype and numbers of float16."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.zeros(width, width).to(dtype)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return x @ self.weight.half().T


def stand_ins_of(build, given, folder) -> list[bytearray]:
    """The blocks of the weights of a model in files."""
    save_weights(build(), folder)
    with torch.no_grad():
        bound = offload.capture(without_memory(build), given, weights=folder).bound
    memory = HostMemory()
    WeightStandIns(bound, memory, {})
    return memory.blocks


@pytest.mark.parametrize("width", [64, 2048])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_weights_in_files_neither_overflow_nor_vanish_in_any_layer(tmp_path, width, dtype):
    """A proof with zeros or NaN everywhere would prove nothing."""
    (block,) = stand_ins_of(lambda: Matrix(width, dtype), torch.rand(1, width).half(), tmp_path)
    weight = torch.frombuffer(block, dtype=dtype).view(width, width).float()
    x = torch.rand(1, width, generator=torch.Generator().manual_seed(0))
    for _ in range(64):
        x = (x @ weight.T).half().float()
    assert 0.01 < x.mean() < 100
    assert x.count_nonzero() > width / 2


def test_weights_that_are_summed_over_other_widths_have_other_numbers(tmp_path):
    def build():
        return torch.nn.Sequential(
            torch.nn.Linear(64, 512), torch.nn.LayerNorm(512), torch.nn.Linear(512, 64)
        )

    blocks = stand_ins_of(build, torch.rand(1, 64), tmp_path)
    means = sorted(torch.frombuffer(one, dtype=torch.float32).mean().item() for one in blocks)
    assert means == pytest.approx([1 / 512, 1 / 64, 1 / 2], rel=0.1)
