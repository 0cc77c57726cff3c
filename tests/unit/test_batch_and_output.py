"""The batch that a forward receives, and what it may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.errors import ExecutionError, PipelineOutputError
from triton_diffusion.output import BatchRunnerOutput, DiffusionOutput
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams


def batch_of(*prompts: str) -> DiffusionRequestBatch:
    return DiffusionRequestBatch(
        [
            OmniDiffusionRequest(prompt=prompt, request_id=f"id-{prompt}", sampling_params=SamplingParams(seed=seed))
            for seed, prompt in enumerate(prompts)
        ]
    )


def picture(value: int = 0) -> DiffusionOutput:
    return DiffusionOutput(output=np.full([1, 2, 2, 3], value, np.uint8))


def test_a_batch_lists_what_its_requests_hold() -> None:
    batch = batch_of("a", "b")
    assert batch.num_reqs == 2
    assert batch.request_ids == ["id-a", "id-b"]
    assert batch.prompts == ["a", "b"]
    assert [params.seed for params in batch.sampling_params_list] == [0, 1]


def test_the_names_that_vllm_omni_knows_mean_the_first_request() -> None:
    batch = batch_of("a", "b")
    assert batch.request_id == "id-a"
    assert batch.sampling_params is batch.requests[0].sampling_params
    assert batch.kv_sender_info is None


def test_a_batch_needs_requests_with_different_ids() -> None:
    with pytest.raises(ValueError, match="at least one"):
        DiffusionRequestBatch([])
    with pytest.raises(ValueError, match="unique"):
        batch_of("a", "a")


def test_every_output_finds_its_request() -> None:
    outputs = BatchRunnerOutput.from_forward(batch_of("a", "b"), [picture(1), picture(2)], "Mine")
    pixels = [outputs[name].output for name in ("id-a", "id-b")]
    assert [array.max() for array in pixels if array is not None] == [1, 2]


def test_one_request_may_fail_while_the_other_does_not() -> None:
    failed = DiffusionOutput(error=ExecutionError("no"))
    assert len(BatchRunnerOutput.from_forward(batch_of("a", "b"), [failed, picture()], "Mine")) == 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "it returned NoneType"),
        (picture(), "it returned DiffusionOutput"),
        ("ab", "it returned str"),
        ([picture()], "it returned 1"),
        ([picture(), picture(), picture()], "it returned 3"),
        ([picture(), np.zeros([1, 2, 2, 3])], "element 1 is ndarray"),
        ([picture(), DiffusionOutput()], "element 1 has neither of output and error"),
        ([DiffusionOutput(output=np.zeros([1, 2, 2, 3], np.float32)), picture()], "element 0: output must be a UINT8"),
        ([DiffusionOutput(output=np.zeros([2, 2, 3], np.uint8)), picture()], r"not \[2, 2, 3\]"),
    ],
)
def test_a_wrong_return_names_the_class_and_what_it_returned(returned: Any, message: str) -> None:
    with pytest.raises(
        PipelineOutputError, match=rf"^Mine\.forward must return a list of 2 DiffusionOutput.*{message}"
    ):
        BatchRunnerOutput.from_forward(batch_of("a", "b"), returned, "Mine")
