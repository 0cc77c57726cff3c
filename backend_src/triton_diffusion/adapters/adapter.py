"""The contract between the engine and a pipeline."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError, FieldValueError, InvalidRequestError
from triton_diffusion.lora import Loras, LoraSelection
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.request import FIELDS, OmniDiffusionRequest
from triton_diffusion.sampling_params import SAMPLING_FIELDS, SamplingParams
from triton_diffusion.sampling_params_key import STRICT_FIELDS, SamplingParamsKey

LATENT_SHAPE: Mapping[str, str] = dict.fromkeys(("height", "width"), "a pass has latents of one shape")
PADDED_TEXT: Mapping[str, str] = {
    "max_sequence_length": "the text is padded to it and the padding is attended to, so it changes the picture"
}


class PipelineAdapter(ABC):
    """Drives one stock diffusers pipeline object, from one thread.

    Args:
        pipeline: the diffusers pipeline, on its device.
        config: of the served model.
    """

    supports_request_batch: ClassVar[bool] = False
    """`forward` accepts a batch of several requests."""

    supports_step_execution: ClassVar[bool] = False
    """The class has the four step methods of `StepwiseAdapter`."""

    key_fields: ClassVar[Mapping[str, str]] = {}
    """The sampling parameters that one forward pass cannot vary from row to row, each with the reason."""

    def __init__(self, pipeline: Any, config: EngineConfig) -> None:
        self.pipeline = pipeline
        self.config = config
        self.loras = Loras()
        arguments = self.call_arguments = inspect.signature(type(pipeline).__call__).parameters
        self.taken = frozenset(
            name for name, declared in FIELDS.items() if not declared.argument or declared.argument in arguments
        )
        """The names of the fields that the pipeline takes: those that its call has an argument for."""
        own: dict[str, Any] = {
            name: arguments[declared.argument].default
            for name, declared in SAMPLING_FIELDS.items()
            if name in self.taken and declared.argument and name != "seed"
        }
        own = {name: value for name, value in own.items() if isinstance(value, (int, float))}
        for name in config.default_sampling_params.given():
            if name not in self.taken:
                raise ConfigurationError(f"default_sampling_params: {name} is not taken by {self.name}")
        own["num_images_per_prompt"] = 1
        self.defaults = config.default_sampling_params.with_defaults(self.complete(SamplingParams.parse(own)))
        """The sampling parameters of a request that gives none."""

    @property
    def raw_output(self) -> str | None:
        """The output that holds the raw pixels: `images` or `videos`; None if that shows only in what is made."""
        return "videos" if "num_frames" in self.taken else "images"

    @property
    def name(self) -> str:
        """The name of the pipeline class."""
        return type(self.pipeline).__name__

    def complete(self, defaults: SamplingParams) -> SamplingParams:
        """The defaults of the pipeline's call, with what the call itself computes when it is given None."""
        return defaults

    def key(self, request: OmniDiffusionRequest) -> SamplingParamsKey:
        """Requests of equal keys may share a forward pass."""
        fields = STRICT_FIELDS if self.config.strict_batch_key else self.key_fields
        key = SamplingParamsKey.of(request.sampling_params, fields)
        return key.extended(lora=self.loras.key(LoraSelection.of(request.sampling_params)))

    def check_request(self, request: OmniDiffusionRequest) -> None:
        """Refuse what the pipeline would refuse, or do wrong without a word, before the request waits for its turn.

        Raises:
            InvalidRequestError: naming the field, the value and the remedy.
        """
        self.loras.check(request.sampling_params, self.defaults)
        params = request.sampling_params
        if params.num_pixels > self.config.max_pixels:
            raise FieldValueError(
                f"height={params.height} width={params.width}: too many pixels, at most {self.config.max_pixels} "
                "(max_pixels in config.pbtxt)"
            )

    @abstractmethod
    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Every denoising step of every request; one output for each request, in order."""


def check_size(params: SamplingParams, multiple: int, largest: int | None = None) -> None:
    """
    Args:
        multiple: of pixels that height and width must be; stock pipelines that round down silently are not followed.
        largest: pixels a side.

    Raises:
        FieldValueError: naming the nearest sizes that are right.
    """
    for name, size in (("height", params.height), ("width", params.width)):
        if size is None:
            continue
        if size % multiple:
            below, above = size - size % multiple, size - size % multiple + multiple
            nearest = f"{below} or {above}" if below else f"{above}"
            raise FieldValueError(f"{name}={size}: must be a multiple of {multiple}; the nearest is {nearest}")
        if largest is not None and size > largest:
            raise FieldValueError(f"{name}={size}: this model makes pictures of at most {largest} pixels a side")


def required_image(request: OmniDiffusionRequest, pipeline: str) -> np.ndarray[Any, Any]:
    """The input image of a request: UINT8 [height, width, 3].

    Raises:
        InvalidRequestError: the request of an image-conditioned pipeline has no image.
    """
    if request.image is None:
        raise InvalidRequestError(f"image is missing: {pipeline} needs one, as UINT8 [height, width, 3]")
    return request.image


def check_most(name: str, value: float | None, most: float) -> None:
    """
    Raises:
        FieldValueError: the value is above what this pipeline takes.
    """
    if value is not None and value > most:
        raise FieldValueError(f"{name}={value}: must be at most {most} for this pipeline")


def to_uint8(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pixels in [0, 1] as UINT8, rounded as diffusers' own conversion to PIL rounds."""
    converted: np.ndarray[Any, Any] = (pixels * 255).round().astype(np.uint8)
    return converted
