"""A stage of vLLM-Omni's `stage_args`, as the options of a served model.

What vLLM-Omni's files say beside the model's options is mapped where there is the same here, allowed where it says
what is so here anyway, and refused with what to write instead where it is not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from triton_diffusion.deployment.model_options import MODEL, MODEL_OPTIONS, Warn
from triton_diffusion.errors import ConfigurationError, did_you_mean

ANYTHING: tuple[object, ...] = ()


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A key of vLLM-Omni that is no option here.

    Args:
        allowed: the values that change nothing here; `ANYTHING`: all of them.
        remedy: what to write instead of another value.
        entries: the values of the entries of a map that change nothing here.
    """

    allowed: tuple[object, ...]
    remedy: str = ""
    entries: tuple[object, ...] = ()

    def allows(self, value: object) -> bool:
        if isinstance(value, dict) and self.entries:
            return all(_is_among(entry, self.entries) for entry in value.values())
        return self.allowed == ANYTHING or _is_among(value, self.allowed)


DIFFUSION_ONLY = "this server runs stages of stage_type diffusion only"
ONE_STAGE = "this server runs one diffusion stage, from a prompt to a picture"
NO_SPLIT = "a model is not split over GPUs here; gpus puts an engine of its own on each"

STAGE_KEYS: dict[str, Foreign] = {
    "stage_id": Foreign(ANYTHING),
    "stage_type": Foreign(("diffusion",), DIFFUSION_ONLY),
    "final_output": Foreign((True,), ONE_STAGE),
    "final_output_type": Foreign(("image", "video"), "the output is images, or videos of a video pipeline"),
    "is_comprehension": Foreign((False,), ONE_STAGE),
    "engine_input_source": Foreign(([], None), ONE_STAGE),
    "input_sources": Foreign(([], None), ONE_STAGE),
    "custom_process_input_func": Foreign((None,), ONE_STAGE),
    "input_connectors": Foreign((None, {}), ONE_STAGE),
    "output_connectors": Foreign((None, {}), ONE_STAGE),
}
"""Keys of a stage, beside engine_args, runtime and default_sampling_params."""

RUNTIME_KEYS: dict[str, Foreign] = {
    "process": Foreign(ANYTHING),
    "requires_multimodal_data": Foreign(ANYTHING),
    "max_batch_size": Foreign((1,), "the most requests of a wave are engine_args.max_num_seqs, and nothing else"),
    "env": Foreign((None, {}), "set the variables in the environment of the server"),
}
"""Keys of a stage's runtime, beside devices and num_replicas."""

ENGINE_KEYS: dict[str, Foreign] = {
    "model_stage": Foreign(("diffusion", "dit"), ONE_STAGE),
    "engine_output_type": Foreign(("image", "video", None), "the output is images, or videos of a video pipeline"),
    "model_class_name": Foreign((None,), "model_index.json names the class; pipeline_class names one of your own"),
    "model_arch": Foreign((None,), "model_index.json names the class; pipeline_class names one of your own"),
    "enforce_eager": Foreign((True,), "compile by pipeline_calls: {transformer.compile_repeated_blocks: {}}"),
    "distributed_executor_backend": Foreign(("uni", "mp", None), "an engine is one process here"),
    "trust_remote_code": Foreign((False,), "write from_pretrained: {trust_remote_code: true}"),
    "revision": Foreign((None,), "write from_pretrained: {revision: …}"),
    "quantization": Foreign((None,), "write from_pretrained: {quantization_config: …}"),
    "quantization_config": Foreign((None,), "write from_pretrained: {quantization_config: …}"),
    "gpu_memory_utilization": Foreign((None,), "there is no key-value cache to reserve memory for; remove it"),
    "tensor_parallel_size": Foreign((1, None), NO_SPLIT),
    "pipeline_parallel_size": Foreign((1, None), NO_SPLIT),
    "data_parallel_size": Foreign((1, None), "write instances, or gpus"),
    "num_gpus": Foreign((1, None), NO_SPLIT),
    "parallel_config": Foreign((None, {}), NO_SPLIT, entries=(1, -1, False, None)),
    "vae_use_slicing": Foreign((True,), "images are decoded one by one; decode_batch_size says how many at once"),
    "vae_use_tiling": Foreign((False,), "write pipeline_calls: {vae.enable_tiling: {}}"),
    "enable_cpu_offload": Foreign((False,), "write pipeline_calls: {enable_model_cpu_offload: {}}"),
    "cache_backend": Foreign((None, "none"), "a cache would mix the requests of a wave; remove it"),
    "lora_path": Foreign((None,), "write lora_directory"),
    "enable_prefix_caching": Foreign((False, None), "there is no key-value cache here; remove it"),
}
"""Keys of a stage's engine_args, beside the model's options."""


def options_of_stage(stage: Mapping[str, Any], place: str, warn: Warn) -> dict[str, Any]:
    """The options of a model, as plain values.

    Args:
        place: where the stage is, for the messages.

    Raises:
        ConfigurationError: naming the key, its value and the remedy.
    """
    rest = dict(stage)
    if "stage_type" not in rest:
        raise ConfigurationError(f"{place}stage_type: is missing; {DIFFUSION_ONLY}")
    _check_foreign({"stage_type": rest["stage_type"]}, STAGE_KEYS, place)  # the reason, before what else is strange
    engine = _map(rest.pop("engine_args", {}), f"{place}engine_args")
    runtime = _map(rest.pop("runtime", {}), f"{place}runtime")
    options = {name: value for name, value in engine.items() if name == MODEL.name or name in MODEL_OPTIONS}
    _take(options, "default_sampling_params", rest, "default_sampling_params", f"{place}default_sampling_params")
    _take(options, "gpus", runtime, "devices", f"{place}runtime.devices")
    _take(options, "instances", runtime, "num_replicas", f"{place}runtime.num_replicas")
    _check_foreign(rest, STAGE_KEYS, place, ("engine_args", "runtime", "default_sampling_params"))
    _check_foreign(runtime, RUNTIME_KEYS, f"{place}runtime.", ("devices", "num_replicas"))
    others = {name: value for name, value in engine.items() if name not in options}
    _check_foreign(others, ENGINE_KEYS, f"{place}engine_args.", (MODEL.name, *MODEL_OPTIONS))
    if runtime.get("max_batch_size") is not None:
        warn(f"{place}runtime.max_batch_size: has no effect; the most requests of a wave are engine_args.max_num_seqs")
    return options


def _take(options: dict[str, Any], name: str, source: dict[str, Any], key: str, place: str) -> None:
    if key in source:
        if name in options:
            raise ConfigurationError(f"{place}: engine_args.{name} says it too; remove one of the two")
        options[name] = source.pop(key)


def _map(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"{place}: must be a map of its keys, not {json.dumps(value, default=str)}; remove it if it has none"
        )
    return dict(value)


def _check_foreign(
    values: Mapping[str, Any], known: Mapping[str, Foreign], place: str, own: tuple[str, ...] = ()
) -> None:
    for name, value in values.items():
        if name not in known:
            raise ConfigurationError(f"{place}{name}: unknown key{did_you_mean(str(name), [*own, *known])}")
        if not known[name].allows(value):
            raise ConfigurationError(f"{place}{name}={value}: {known[name].remedy}")


def _is_among(value: object, values: tuple[object, ...]) -> bool:
    """Python thinks that 1 is true."""
    return any(value == one and type(value) is type(one) for one in values)
