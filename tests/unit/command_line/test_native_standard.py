"""The native code keeps to C++17, as which it is compiled with torch before 2.13."""

import re
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[3] / "native"
HEADERS = (
    "barrier|bit|compare|concepts|coroutine|format|latch|numbers|ranges|semaphore|source_location"
    "|span|stop_token|syncstream|version"
)
NAMES = (
    "assume_aligned|atomic_ref|barrier|bind_front|bit_cast|bit_ceil|bit_floor|bit_width|cmp_equal"
    "|cmp_greater|cmp_greater_equal|cmp_less|cmp_less_equal|cmp_not_equal|construct_at"
    "|counting_semaphore|binary_semaphore|countl_zero|countr_zero|countl_one|countr_one|endian"
    "|erase|erase_if|format|has_single_bit|identity|in_range|is_constant_evaluated|jthread|latch"
    "|lerp|make_shared_for_overwrite|make_unique_for_overwrite|midpoint|numbers|partial_ordering"
    "|popcount|ranges|remove_cvref|remove_cvref_t|rotl|rotr|shift_left|shift_right"
    "|source_location|span|ssize|stop_source|stop_token|strong_ordering|three_way_comparable"
    "|to_address|to_array|type_identity|type_identity_t|unwrap_reference|views|weak_ordering"
)
OF_CPP20 = re.compile(
    rf"#include <(?:{HEADERS})>|\bstd::(?:{NAMES})\b|(?:\.|->)(?:starts_with|ends_with)\("
)


def found_in(text: str) -> list[str]:
    lines = (line.split("//")[0] for line in text.splitlines())
    return [line.strip() for line in lines if OF_CPP20.search(line)]


def test_no_part_of_the_library_of_cpp20_is_used():
    files = [one for one in NATIVE.rglob("*") if one.suffix in (".cpp", ".hpp")]
    assert len(files) > 100
    assert {str(one): said for one in files if (said := found_in(one.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "std::erase_if(kept, gone);",
        "std::none_of(begin, end, std::identity())",
        "#include <span>",
        "if (name.starts_with(prefix)) return;",
    ],
)
def test_such_a_part_is_found(line):
    assert found_in(f"void f() {{\n  {line}\n}}") == [line]
    assert found_in(f"  // {line}") == []
