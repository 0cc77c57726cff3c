"""Requests for tests, and what the stock pipeline makes of each of them alone: the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams

PROMPTS = (
    "a cat",
    "a very long and detailed prompt about mountains, rivers, trees and clouds in the style of an oil painting",
    "an astronaut riding a horse on mars",
    "dog",
    "a dog running in the park at sunset",
    "x",
    "a blue square on a red background",
    "a photo of a cat sitting on a mat with a hat",
)
NEGATIVE_PROMPTS = ("bad quality, blurry", None, "low resolution", "", "text", None, "watermark", "bad")
STEPS = (6, 4, 8, 5, 3, 7, 4, 6)
GUIDANCE_SCALES = (5.0, 7.3, 1.0, 2.6, 9.1, 4.0, 0.0, 3.3)
IMAGES = (1, 2, 1, 1, 3, 1, 1, 2)

_numbers = itertools.count()


def mixed_requests(count: int, **common: Any) -> list[OmniDiffusionRequest]:
    """Requests of one key that differ in everything that may differ."""
    size = {"height": 32, "width": 32, "max_sequence_length": 32, **common}
    return [
        OmniDiffusionRequest(
            prompt=PROMPTS[number],
            negative_prompt=NEGATIVE_PROMPTS[number],
            request_id=f"test-{next(_numbers)}",
            sampling_params=SamplingParams(
                **{
                    "seed": number * 10,
                    "num_inference_steps": STEPS[number],
                    "guidance_scale": GUIDANCE_SCALES[number],
                    "num_images_per_prompt": IMAGES[number],
                    **size,
                }
            ),
        )
        for number in range(count)
    ]


def stock_call(pipeline: Any, request: OmniDiffusionRequest, output_type: str) -> Any:
    """The stock pipeline's own result for one request alone."""
    params = request.sampling_params
    return pipeline(
        request.prompt,
        negative_prompt=request.negative_prompt,
        generator=[torch.Generator().manual_seed(seed) for seed in params.row_seeds()],
        output_type=output_type,
        **{name: value for name, value in params.given().items() if name not in ("seed", "output_format")},
    ).images
