"""From a model configuration to a running engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton_diffusion.adapters import PipelineAdapter, load_adapter
from triton_diffusion.config import EngineConfig
from triton_diffusion.engine import DiffusionEngine
from triton_diffusion.model_runner import ModelRunner
from triton_diffusion.request_scheduler import RequestScheduler

logger = logging.getLogger(__name__)


def start_engine(
    model_config: Mapping[str, Any], directory: Path, instance_kind: str = "", device_id: int = 0
) -> DiffusionEngine:
    """Load the model that config.pbtxt names, and start the engine that runs it.

    Args:
        model_config: config.pbtxt as Triton's JSON.
        directory: the folder of model.py, which a relative `model` is looked up in.

    Raises:
        ConfigurationError: naming what cannot be served, and the remedy.
    """
    config = EngineConfig.from_model_config(model_config, directory, instance_kind, device_id)
    engine = build_engine(load_adapter(config), config)
    engine.start()
    return engine


def build_engine(adapter: PipelineAdapter, config: EngineConfig) -> DiffusionEngine:
    """An engine for `adapter`; a pipeline that cannot be fused runs one request at a time."""
    batching = adapter.supports_request_batch and config.max_num_seqs > 1
    scheduler = RequestScheduler[Any](config.max_num_seqs if batching else 1, config.max_queue_size)
    pipeline = adapter.pipeline
    logger.info(
        "serving %s by %s on %s with %s: request batching %s, max_num_seqs %d, request_batch_max_wait_ms %g, "
        "mode %s, key [%s], max_queue_size %d",
        adapter.name,
        type(adapter).__name__,
        pipeline.device,
        pipeline.dtype,
        "on" if batching else "off",
        config.max_num_seqs,
        config.request_batch_max_wait_ms,
        "request-level" if batching else "serial",
        " ".join(adapter.key_fields),
        config.max_queue_size,
    )
    if config.max_num_seqs > 1 and not batching:
        logger.warning("max_num_seqs is %d, but %s runs one request at a time", config.max_num_seqs, adapter.name)
    return DiffusionEngine(ModelRunner(adapter), scheduler)
