"""From `model` in config.pbtxt to a pipeline on its device, with the adapter that drives it."""

from __future__ import annotations

import importlib
import inspect
import logging
import operator
from collections.abc import Mapping
from typing import Any

import diffusers
import torch

from triton_diffusion.adapters.adapter import PipelineAdapter
from triton_diffusion.adapters.flux import FluxAdapter
from triton_diffusion.adapters.qwen_image import QwenImageAdapter
from triton_diffusion.adapters.qwen_image_edit import QwenImageEditAdapter
from triton_diffusion.adapters.stable_diffusion import StableDiffusionAdapter, StableDiffusionXLAdapter
from triton_diffusion.adapters.stable_diffusion_3 import StableDiffusion3Adapter, StableDiffusion3Img2ImgAdapter
from triton_diffusion.adapters.stepwise import StepwiseAdapter
from triton_diffusion.adapters.stock import StockAdapter
from triton_diffusion.adapters.wan import WanAdapter
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError, FieldValueError
from triton_diffusion.lora.files import find_loras
from triton_diffusion.lora.loading import load_loras

logger = logging.getLogger(__name__)

ADAPTERS: dict[str, type[PipelineAdapter]] = {
    "FluxPipeline": FluxAdapter,
    "QwenImageEditPipeline": QwenImageEditAdapter,
    "QwenImagePipeline": QwenImageAdapter,
    "StableDiffusion3Img2ImgPipeline": StableDiffusion3Img2ImgAdapter,
    "StableDiffusion3Pipeline": StableDiffusion3Adapter,
    "StableDiffusionPipeline": StableDiffusionAdapter,
    "StableDiffusionXLPipeline": StableDiffusionXLAdapter,
    "WanPipeline": WanAdapter,
}
"""The adapter of a pipeline class, by the class name that model_index.json holds."""


def load_adapter(config: EngineConfig) -> PipelineAdapter:
    """The served pipeline, loaded and ready to run.

    Raises:
        ConfigurationError: the checkpoint or the device is not there, or does not fit.
    """
    lora_files = find_loras(config.lora_directory, config.loras, config.directory)
    if lora_files:
        check_lora_switches(config)
    own_class = imported_class(config.pipeline_class)
    pipeline_class: Any = diffusers.DiffusionPipeline
    if isinstance(own_class, type) and issubclass(own_class, diffusers.DiffusionPipeline):
        pipeline_class, own_class = own_class, None
    device = resolve_device(config)
    dtype = resolve_dtype(config.dtype, device)
    try:
        arguments = {**absent_components(config.model), **config.from_pretrained}
        pipeline = pipeline_class.from_pretrained(config.model, dtype=dtype, **arguments)
        call_switches(pipeline, config.pipeline_calls)
        if not has_offloading(pipeline):
            pipeline.to(device)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigurationError(f"model {config.model!r} cannot be loaded: {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    adapter = own_class(pipeline, config) if own_class is not None else adapter_for(pipeline, config)
    check_switches(adapter, config)
    check_lora_mixed(adapter, config)
    adapter.loras = load_loras(pipeline, lora_files, config)
    try:
        adapter.loras.check(adapter.defaults, adapter.defaults)
    except FieldValueError as error:
        raise ConfigurationError(f"default_sampling_params: {error}") from None
    return adapter


def imported_class(path: str) -> type[PipelineAdapter] | None:
    """The class of `pipeline_class`: a PipelineAdapter or a DiffusionPipeline; None if there is none.

    Raises:
        ConfigurationError: it cannot be imported, or is neither.
    """
    if not path:
        return None
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"config.pbtxt: parameter pipeline_class={path!r}: {error}; write package.module:Class, importable from "
            "the folder of model.py or installed"
        ) from error
    if not (isinstance(found, type) and issubclass(found, (PipelineAdapter, diffusers.DiffusionPipeline))):
        raise ConfigurationError(
            f"config.pbtxt: parameter pipeline_class={path!r}: must be a subclass of PipelineAdapter, StepwiseAdapter "
            "or diffusers.DiffusionPipeline"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigurationError(f"config.pbtxt: parameter pipeline_class={path!r}: has no {missing}")
    return found


def call_switches(pipeline: Any, calls: Mapping[str, Any]) -> None:
    """Call methods of the pipeline or of its components, by dotted names, each with its arguments.

    Raises:
        ConfigurationError: there is no such method, or it does not take the arguments.
    """
    for path, arguments in calls.items():
        try:
            operator.attrgetter(path)(pipeline)(**{name: _constructed(value) for name, value in arguments.items()})
        except (AttributeError, TypeError, ValueError, ImportError) as error:
            raise ConfigurationError(f"config.pbtxt: parameter pipeline_calls: {path}: {error}") from error


def _constructed(value: Any) -> Any:
    """`{"class": "FirstBlockCacheConfig", "threshold": 0.1}` as an object of that class of diffusers."""
    if isinstance(value, dict) and "class" in value:
        arguments = {name: entry for name, entry in value.items() if name != "class"}
        return getattr(diffusers, value["class"])(**arguments)
    return value


def check_switches(adapter: PipelineAdapter, config: EngineConfig) -> None:
    """
    Raises:
        ConfigurationError: a switch that would mix the requests of a wave.
    """
    for path in config.pipeline_calls:
        if path.endswith("enable_cache") and isinstance(adapter, StepwiseAdapter):
            raise ConfigurationError(
                f"config.pbtxt: parameter pipeline_calls: {path}: a cache keeps a request's activations for its next "
                f"step, and requests that are fused would get each other's; {adapter.name} is fused, so leave it out"
            )


def check_lora_switches(config: EngineConfig) -> None:
    """
    Raises:
        ConfigurationError: a switch with which adapters would do nothing, or could not be loaded or compiled.
    """
    for path, arguments in config.pipeline_calls.items():
        name = path.rpartition(".")[2]
        reason = {
            "fuse_qkv_projections": "the layers that adapters change are no longer used",
            "enable_sequential_cpu_offload": "the weights that adapters are added to are not there between passes; "
            "enable_model_cpu_offload keeps them",
        }.get(name)
        if name.startswith("compile") and config.lora_mixed and arguments.get("fullgraph"):
            reason = "rows with different adapters need graph breaks: leave fullgraph out"
        if reason is not None:
            raise ConfigurationError(
                f"config.pbtxt: parameter pipeline_calls: {path}: cannot be used with LoRA adapters: {reason}"
            )


def check_lora_mixed(adapter: PipelineAdapter, config: EngineConfig) -> None:
    """
    Raises:
        ConfigurationError: rows of one pass cannot have different adapters where we do not run the pass.
    """
    if config.lora_mixed and not isinstance(adapter, StepwiseAdapter):
        raise ConfigurationError(
            f"config.pbtxt: parameter lora_mixed: {type(adapter).__name__} runs the model by itself, so that the rows "
            "of a wave have the same adapters: set it to false"
        )


def has_offloading(pipeline: Any) -> bool:
    """Whether a switch has put hooks on the components that move them to the device themselves."""
    return any(
        getattr(component, "_hf_hook", None) is not None
        for component in pipeline.components.values()
        if isinstance(component, torch.nn.Module)
    )


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
