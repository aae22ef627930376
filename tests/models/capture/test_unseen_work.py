"""Work that the recorder cannot see: on other threads, through aliases of the memory."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from checks import UNSEEN, normal, refusal
from torch import nn

HERE = "test_unseen_work.py:"


class InThread(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.work = work
        self.register_buffer("state", torch.zeros(2))
        self.plain = torch.zeros(2)

    def forward(self, x):
        thread = threading.Thread(target=lambda: self.work(self, x))
        thread.start()
        thread.join()
        return x + self.state + self.plain


def write_buffer(model, x):
    model.state.copy_(x)


def write_attribute(model, x):
    model.plain.copy_(x)


def replace_buffer(model, x):
    model.state = x * 2


def write_input(model, x):
    x.add_(1)


@pytest.mark.parametrize("work", [write_buffer, write_attribute, replace_buffer, write_input])
def test_work_on_another_thread(work):
    refusal(InThread(work), normal(2))


closed_over = torch.zeros(2)


@pytest.mark.parametrize("where", ["closure", "global", "default"])
def test_work_on_another_thread_on_tensors_of_a_function(where):
    """Written before the recorder meets them."""
    target = closed_over if where == "global" else torch.zeros(2)

    def in_thread(work):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    def with_closure(x):
        in_thread(lambda: target.copy_(x))
        return x + target

    def with_global(x):
        in_thread(lambda: closed_over.copy_(x))
        return x + closed_over

    def with_default(x, kept=target):
        in_thread(lambda: kept.copy_(x))
        return x + kept

    refusal(locals()[f"with_{where}"], normal(2))


def test_tensor_made_on_another_thread():
    def function(x):
        made = []
        thread = threading.Thread(target=lambda: made.append(x * 2))
        thread.start()
        thread.join()
        return x + made[0]

    assert "thread" in refusal(function, normal(2))


class WrittenOutside(nn.Module):
    """Counts its calls in a buffer through memory that torch does not watch."""

    def __init__(self, way, when):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.way, self.when = way, when
        self.array = self.count.numpy()
        self.address = self.count.data_ptr()

    def __deepcopy__(self, memo):
        return WrittenOutside(self.way, self.when)

    def write(self):
        if self.way == "numpy":
            self.array[...] += 1
        else:
            words = (ctypes.c_float * 2).from_address(self.address)
            words[0] += 1

    def forward(self, x):
        if self.when == "before":
            self.write()
        result = x + self.count
        if self.when == "after":
            self.write()
        return result


@pytest.mark.parametrize("way", ["numpy", "ctypes"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_writes_through_other_names_of_the_memory(way, when):
    message = refusal(WrittenOutside(way, when), torch.ones(2))
    assert "count" in message or "differs" in message


class Shuffled(nn.Module):
    """Reverses a large buffer through NumPy: the same bytes in another order."""

    def __init__(self, n_elements, change):
        super().__init__()
        self.register_buffer("order", torch.arange(n_elements))
        self.array = self.order.numpy()
        self.change = change

    def forward(self, x):
        self.change(self.array)
        return x + self.order[:2]


def reverse(array):
    array[:] = array[::-1].copy()


def swap_ends(array):
    array[0], array[-1] = array[-1], array[0]


def swap_rows(array):
    array[:2048], array[2048:4096] = array[2048:4096].copy(), array[:2048].copy()


@pytest.mark.parametrize("n_elements", [20_000, 2048**2 + 2048 + 3])
@pytest.mark.parametrize("change", [reverse, swap_ends, swap_rows])
def test_large_buffers_permuted_by_numpy(n_elements, change):
    assert "order" in refusal(Shuffled(n_elements, change), torch.ones(2))


def test_large_buffers_of_odd_sizes():
    def last_byte(array):
        array[-1] += 1

    for n_bytes in (65_537, 65_543, 3 * 65_536 + 1):
        model = Shuffled(8, last_byte)
        model.order = torch.zeros(n_bytes, dtype=torch.uint8)
        model.array = model.order.numpy()
        assert "order" in refusal(model, torch.ones(2))


HANDED_OUT = {
    "print": print,
    "str": str,
    "format": lambda x: f"{x}",
    "percent": lambda x: "%s" % x,  # noqa: UP031
    "data_ptr": lambda x: x.data_ptr(),
    "dlpack": torch.from_dlpack,
    "to_dlpack": torch.utils.dlpack.to_dlpack,
    "storage address": lambda x: x.untyped_storage().data_ptr(),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[UNSEEN] if kind == "to_dlpack" else []) for kind in HANDED_OUT],
)
def test_memory_handed_out_and_printing(kind, capsys):
    def function(x):
        HANDED_OUT[kind](x * 2)
        return x + 1

    assert HERE in refusal(function, normal(3))
