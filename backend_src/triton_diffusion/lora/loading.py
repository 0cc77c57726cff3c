"""Reads and checks the LoRA adapters of a served model, once, when it is loaded."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError
from triton_diffusion.lora.files import LoraFiles
from triton_diffusion.lora.loras import Loras
from triton_diffusion.lora.row_lora_layer import Factors
from triton_diffusion.lora.row_loras import RowLoras
from triton_diffusion.lora.wave_loras import WaveLoras

logger = logging.getLogger(__name__)

MEGABYTE = 2**20


def load_loras(pipeline: Any, files: Sequence[LoraFiles], config: EngineConfig) -> Loras:
    """Adapters, loaded into a pipeline; none of them is active.

    Raises:
        ConfigurationError: an adapter cannot be read, or does not fit the pipeline; names it.
    """
    if not files:
        if config.lora_directory:
            logger.warning("lora_directory: there is no adapter in %s", config.lora_directory)
        return Loras()
    if not hasattr(pipeline, "load_lora_weights"):
        raise ConfigurationError(f"lora_directory: {type(pipeline).__name__} takes no LoRA adapters")
    # Names of our own: peft names modules by them, and those may not hold a dot.
    adapters = {entry.name: f"lora_{number}" for number, entry in enumerate(files)}
    for entry in files:
        _load(pipeline, entry, adapters[entry.name])

    sizes = {name: _num_bytes(pipeline, adapter) for name, adapter in adapters.items()}
    in_text_encoders = [
        name for name, adapter in adapters.items() if any(_binds(encoder, adapter) for encoder in encoders(pipeline))
    ]
    budget = config.lora_memory_mb * MEGABYTE
    logger.info(
        "LoRA adapters: %s (%.1f MB, of which at most %d MB stay on the device); %s",
        ", ".join(adapters),
        sum(sizes.values()) / MEGABYTE,
        config.lora_memory_mb,
        "each row of a wave has its own" if config.lora_mixed else "the rows of a wave have the same",
    )
    if not config.lora_mixed:
        return WaveLoras(pipeline, adapters, sizes, budget, in_text_encoders)
    return RowLoras(
        adapters,
        _row_layers(pipeline, adapters),
        encoders(pipeline),
        pipeline._execution_device,
        sizes,
        budget,
        in_text_encoders,
        config.batch_invariant,
    )


def encoders(pipeline: Any) -> list[Any]:
    """The text encoders that an adapter may change."""
    return [component for component in _components(pipeline) if isinstance(component, PreTrainedModel)]


def _components(pipeline: Any) -> list[Any]:
    """The components that an adapter may change."""
    components = (getattr(pipeline, name, None) for name in pipeline._lora_loadable_modules)
    return [component for component in components if component is not None]


def _layers(component: torch.nn.Module) -> list[BaseTunerLayer]:
    return [module for module in component.modules() if isinstance(module, BaseTunerLayer)]


def _parameters(component: torch.nn.Module, adapter: str) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in component.named_parameters() if adapter in name.split(".")]


def _binds(component: torch.nn.Module, adapter: str) -> bool:
    return bool(_parameters(component, adapter))


def _num_bytes(pipeline: Any, adapter: str) -> int:
    return sum(
        parameter.numel() * parameter.element_size()
        for component in _components(pipeline)
        for parameter in _parameters(component, adapter)
    )


def _load(pipeline: Any, entry: LoraFiles, adapter: str) -> None:
    before = _base_shapes(pipeline)
    try:
        with _without_chatter():
            _load_weights(pipeline, entry, adapter)
    except Exception as error:  # whatever a file of somebody else's makes of it
        reason = _first_line(error)
        raise ConfigurationError(f"lora {entry} does not fit {type(pipeline).__name__}: {reason}") from error
    parameters = [each for component in _components(pipeline) for each in _parameters(component, adapter)]
    if not parameters:
        raise ConfigurationError(
            f"lora {entry} changes no layer of {type(pipeline).__name__}: it was made for another pipeline"
        )
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
        raise ConfigurationError(f"lora {entry} holds NaN or infinity")
    if _base_shapes(pipeline) != before or getattr(pipeline, "_transformer_norm_layers", None):
        raise ConfigurationError(
            f"lora {entry} replaces weights of the model itself, also for requests that do not ask for it"
        )


def _load_weights(pipeline: Any, entry: LoraFiles, adapter: str) -> None:
    # Never without use_safetensors: diffusers reads pickles too, where it is not insisted on.
    arguments = {"adapter_name": adapter, "use_safetensors": True}
    first, *second = entry.weights or (None,)
    pipeline.load_lora_weights(entry.source, weight_name=first, **arguments)
    for weights in second:
        pipeline.load_lora_weights(entry.source, weight_name=weights, load_into_transformer_2=True, **arguments)


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Without what diffusers and peft say of every adapter that changes some components and not all."""

    def is_worth_saying(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("No LoRA keys associated")

    loggers = [logging.getLogger(f"diffusers.loaders.{name}") for name in ("lora_base", "peft")]
    for each in loggers:
        each.addFilter(is_worth_saying)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            yield
    finally:
        for each in loggers:
            each.removeFilter(is_worth_saying)


def _base_shapes(pipeline: Any) -> list[torch.Size]:
    """The shapes of the weights that are no adapter's."""
    return [
        parameter.shape
        for component in _components(pipeline)
        for name, parameter in component.named_parameters()
        if ".lora_" not in name
    ]


def _row_layers(pipeline: Any, adapters: Mapping[str, str]) -> list[tuple[torch.nn.Module, dict[str, Factors]]]:
    """The layers of the transformers that an adapter changes, with the adapters' factors, on the CPU.

    peft's own layers, which each request would pay for, are taken away.

    Raises:
        ConfigurationError: rows cannot have different adapters of that kind.
    """
    layers = []
    for transformer in _components(pipeline):
        if isinstance(transformer, PreTrainedModel):
            continue
        for layer in _layers(transformer):
            layers.append((layer.get_base_layer(), _factors(layer, adapters)))
        transformer.unload_lora()
    return layers


def _factors(layer: Any, adapters: Mapping[str, str]) -> dict[str, Factors]:
    factors = {}
    for name, adapter in adapters.items():
        if (obstacle := _obstacle(layer, adapter)) is not None:
            raise ConfigurationError(f"lora {name!r} {obstacle}: set lora_mixed to false to serve it")
        if adapter in layer.lora_A:
            down, up = (matrices[adapter].weight.detach().cpu() for matrices in (layer.lora_A, layer.lora_B))
            factors[name] = Factors(down, up.T, layer.scaling[adapter])
    return factors


def _obstacle(layer: Any, adapter: str) -> str | None:
    """Why a layer's rows cannot have an adapter each; None if they can."""
    if not isinstance(layer, LoraLayer):
        return "is no LoRA, but another kind of adapter"
    if adapter not in layer.lora_A:
        return None
    if not isinstance(layer, Linear):
        return f"changes a layer that is not linear ({type(layer.get_base_layer()).__name__})"
    if adapter in layer.lora_variant or layer.lora_B[adapter].bias is not None:
        return "is more than a product of two matrices (DoRA, or with a bias)"
    return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
