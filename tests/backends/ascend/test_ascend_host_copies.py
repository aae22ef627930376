"""Copies from memory that the host overwrites, where no kind of copy stages its source.

CANN before 8.5 has no ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE: the simulated runtime then refuses its
number. Each case runs in a separate process, as the runtime is opened once.
"""

from __future__ import annotations

import ascend_client as acl
import pytest
from ascend_process import output_of

MOST_PIECES = 16
BEGIN = """
from ascend_residents import Chain, live, plus, read, NUMBERS
import npu_device
npu_device.operators()  # which are linked to functions that are hidden below
ascend.begin()
ascend.set_personality("8.1")
refresh = {refresh!r}
chain = Chain(ascend, form="capture", refresh=refresh)
chain.bind_first()
chain.run()
"""


def told(code: str, refresh: str = "host") -> list[str]:
    return output_of(BEGIN.format(refresh=refresh) + code).splitlines()


def test_old_releases_refuse_the_kind(ascend, npu):
    ascend.set_personality("8.1")
    kind = acl.HOST_TO_BUFFER_TO_DEVICE
    word, stream = npu.words(1), npu.stream()
    for copy in (("aclrtMemcpyAsync", word, 8, acl.u64(2), 8, kind, stream),
                 ("aclrtMemcpy", word, 8, acl.u64(2), 8, kind)):  # fmt: skip
        assert ascend.code(*copy) == acl.ACL_INVALID_PARAM
    npu.synchronize(stream)
    assert acl.peek(word) == (1,)


@pytest.mark.slow
@pytest.mark.parametrize("refresh", ["host", "kernel", "operators"])
def test_executions_in_flight_have_the_addresses_of_their_own_time(refresh):
    """More executions than pieces, so that some wait for the oldest."""
    says = told(
        """
ascend.start_trace()
outputs = [chain.allocate() for _ in range(40)]
for output in outputs:
    chain.bind(output=output)
    chain.resident.execute()
chain.resident.finish()
print(all(read(output) == plus(3) for output in outputs))
print(any("kind=5" in one for one in ascend.trace))
""",
        refresh,
    )
    assert says == ["True", "False"]


@pytest.mark.slow
def test_pieces_are_used_again_and_given_back():
    says = told(
        """
for _ in range(5):  # each is over when the next begins
    chain.bind(output=chain.allocate())
    chain.run()
print(ascend.live("host memory"))
for _ in range(40):  # none is over
    chain.bind(output=chain.allocate())
    chain.resident.execute()
print(ascend.live("host memory"))
chain.resident.finish()
chain.resident.close()
print(ascend.live("host memory"), ascend.live("event"))
"""
    )
    assert says == ["1", str(MOST_PIECES), "0 0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    ["aclrtMallocHost", "aclrtCreateEventExWithFlag", "aclrtMemcpyAsync", "aclrtRecordEvent",
     "aclrtQueryEventStatus"],
)  # fmt: skip
def test_a_copy_that_fails_is_made_by_the_next_execution(function):
    says = told(
        f"""
from offload.errors import ExecutionError
last = None
for attempt in range(2):
    output = chain.allocate()
    chain.bind(output=output)
    chain.resident.execute()
    output = chain.allocate()
    chain.bind(output=output)
    ascend.fail({function!r}, 507000)
    try:
        chain.resident.execute()
    except ExecutionError as error:
        print("507000" in str(error))
    ascend.forget_calls()
    chain.run()
    print(read(output) == plus(3))
"""
    )
    assert says == ["True"] * 4
