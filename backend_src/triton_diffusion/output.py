"""What a pipeline returns for each request, and how it finds its way back to the request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.errors import PipelineOutputError, TritonDiffusionError


@dataclass(kw_only=True)
class DiffusionOutput:
    """The result of one request: pictures, or an error.

    Args:
        output: UINT8, images [n, H, W, 3] or videos [n, F, H, W, 3], in the order of the request's seeds.
        error: why there is none.
        stage_durations: seconds spent in `encode`, `denoise` and `decode`.
        num_inference_steps: steps that were really run.
    """

    output: np.ndarray[Any, Any] | None = None
    error: TritonDiffusionError | None = None
    stage_durations: dict[str, float] = field(default_factory=dict)
    num_inference_steps: int = 0


class BatchRunnerOutput(Mapping[str, DiffusionOutput]):
    """The results of the requests that ended in one step of the engine, by request id.

    Args:
        outputs: pictures or errors, of requests that need nothing more.
        stepped: the requests that took the step.
        denoised: those of them that need no further one.
        rows: the rows of all requests that took it.
        forward_rows: the rows of each forward pass that it took; by default, all rows in one.
        seconds: how long the step took, without the encoding of newcomers.
    """

    def __init__(
        self,
        outputs: Mapping[str, DiffusionOutput],
        *,
        stepped: Sequence[str] = (),
        denoised: Sequence[str] = (),
        rows: int = 0,
        forward_rows: Sequence[int] = (),
        seconds: float = 0.0,
    ) -> None:
        self._outputs = dict(outputs)
        self.stepped = stepped
        self.denoised = denoised
        self.rows = rows
        self.forward_rows = forward_rows or ([rows] if rows else [])
        self.seconds = seconds

    @classmethod
    def from_forward(cls, batch: DiffusionRequestBatch, returned: object, pipeline: str) -> BatchRunnerOutput:
        """The checked return value of a `forward`, mapped back to the requests of `batch`.

        Args:
            returned: must be a sequence with one DiffusionOutput for each request, in order.
            pipeline: the name of the class that returned it, for the error.

        Raises:
            PipelineOutputError: it is something else.
        """
        contract = f"{pipeline}.forward must return a list of {batch.num_reqs} DiffusionOutput, one for each request"
        if not isinstance(returned, Sequence) or isinstance(returned, (str, bytes)):
            raise PipelineOutputError(f"{contract}; it returned {type(returned).__name__}")
        if len(returned) != batch.num_reqs:
            raise PipelineOutputError(f"{contract}; it returned {len(returned)}")
        for position, output in enumerate(returned):
            check_output(output, f"{contract}; element {position}")
        ids = batch.request_ids
        rows = sum(params.num_images_per_prompt or 1 for params in batch.sampling_params_list)
        return cls(dict(zip(ids, returned, strict=True)), stepped=ids, denoised=ids, rows=rows)

    def __getitem__(self, request_id: str) -> DiffusionOutput:
        return self._outputs[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)


def check_output(output: object, where: str) -> np.ndarray[Any, Any] | None:
    """The pixels of what a class of somebody's own returned for a request; None if it is an error.

    Raises:
        PipelineOutputError: it is no DiffusionOutput, or not one as its documentation says; begins with `where`.
    """
    if not isinstance(output, DiffusionOutput):
        raise PipelineOutputError(f"{where} is {type(output).__name__}")
    if (output.output is None) == (output.error is None):
        raise PipelineOutputError(f"{where} has {'both' if output.error else 'neither'} of output and error")
    pixels = output.output
    if pixels is None:
        return None
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
        raise PipelineOutputError(f"{where}: output must be a UINT8 numpy array, not {type(pixels).__name__}")
    if pixels.ndim not in (4, 5) or pixels.shape[-1] != 3:
        raise PipelineOutputError(
            f"{where}: output must be images [n, H, W, 3] or videos [n, F, H, W, 3], not {list(pixels.shape)}"
        )
    return pixels
