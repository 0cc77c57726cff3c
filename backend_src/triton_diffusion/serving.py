"""From a model configuration to a running engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import transformers

from triton_diffusion.adapters import PipelineAdapter, StepwiseAdapter, load_adapter
from triton_diffusion.config import EngineConfig
from triton_diffusion.embedded.server import STOP_FILE
from triton_diffusion.engine import DiffusionEngine, nothing
from triton_diffusion.errors import ConfigurationError
from triton_diffusion.model_runner import ModelRunner
from triton_diffusion.observer import EngineObserver
from triton_diffusion.scheduling import RequestScheduler, Scheduler, StepScheduler
from triton_diffusion.warmup import warm_up

logger = logging.getLogger(__name__)


STEP_METHODS = ("prepare_encode", "denoise_step", "step_scheduler", "post_decode")


def start_engine(
    model_config: Mapping[str, Any],
    directory: Path,
    instance_kind: str = "",
    device_id: int = 0,
    observers: Sequence[EngineObserver] = (),
) -> DiffusionEngine:
    """Load the model that config.pbtxt names, and start the engine that runs it.

    Args:
        model_config: config.pbtxt as Triton's JSON.
        directory: the folder of model.py, which a relative `model` is looked up in.
        observers: are told what happens in the engine.

    Raises:
        ConfigurationError: naming what cannot be served, and the remedy.
    """
    config = EngineConfig.from_model_config(model_config, directory, instance_kind, device_id)
    diffusers.utils.logging.disable_progress_bar()  # a server's log is no terminal
    transformers.utils.logging.disable_progress_bar()
    engine = build_engine(load_adapter(config), config, observers)
    engine.start(partial(warm_up, engine.runner.adapter, config) if config.warmup else nothing)
    return engine


def build_engine(
    adapter: PipelineAdapter, config: EngineConfig, observers: Sequence[EngineObserver] = ()
) -> DiffusionEngine:
    """An engine for `adapter` in the mode of `config`; a pipeline that cannot be fused runs one request at a time.

    Raises:
        ConfigurationError: step_execution for an adapter without the step methods.
    """
    if config.step_execution:
        _check_step_execution(adapter, config)
    batching = adapter.supports_request_batch and config.max_num_seqs > 1
    policy: type[Scheduler[Any]] = StepScheduler if config.step_execution else RequestScheduler
    scheduler = policy(config.max_num_seqs if batching else 1, config.max_queue_size)
    logger.info(
        "serving %s by %s on %s with %s: request batching %s, max_num_seqs %d, request_batch_max_wait_ms %g, "
        "mode %s, key [%s], max_queue_size %d",
        adapter.name,
        type(adapter).__name__,
        adapter.pipeline.device,
        adapter.pipeline.dtype,
        "on" if batching else "off",
        config.max_num_seqs,
        config.request_batch_max_wait_ms,
        "step-wise" if config.step_execution else "request-level" if batching else "serial",
        " ".join(adapter.key_fields),
        config.max_queue_size,
    )
    if config.max_num_seqs > 1 and not batching:
        if config.require_batching:
            raise ConfigurationError(
                f"require_batching: max_num_seqs is {config.max_num_seqs}, but {adapter.name} runs one request at a "
                "time; set max_batch_size to 1, or require_batching to false"
            )
        logger.warning("max_num_seqs is %d, but %s runs one request at a time", config.max_num_seqs, adapter.name)
    return DiffusionEngine(ModelRunner(adapter), scheduler, observers, must_stop)


def must_stop() -> bool:
    """Whether whoever runs the server says, by a file, that it waits for running requests no longer."""
    stop_file = os.environ.get(STOP_FILE)
    return stop_file is not None and os.path.exists(stop_file)


def _check_step_execution(adapter: PipelineAdapter, config: EngineConfig) -> None:
    if not isinstance(adapter, StepwiseAdapter):
        missing = [name for name in STEP_METHODS if not hasattr(adapter, name)]
        raise ConfigurationError(
            f"step_execution: {type(adapter).__name__}, which drives {adapter.name}, has no {', '.join(missing)}; "
            "set step_execution to false"
        )
    if config.request_batch_max_wait_ms:
        logger.warning(
            "step_execution: a request may join at any step, so the engine waits for no company; Triton still holds "
            "requests back for %g ms: remove max_queue_delay_microseconds",
            config.request_batch_max_wait_ms,
        )
