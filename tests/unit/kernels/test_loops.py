"""The source of loops: the pointers that it declares disjoint."""

from __future__ import annotations

import pytest

from offload.compile.loops import Copy, Loops, Word

BODY = """
extern "C"  void kernel(const float* in_ptr0,
                       float* out_ptr0)
{
    {
        out_ptr0[0] = in_ptr0[0];
    }
}
"""
SHARED = """
extern "C"  void kernel(const float* in_ptr0,
                       float* out_ptr0)
{
    #pragma omp parallel num_threads(offload_threads(2))
    {
        int tid = omp_get_thread_num();
        {
            #pragma omp for
            for(int64_t x0=0; x0<8; x0+=1) out_ptr0[x0] = in_ptr0[x0];
        }
    }
}
"""


def words(*numbers: int) -> tuple[Word, ...]:
    types = ["const float*", "float*"]
    return tuple(Word(one, 0, c_type) for one, c_type in zip(numbers, types, strict=True))


def source(body: str, *calls: tuple[Word, ...]) -> str:
    return Loops({"k": body}, tuple(("k", each) for each in calls), (), ()).source("f")


def test_pointers_to_different_memory_are_apart() -> None:
    text = source(BODY, words(0, 1), words(1, 2))
    assert "f_k(const float* __restrict__ in_ptr0,\n" in text
    assert "float* __restrict__ out_ptr0)" in text
    assert "  f_k((const float*)((char*)words[1] + 0), (float*)((char*)words[2] + 0));" in text


@pytest.mark.parametrize("body", [BODY, SHARED])
def test_pointers_to_the_same_memory_are_not(body: str) -> None:
    text = source(body, words(0, 1), words(1, 1))
    assert "__restrict__" not in text
    assert "of_thread" not in text


def test_what_a_thread_does_is_a_function() -> None:
    text = source(SHARED, words(0, 1))
    rows, shares = text.index("void f_k_of_thread("), text.index("void f_k(")
    assert rows < text.index("#pragma omp for") < shares < text.index("#pragma omp parallel")
    assert "__restrict__" in text[rows:shares]
    assert "__restrict__" not in text[shares:]
    assert "f_k_of_thread(in_ptr0, out_ptr0);" in text
    assert text.count("{") == text.count("}")


def test_threads_that_meet_twice_stay_in_one_function() -> None:
    twice = SHARED.rstrip()[:-1] + "    #pragma omp parallel num_threads(2)\n    {}\n}\n"
    text = source(twice, words(0, 1))
    assert "__restrict__" in text
    assert "of_thread" not in text


def test_copies_come_last() -> None:
    loops = Loops({"k": BODY}, (("k", words(0, 1)),), (Copy(2, Word(1, 4, "const char*"), 8),), ())
    assert loops.source("f").endswith(
        "  std::memcpy(words[2], (const char*)((char*)words[1] + 4), 8);\n}"
    )
