"""Any other diffusers pipeline: one request at a time through its stock call."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
import PIL.Image
import torch

from triton_diffusion.adapters.adapter import PipelineAdapter, to_uint8
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.errors import FieldValueError, InvalidRequestError, NonFiniteError, PipelineOutputError
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams

OUR_OWN = ("num_images_per_prompt",)
"""Arguments that the adapter itself takes care of: some pipelines mis-pair the rows of several images."""

CALLBACKS = ("callback_on_step_end", "callback")
"""Arguments for what is called after each denoising step; a pipeline has one of them, or none."""


class StockAdapter(PipelineAdapter):
    """Calls the pipeline once for each image, so that image i is what the call gives for seed + i."""

    @property
    def raw_output(self) -> str | None:
        # A pipeline that makes videos may have another name for their number of frames.
        return "videos" if "num_frames" in self.taken else None

    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        return [self._call(request) for request in batch]

    def _call(self, request: OmniDiffusionRequest) -> DiffusionOutput:
        arguments = self._arguments(request)
        steps = 0

        def between_steps(*event: Any) -> Any:
            """Told (pipeline, step, timestep, tensors), or by older pipelines (step, timestep, latents)."""
            nonlocal steps
            step, _, tensors = event[-3:]
            steps = step + 1
            request.raise_if_stopped()
            return tensors

        for callback in CALLBACKS:
            if callback in self.call_arguments:
                arguments[callback] = between_steps
                break
        rows = []
        for seed in request.sampling_params.row_seeds():
            request.raise_if_stopped()
            if "seed" in self.taken:
                arguments["generator"] = torch.Generator().manual_seed(seed)
            try:
                result = self.pipeline(**arguments)
            except ValueError as error:
                if _was_raised_in("check_inputs", error):
                    raise InvalidRequestError(f"{self.name}: {error}") from error
                raise
            rows.append(self._pixels(result, request.sampling_params))
        return DiffusionOutput(output=np.concatenate(rows), num_inference_steps=steps)

    def _arguments(self, request: OmniDiffusionRequest) -> dict[str, Any]:
        """The arguments of the pipeline's call for one image of the request, without its generator."""
        given: dict[str, Any] = {**request.sampling_params.given(), "prompt": request.prompt}
        if request.negative_prompt is not None:
            given["negative_prompt"] = request.negative_prompt
        if request.image is not None:
            given["image"] = PIL.Image.fromarray(request.image)
        if "output_type" in self.call_arguments:
            given["output_type"] = "np"
        return {name: value for name, value in given.items() if name in self.call_arguments and name not in OUR_OWN}

    def _pixels(self, result: Any, params: SamplingParams) -> np.ndarray[Any, Any]:
        """The pictures or videos of a pipeline's output: [1, H, W, 3] or [1, F, H, W, 3]."""
        pixels = np.asarray(next((result[name] for name in ("images", "frames") if name in result), None))
        if pixels.dtype.kind != "f" or pixels.ndim not in (4, 5) or pixels.shape[-1] != 3:
            raise PipelineOutputError(f"{self.name} returned {type(result).__name__}, which holds no images or frames")
        if not np.isfinite(pixels).all():
            raise NonFiniteError("the picture is not finite (NaN or infinity); try another guidance_scale or dtype")
        sizes = zip(("width", "height", "num_frames"), pixels.shape[-2:0:-1], strict=False)  # an image has no frames
        for name, made in sizes:
            wanted = getattr(params, name)
            if wanted is not None and wanted != made:
                raise FieldValueError(f"{name}={wanted}: {self.name} makes {made} of it; ask for a size that it makes")
        return to_uint8(pixels)


def _was_raised_in(function: str, error: BaseException) -> bool:
    """Whether a function of that name raised the error; diffusers' `check_inputs` is for wrong arguments."""
    return any(frame.name == function for frame in traceback.extract_tb(error.__traceback__))
