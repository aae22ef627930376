"""Kernels of models with weights in files: packed without a budget, and packed again."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from stored import save_weights, without_memory
from torch import nn

import offload
from offload.backends.host_memory import PAGE_BYTES
from offload.compile.proof import KernelProof
from offload.compile.toolchain import CompilerMissing, find_compiler

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)


class Tied(nn.Module):
    """Products, one with a table's weight, a convolution with few pixels, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 24)
        self.up, self.down = nn.Linear(24, 50), nn.Linear(50, 24)
        self.mix = nn.Conv1d(5, 5, 3, padding=1)
        self.norm = nn.LayerNorm(24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        x = self.norm(x + self.down(torch.relu(self.up(x)))) + self.mix(x)
        return nn.functional.linear(x, self.table.weight)


TOKENS = torch.tensor([3, 1, 4, 1, 5])


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    """A model with its weights in `tmp_path`."""
    torch.manual_seed(0)
    made = Tied().eval()
    save_weights(made, tmp_path)
    return made


def loaded(folder: Path, *, weights_budget: str | None = None) -> offload.Executable:
    captured = offload.capture(without_memory(Tied), TOKENS, weights=folder)
    return captured.load(fuse=True, weights_budget=weights_budget)


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def n_packed(run: offload.Executable) -> int:
    assert run.fusion is not None
    assert not [one.failure for one in run.fusion.proofs if one.failure]
    return len(run.fusion.packed_bytes)


@pytest.mark.slow
@torch.no_grad()
def test_weights_in_files_are_packed(model, tmp_path):
    run = loaded(tmp_path)
    for tokens in (TOKENS, TOKENS.flip(0), TOKENS):
        near(run(tokens), model(tokens))
    in_memory = offload.capture(model, TOKENS).load(fuse=True)
    near(in_memory(TOKENS), model(TOKENS))
    assert n_packed(run) == n_packed(in_memory) == 4
    assert run.memory_report().derived_bytes == in_memory.memory_report().derived_bytes


class Wide(nn.Module):
    """Products with matrices of whole pages, one of which is also used unpacked."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 1024), nn.Linear(1024, 512)
        self.both = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x and the result [n, 512]."""
        x = self.down(torch.relu(self.up(x)))
        return self.both(x) * self.both.weight[0]


WIDE_BYTES = 2 * 512 * 1024 * 4  # of `up` and `down`


@pytest.fixture
def wide(tmp_path: Path) -> nn.Module:
    """A model with its weights in `tmp_path`."""
    torch.manual_seed(0)
    made = Wide().eval()
    save_weights(made, tmp_path)
    return made


def loaded_wide(folder: Path) -> offload.Executable:
    captured = offload.capture(without_memory(Wide), torch.randn(4, 512), weights=folder)
    return captured.load(fuse=True)


def n_discarded(run: offload.Executable) -> int:
    return run.memory_report().discarded_bytes


@pytest.mark.slow
@torch.no_grad()
def test_memory_of_packed_weights_is_given_back(wide, tmp_path):
    run = loaded_wide(tmp_path)
    x = torch.randn(4, 512)
    assert n_discarded(run) == 0
    for _ in range(3):
        near(run(x), wide(x))
        assert WIDE_BYTES - 4 * PAGE_BYTES <= n_discarded(run) <= WIDE_BYTES
    assert n_packed(run) == 3
    run.rebind_weights()
    near(run(x), wide(x))


@torch.no_grad()
def test_what_was_given_back_is_read_again(wide, tmp_path):
    """Alone: another weight's memory stays released meanwhile."""
    run = loaded_wide(tmp_path)
    x = torch.randn(4, 512)
    for name in ("up.weight", "down.bias", "both.weight", "down.weight"):
        weight = wide.get_parameter(name)
        weight.mul_(0.5)
        run.streaming.replace({name: weight})
        for _ in range(2):
            near(run(x), wide(x))
            assert n_discarded(run) >= WIDE_BYTES - 4 * PAGE_BYTES
    run = loaded_wide(tmp_path)
    for seed in (1, 2):
        torch.manual_seed(seed)
        other = Wide().eval()
        save_weights(other, tmp_path)
        run.streaming.refresh()
        near(run(x), other(x))
        run.rebind_weights()
        near(run(x), other(x))


@torch.no_grad()
def test_a_weight_whose_kernel_fails_its_proof_stays(wide, tmp_path, monkeypatch):
    """Its launches run as recorded, and read it; `down` lies beside it and is released."""
    proved = KernelProof.prove

    def prove(self: KernelProof, addresses: list[int]) -> bool:
        return proved(self, addresses) and "relu" not in self.name

    monkeypatch.setattr(KernelProof, "prove", prove)
    run = loaded_wide(tmp_path)
    x = torch.randn(4, 512)
    for _ in range(3):
        near(run(x), wide(x))
    assert WIDE_BYTES / 2 - 4 * PAGE_BYTES <= n_discarded(run) <= WIDE_BYTES / 2


@torch.no_grad()
def test_after_a_fork_both_have_their_weights(wide, tmp_path):
    run = loaded_wide(tmp_path)
    x = torch.randn(4, 512)
    expected = wide(x)
    near(run(x), expected)
    child = os.fork()
    if child == 0:
        run.streaming.refresh()
        is_near = torch.allclose(run(x), expected, rtol=1e-4, atol=1e-4)
        os._exit(0 if is_near and n_discarded(run) > 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    near(run(x), expected)


@torch.no_grad()
def test_under_a_budget_they_are_read_in_place(model, tmp_path):
    run = loaded(tmp_path, weights_budget="1 MiB")
    near(run(TOKENS), model(TOKENS))
    assert n_packed(run) == 0


@torch.no_grad()
def test_a_file_that_is_written_again_is_packed_again(model, tmp_path):
    run = loaded(tmp_path)
    for seed in (1, 2):
        before = run(TOKENS)
        torch.manual_seed(seed)
        other = Tied().eval()
        save_weights(other, tmp_path)
        assert torch.equal(run(TOKENS), before)
        run.streaming.refresh()
        for _ in range(2):
            near(run(TOKENS), other(TOKENS))


@torch.no_grad()
def test_a_weight_that_is_replaced_is_packed_again(model, tmp_path):
    run = loaded(tmp_path)
    near(run(TOKENS), model(TOKENS))
    for name in ("up.weight", "table.weight", "mix.weight", "down.bias"):
        weight = model.get_parameter(name)
        weight.mul_(-1.5)
        run.streaming.replace({name: weight})
        for _ in range(2):
            near(run(TOKENS), model(TOKENS))
    run.rebind_weights()
    near(run(TOKENS), model(TOKENS))


@torch.no_grad()
def test_other_threads_see_old_weights_or_new_ones(model, tmp_path):
    """All weights of a call have content of the same version, whenever it is replaced."""
    run = loaded(tmp_path)
    names = ("up.weight", "up.bias", "down.weight")
    contents = []
    for factor in (1.0, 3.0):
        state = {name: model.get_parameter(name) * factor for name in names}
        contents.append((state, torch.func.functional_call(model, state, TOKENS)))
    run(TOKENS)
    stop, wrong = threading.Event(), []

    def work() -> None:
        with torch.no_grad():
            while not stop.is_set():
                got = run(TOKENS)
                if not any(torch.allclose(got, one, rtol=1e-4, atol=1e-4) for _, one in contents):
                    wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(200):
        run.streaming.replace(contents[turn % 2][0])
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    near(run(TOKENS), contents[1][1])


@torch.no_grad()
def test_a_file_of_another_length_is_refused_at_the_refresh(model, tmp_path):
    run = loaded(tmp_path)
    near(run(TOKENS), model(TOKENS))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file({"x": torch.zeros(3), **state}, tmp_path / "model.safetensors")
    with pytest.raises(offload.FileError):
        run.streaming.refresh()
