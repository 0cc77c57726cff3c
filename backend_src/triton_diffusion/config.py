"""What config.pbtxt says about the engine. Capacity and wait are Triton's own fields; the rest are `parameters`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from triton_diffusion.errors import ConfigurationError, InvalidRequestError, did_you_mean
from triton_diffusion.paths import is_written_as_path, path_from
from triton_diffusion.sampling_params import SamplingParams

DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}


LARGEST = 2**31 - 1
"""Of the 32 bits of Triton's own fields."""


def _parameter(parse: Callable[[str], Any], default: Any, description: str) -> Any:
    return dataclasses.field(default=default, metadata={"parse": parse, "description": description})


def _map_parameter(parse: Callable[[str], dict[str, Any]], description: str) -> Any:
    """A parameter that is a JSON object, empty by default."""
    return dataclasses.field(default_factory=dict, metadata={"parse": parse, "description": description})


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise ValueError(f"must be one of {', '.join(DTYPES)}")
    return DTYPES[text]


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError("must be a whole number of at least 1")
    if number > LARGEST:
        raise ValueError(f"must be at most {LARGEST}")
    return number


def _device(text: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", text) is None:
        raise ValueError("must be auto, cpu, cuda, or cuda:1 for the second GPU")
    return text


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("must be true or false")
    return text == "true"


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def _string_map(text: str) -> dict[str, str]:
    value = _json_object(text)
    for name, entry in value.items():
        if not isinstance(entry, str):
            raise ValueError(f"{name!r} must be a string, not {json.dumps(entry)}")
    return value


def _sampling_params(text: str) -> SamplingParams:
    return _parsed_sampling_params(_json_object(text))


def _shapes(text: str) -> tuple[SamplingParams, ...]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be a JSON list of objects ({error})") from None
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError("must be a JSON list of objects")
    return tuple(map(_parsed_sampling_params, values))


def _parsed_sampling_params(values: Mapping[str, object]) -> SamplingParams:
    try:
        return SamplingParams.parse(values)
    except InvalidRequestError as error:
        raise ValueError(str(error)) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The configuration of one served model.

    Args:
        max_num_seqs: the most requests of one wave; `max_batch_size`.
        request_batch_max_wait_ms: what Triton waits for company; `max_queue_delay_microseconds` / 1000.
        kind, device_id: of the Triton instance; GPU puts it on that GPU, CPU on none.
        directory: the folder of model.py; relative paths are relative to it.
    """

    max_num_seqs: int = 1
    request_batch_max_wait_ms: float = 0.0
    kind: str = ""
    device_id: int = 0
    directory: Path = Path()

    model: str = _parameter(str, "", "A directory (begin it with ./ to mean the folder of model.py) or a hub id.")
    dtype: str = _parameter(_dtype, "auto", "float32, bfloat16, float16 or auto: bfloat16 on a GPU, else float32.")
    device: str = _parameter(
        _device, "auto", "cpu, cuda, cuda:1 … or auto: the instance's GPU, else any, else the CPU."
    )
    max_queue_size: int = _parameter(positive, 1024, "Requests that may wait; one more is refused as UNAVAILABLE.")
    max_pixels: int = _parameter(positive, 2048 * 2048, "The largest height times width of a request.")
    step_execution: bool = _parameter(
        _boolean, False, "Step-wise continuous batching: requests join and leave between denoising steps."
    )
    require_batching: bool = _parameter(
        _boolean, False, "Do not serve a pipeline that cannot be fused with a max_batch_size above 1."
    )
    warmup: bool = _parameter(
        _boolean, True, "Run a full wave before the model is ready, so that one that does not fit fails at once."
    )
    warmup_shapes: tuple[SamplingParams, ...] = _parameter(
        _shapes,
        (),
        "JSON list; sampling parameters of further waves of the warm-up, beside the default ones: "
        '`[{"height": 1024, "width": 1024}]`.',
    )
    batch_invariant: bool = _parameter(
        _boolean, False, "The same bits whoever shares the forward pass: every pass has the rows of a full one."
    )
    pipeline_class: str = _parameter(
        str, "", "package.module:Class of your own; see docs/your-own-class.md. Default: as model_index.json says."
    )
    pipeline_calls: dict[str, Any] = _map_parameter(
        _json_object,
        "JSON; diffusers' own switches: methods of the pipeline or of a component, by name, each "
        "with its arguments, called when it is loaded: "
        '`{"vae.enable_tiling": {}, "enable_model_cpu_offload": {}, "transformer.compile_repeated_blocks": {}}`.',
    )
    decode_batch_size: int = _parameter(
        positive, 1, "Images decoded at once; 1 needs the least memory, and gives the bits of an image alone."
    )
    lora_directory: str = _parameter(
        str, "", "Holds a folder or a .safetensors file for each LoRA adapter; begin it with ./ as model."
    )
    loras: dict[str, str] = _map_parameter(
        _string_map,
        "JSON; further LoRA adapters by name, each a directory, a .safetensors file or a hub id.",
    )
    lora_mixed: bool = _parameter(
        _boolean, False, "Requests with different LoRA adapters and scales may share a forward pass."
    )
    lora_memory_mb: int = _parameter(
        positive, 1024, "LoRA weights that stay on the device; the least recently used ones wait on the CPU."
    )
    strict_batch_key: bool = _parameter(
        _boolean, False, "Fuse only requests with equal steps, guidance and outputs too, as vLLM-Omni does."
    )
    default_sampling_params: SamplingParams = _parameter(
        _sampling_params,
        SamplingParams(),
        "JSON; for requests that do not give them, before the pipeline's own.",
    )
    from_pretrained: dict[str, Any] = _map_parameter(
        _json_object,
        "JSON; further arguments for diffusers' from_pretrained.",
    )

    @classmethod
    def from_model_config(
        cls, model_config: Mapping[str, Any], directory: Path, instance_kind: str = "", device_id: int = 0
    ) -> EngineConfig:
        """The engine's configuration from Triton's completed model configuration.

        Args:
            model_config: config.pbtxt as Triton's JSON.
            directory: the folder of model.py.
            instance_kind, device_id: of the instance, as Triton passes them to `initialize`.

        Raises:
            ConfigurationError: an unknown parameter or a wrong value; the message names it and the remedy.
        """
        declared = {name: entry["string_value"] for name, entry in model_config.get("parameters", {}).items()}
        values: dict[str, Any] = {}
        for name, text in declared.items():
            if name in TRITONS_OWN:
                raise ConfigurationError(f"config.pbtxt: {name} is no parameter here: set {TRITONS_OWN[name]}")
            if name not in PARAMETERS:
                raise ConfigurationError(f"config.pbtxt: unknown parameter {name!r}{did_you_mean(name, PARAMETERS)}")
            try:
                values[name] = PARAMETERS[name].metadata["parse"](text)
            except ValueError as error:
                raise ConfigurationError(f"config.pbtxt: parameter {name}={text!r}: {error}") from None
        if not values.get("model"):
            raise ConfigurationError("config.pbtxt: parameter 'model' is missing: give a directory or a hub id")
        max_batch_size = int(model_config.get("max_batch_size", 0))
        if max_batch_size < 1:
            raise ConfigurationError(
                f"config.pbtxt: max_batch_size={max_batch_size}: must be at least 1; it is the most requests of a wave"
            )
        batching = model_config.get("dynamic_batching", {})
        max_pixels = values.get("max_pixels", PARAMETERS["max_pixels"].default)
        for shape in values.get("warmup_shapes", ()):
            if shape.num_pixels > max_pixels:
                height, width = shape.height or shape.width, shape.width or shape.height
                raise ConfigurationError(
                    f"config.pbtxt: parameter warmup_shapes: height={height} width={width} is more than max_pixels "
                    f"{max_pixels}, so no request may have it; choose a smaller shape, or set max_pixels to "
                    f"{shape.num_pixels}"
                )
        return cls(
            **{**values, "model": _resolved_model(values["model"], directory)},
            max_num_seqs=max_batch_size,
            request_batch_max_wait_ms=int(batching.get("max_queue_delay_microseconds", 0)) / 1000,
            kind=instance_kind.removeprefix("KIND_"),
            device_id=device_id,
            directory=directory,
        )


TRITONS_OWN = {
    "max_num_seqs": "max_batch_size",
    "diffusion_batch_size": "max_batch_size",
    "request_batch_max_wait_ms": "dynamic_batching { max_queue_delay_microseconds }",
    "instances": "instance_group { count }",
    "gpus": "instance_group { kind: KIND_GPU  gpus }",
}
"""What vLLM-Omni and the command line call what Triton has a field of its own for."""

PARAMETERS: dict[str, dataclasses.Field[Any]] = {
    attribute.name: attribute for attribute in dataclasses.fields(EngineConfig) if "parse" in attribute.metadata
}
"""The parameters of config.pbtxt by name."""


def _resolved_model(model: str, directory: Path) -> str:
    """The directory as an absolute path; anything that is not written as a path may be a hub id."""
    path = path_from(directory, model)
    if path.is_dir():
        return str(path.resolve())
    if is_written_as_path(model):
        raise ConfigurationError(f"config.pbtxt: parameter model={model!r}: {path} is not a directory")
    return model
