"""From `model` in config.pbtxt to a pipeline on its device, with the adapter that drives it."""

from __future__ import annotations

import logging
from typing import Any

import diffusers
import torch

from triton_diffusion.adapters.adapter import PipelineAdapter
from triton_diffusion.adapters.flux import FluxAdapter
from triton_diffusion.adapters.stable_diffusion import StableDiffusionAdapter, StableDiffusionXLAdapter
from triton_diffusion.adapters.stable_diffusion_3 import StableDiffusion3Adapter, StableDiffusion3Img2ImgAdapter
from triton_diffusion.adapters.stock import StockAdapter
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError

logger = logging.getLogger(__name__)

ADAPTERS: dict[str, type[PipelineAdapter]] = {
    "FluxPipeline": FluxAdapter,
    "StableDiffusion3Img2ImgPipeline": StableDiffusion3Img2ImgAdapter,
    "StableDiffusion3Pipeline": StableDiffusion3Adapter,
    "StableDiffusionPipeline": StableDiffusionAdapter,
    "StableDiffusionXLPipeline": StableDiffusionXLAdapter,
}
"""The adapter of a pipeline class, by the class name that model_index.json holds."""


def load_adapter(config: EngineConfig) -> PipelineAdapter:
    """The served pipeline, loaded and ready to run.

    Raises:
        ConfigurationError: the checkpoint or the device is not there, or does not fit.
    """
    device = resolve_device(config)
    dtype = resolve_dtype(config.dtype, device)
    try:
        arguments = {**absent_components(config.model), **config.from_pretrained}
        pipeline = diffusers.DiffusionPipeline.from_pretrained(config.model, dtype=dtype, **arguments)
        pipeline.to(device)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigurationError(f"model {config.model!r} cannot be loaded: {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    return adapter_for(pipeline, config)


def absent_components(model: str) -> dict[str, None]:
    """The components that model_index.json says are absent (Stable Diffusion 3 without T5), as arguments.

    `save_pretrained` writes them as null, and `from_pretrained` insists on being told.
    """
    index: dict[str, Any] = diffusers.DiffusionPipeline.load_config(model)
    return {name: None for name, component in index.items() if component in ([None, None], (None, None))}


def adapter_for(pipeline: Any, config: EngineConfig) -> PipelineAdapter:
    """The adapter for a pipeline object; `StockAdapter` where its class has none of its own."""
    adapter_class = ADAPTERS.get(type(pipeline).__name__, StockAdapter)
    if adapter_class is StockAdapter:
        logger.warning("%s has no adapter: its requests run one at a time", type(pipeline).__name__)
    return adapter_class(pipeline, config)


def resolve_device(config: EngineConfig) -> torch.device:
    """The device of `config`; `auto` takes the instance's GPU, else the current one, else the CPU."""
    if config.device != "auto":
        try:
            device = torch.device(config.device)
        except RuntimeError as error:
            raise ConfigurationError(f"config.pbtxt: parameter device={config.device!r}: {error}") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError(f"config.pbtxt: parameter device={config.device!r}: torch finds no GPU here")
        return device
    if config.kind == "CPU" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", config.device_id) if config.kind == "GPU" else torch.device("cuda")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype of `dtype`; `auto` is bfloat16 on a GPU and float32 on the CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    resolved: torch.dtype = getattr(torch, dtype)
    return resolved
