"""Models of several ranks: split by DTensor, trained on parts of a batch, saved by each rank."""

from __future__ import annotations

import pytest
from ranks import Found, run_by_torchrun


@pytest.fixture(scope="module")
def found() -> Found:
    """Results of two ranks in all cases."""
    return run_by_torchrun("model_rank_cases", 2)


@pytest.mark.parametrize(
    ("case", "n_collectives"),
    [("tensor_parallel_feedforward", 1), ("tensor_parallel_gpt", 4), ("sequence_parallel", 2)],
)
def test_models_split_by_dtensor_have_eager_bits(found, case, n_collectives):
    for rank in found.of(case):
        assert rank["same"]
        assert rank["launches"].count("wait_tensor") == n_collectives


def test_distributed_tensors_are_neither_arguments_nor_results(found):
    for given, returned in found.of("distributed_tensors_are_no_arguments"):
        assert "args[0] uses a DTensor" in given
        assert "a result uses a DTensor" in returned
        assert ".to_local()" in given
        assert ".to_local()" in returned


def test_wrappers_that_cannot_be_followed_are_refused_by_name(found):
    for first, step, second, step_of_second in found.of("wrapped_models_are_refused"):
        assert first == step
        assert first.startswith("DistributedDataParallel cannot be captured")
        assert "all_reduce the gradients" in first
        assert second == step_of_second
        assert second.startswith("FSDPModule cannot be captured")


@pytest.mark.parametrize("case", ["data_parallel_functional", "data_parallel_in_place"])
def test_steps_on_parts_of_a_batch_train_as_eager_does(found, case):
    for rank in found.of(case):
        assert rank["same"]
        assert rank["n"] == 50  # a loss and four parameters in ten steps
        assert rank["reduced"] == 4


def test_autograd_goes_back_through_collectives(found):
    for rank in found.of("gradients_through_collectives"):
        assert rank["same"]
        assert "all_gather_into_tensor" in rank["launches"]
        assert "reduce_scatter_tensor" in rank["launches"]


def test_each_rank_saves_and_finds_a_file_of_its_own(found):
    for number, rank in enumerate(found.of("saved_by_rank")):
        assert rank["files"] == ["summed.offload.rank0of2", "summed.offload.rank1of2"]
        assert rank["same"] == [True, True]
        assert rank["groups"] == [f"group '0' of ranks 0, 1 (this is rank {number})"]
        assert "none is called '7'" in rank["wrong"]["unknown"]
        assert "expected process groups, got a int" in rank["wrong"]["no group"]


def test_pipelines_run_captured_stages(found):
    for rank in found.of("captured_stages_of_a_pipeline"):
        assert rank == [True] * 6
