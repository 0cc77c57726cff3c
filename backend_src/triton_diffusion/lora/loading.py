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
from triton_diffusion.lora.device_cache import move, num_bytes
from triton_diffusion.lora.files import LOW_NOISE, LoraFiles
from triton_diffusion.lora.loras import Loras
from triton_diffusion.lora.row_lora_layer import Factors
from triton_diffusion.lora.row_loras import RowLoras
from triton_diffusion.lora.wave_loras import WaveLoras

logger = logging.getLogger(__name__)

MEGABYTE = 2**20

DIFFUSERS_LOGGERS = ("loaders.lora_base", "loaders.lora_pipeline", "loaders.peft", "utils.peft_utils")
"""The modules of diffusers that say something about an adapter while they load it."""


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
        raise ConfigurationError(f"LoRA adapters: {type(pipeline).__name__} takes none")
    # Names of our own: peft names modules by them, and those may not hold a dot.
    adapters = {entry.name: f"lora_{number}" for number, entry in enumerate(files)}
    parameters = {entry.name: _load(pipeline, entry, adapters[entry.name]) for entry in files}
    for component in _components(pipeline):
        component.eval()  # the adapters' layers begin in training mode, in which some drop inputs at random
    logger.info(
        "LoRA adapters: %s (%.1f MB, of which at most %d MB stay on the device); %s",
        ", ".join(adapters),
        sum(map(num_bytes, parameters.values())) / MEGABYTE,
        config.lora_memory_mb,
        "each row of a wave has its own" if config.lora_mixed else "the rows of a wave have the same",
    )

    budget = config.lora_memory_mb * MEGABYTE
    encoders = [component for component in _components(pipeline) if isinstance(component, PreTrainedModel)]
    in_encoders = [name for name, adapter in adapters.items() if any(_weights(each, adapter) for each in encoders)]
    if not config.lora_mixed:
        return WaveLoras(pipeline, adapters, parameters, budget, in_encoders)
    layers = _layers_without_peft(pipeline, adapters)
    device = pipeline._execution_device
    for encoder in encoders:
        for adapter in adapters.values():
            move(_weights(encoder, adapter), device)
    return RowLoras(adapters, layers, encoders, device, budget, in_encoders, config.batch_invariant)


def _components(pipeline: Any) -> list[Any]:
    """The components that an adapter may change."""
    components = (getattr(pipeline, name, None) for name in pipeline._lora_loadable_modules)
    return [component for component in components if component is not None]


def _weights(component: torch.nn.Module, adapter: str) -> list[torch.nn.Parameter]:
    """What an adapter has in a component."""
    return [parameter for name, parameter in component.named_parameters() if adapter in name.split(".")]


def _load(pipeline: Any, entry: LoraFiles, adapter: str) -> list[torch.nn.Parameter]:
    """One adapter's weights, checked and on the CPU."""
    before = _base_shapes(pipeline)
    try:
        with _said_of(entry):
            for file in entry.weights or (None,):
                _load_file(pipeline, entry.source, file, adapter)
    except Exception as error:  # whatever a file of somebody else's makes of it
        reason = _first_line(error)
        raise ConfigurationError(f"lora {entry} cannot be loaded into {type(pipeline).__name__}: {reason}") from error
    weights = [weight for component in _components(pipeline) for weight in _weights(component, adapter)]
    if not weights:
        raise ConfigurationError(
            f"lora {entry} changes no layer of {type(pipeline).__name__}: it was made for another pipeline"
        )
    if not all(bool(torch.isfinite(weight).all()) for weight in weights):
        raise ConfigurationError(f"lora {entry} holds NaN or infinity")
    if _base_shapes(pipeline) != before or getattr(pipeline, "_transformer_norm_layers", None):
        raise ConfigurationError(
            f"lora {entry} replaces weights of the model itself, also for requests that do not ask for it"
        )
    move(weights, "cpu")
    return weights


def _load_file(pipeline: Any, source: str, file: str | None, adapter: str) -> None:
    # Never without use_safetensors: diffusers reads pickles too, where it is not insisted on.
    arguments: dict[str, Any] = {"weight_name": file, "adapter_name": adapter, "use_safetensors": True}
    if LOW_NOISE in (file or "") and getattr(pipeline, "transformer_2", None) is not None:
        arguments["load_into_transformer_2"] = True
    pipeline.load_lora_weights(source, **arguments)


@contextmanager
def _said_of(entry: LoraFiles) -> Iterator[None]:
    """What diffusers says while it loads an adapter, with the name of the adapter, and only what is worth saying."""

    def say(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if record.levelno >= logging.WARNING and not message.startswith("No LoRA keys associated"):
            logger.warning("lora %s: %s", entry, message)
        return False

    loggers = [logging.getLogger(f"diffusers.{name}") for name in DIFFUSERS_LOGGERS]
    for each in loggers:
        each.addFilter(say)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            yield
    finally:
        for each in loggers:
            each.removeFilter(say)


def _base_shapes(pipeline: Any) -> list[torch.Size]:
    """The shapes of the weights that are no adapter's."""
    return [
        parameter.shape
        for component in _components(pipeline)
        for name, parameter in component.named_parameters()
        if ".lora_" not in name
    ]


def _layers_without_peft(
    pipeline: Any, adapters: Mapping[str, str]
) -> list[tuple[torch.nn.Module, dict[str, Factors]]]:
    """The layers of the transformers that an adapter changes, with the adapters' factors, on the CPU.

    Takes peft's own layers, which every request would pay for, away.

    Raises:
        ConfigurationError: rows cannot have different adapters of that kind.
    """
    layers = []
    for transformer in _components(pipeline):
        if isinstance(transformer, PreTrainedModel):
            continue
        for layer in transformer.modules():
            if isinstance(layer, BaseTunerLayer):
                layers.append((layer.get_base_layer(), _factors(layer, adapters)))
        transformer.unload_lora()
    return layers


def _factors(layer: Any, adapters: Mapping[str, str]) -> dict[str, Factors]:
    factors = {}
    for name, adapter in adapters.items():
        if (obstacle := _obstacle(layer, adapter)) is not None:
            raise ConfigurationError(f"lora {name!r} {obstacle}: set lora_mixed to false to serve it")
        if adapter in layer.lora_A:
            down, up = (matrices[adapter].weight.detach() for matrices in (layer.lora_A, layer.lora_B))
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
