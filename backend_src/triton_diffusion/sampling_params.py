"""How one picture or video is to be made: the sampling parameters of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from triton_diffusion.errors import UnknownFieldError, did_you_mean
from triton_diffusion.field import Field, Value, field, fields_of

SEEDS = 2**63
"""Seeds are 0 to SEEDS - 1; counting up from the last one starts at 0 again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request, by diffusers' names. None means the model's default."""

    seed: int | None = field(
        "Seed of the first image's noise; image i of a request uses seed + i. Default: random, and reported.",
        minimum=0,
        maximum=SEEDS - 1,
        wide=True,
        argument="generator",
    )
    height: int | None = field("Height in pixels.", minimum=1, maximum=16384, argument="height", in_strict_key=True)
    width: int | None = field("Width in pixels.", minimum=1, maximum=16384, argument="width", in_strict_key=True)
    num_frames: int | None = field(
        "Frames of a video.", minimum=1, maximum=4096, argument="num_frames", in_strict_key=True
    )
    num_inference_steps: int | None = field(
        "Denoising steps.", minimum=1, maximum=1000, argument="num_inference_steps", in_strict_key=True
    )
    guidance_scale: float | None = field(
        "Guidance scale; classifier-free guidance is on above 1.",
        minimum=0,
        maximum=100,
        argument="guidance_scale",
        in_strict_key=True,
    )
    guidance_scale_2: float | None = field(
        "Guidance scale of Wan 2.2's second transformer. Default: guidance_scale.",
        minimum=0,
        maximum=100,
        argument="guidance_scale_2",
        in_strict_key=True,
    )
    true_cfg_scale: float | None = field(
        "Classifier-free guidance scale of guidance-distilled models (Qwen-Image, Flux).",
        minimum=0,
        maximum=100,
        argument="true_cfg_scale",
        in_strict_key=True,
    )
    strength: float | None = field(
        "How far an input image is changed, from 0 (kept) to 1 (ignored).",
        minimum=0,
        maximum=1,
        argument="strength",
        in_strict_key=True,
    )
    num_images_per_prompt: int | None = field("Images of one request.", minimum=1, maximum=64, in_strict_key=True)
    max_sequence_length: int | None = field(
        "Text tokens that the prompt is padded or cut to; it changes the picture.",
        minimum=1,
        maximum=4096,
        argument="max_sequence_length",
        in_strict_key=True,
    )
    lora: str | None = field(
        "LoRA adapters by name, each with a scale or without one: `ink` or `ink:0.8,night:0.3`. Empty: none.",
        maximum=1000,
        in_strict_key=True,
    )
    lora_scale: float | None = field(
        "Multiplies the scales of all adapters in lora. Default: 1.", minimum=-100, maximum=100, in_strict_key=True
    )
    output_format: str | None = field("File format of the generated_image output.", choices=("png", "jpeg", "webp"))

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> SamplingParams:
        """Checked parameters from plain values.

        Raises:
            UnknownFieldError, FieldTypeError, FieldValueError: naming the field, the value and the remedy.
        """
        for name in values:
            if name not in SAMPLING_FIELDS:
                raise UnknownFieldError(f"unknown sampling parameter {name!r}{did_you_mean(name, SAMPLING_FIELDS)}")
        return cls(**{name: SAMPLING_FIELDS[name].parse(value) for name, value in values.items()})

    def given(self) -> dict[str, Value]:
        """The parameters that are set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with those of `defaults` where none is given."""
        return dataclasses.replace(defaults, **self.given())  # type: ignore[arg-type]

    @property
    def num_pixels(self) -> int:
        """Height times width; a side that is not given counts as long as the other, and 0 if neither is."""
        return (self.height or self.width or 0) * (self.width or self.height or 0)

    def row_seeds(self) -> list[int]:
        """The seed of each image of the request.

        Raises:
            ValueError: the seed is not resolved yet.
        """
        if self.seed is None:
            raise ValueError("the request has no seed yet")
        return [(self.seed + row) % SEEDS for row in range(self.num_images_per_prompt or 1)]


SAMPLING_FIELDS: dict[str, Field] = {declared.name: declared for declared in fields_of(SamplingParams)}
"""The sampling parameters by name."""


Resolved = TypeVar("Resolved")


def resolved(value: Resolved | None) -> Resolved:
    """A parameter that has its default by now.

    Raises:
        ValueError: it has none.
    """
    if value is None:
        raise ValueError("a sampling parameter has no value, and the pipeline has no default for it")
    return value


def describe(values: Mapping[str, Any]) -> str:
    """`height=64 width=64`"""
    return " ".join(f"{name}={value}" for name, value in values.items())
