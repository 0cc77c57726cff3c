"""Before the first request: a full wave, so that one that does not fit is known at the start and not before a user."""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from triton_diffusion import device_memory
from triton_diffusion.adapters import PipelineAdapter
from triton_diffusion.adapters.prompt_cache import PromptCache
from triton_diffusion.batch import DiffusionRequestBatch
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError
from triton_diffusion.model_runner import ModelRunner
from triton_diffusion.request import OmniDiffusionRequest, parse_request
from triton_diffusion.sampling_params import SamplingParams, describe

logger = logging.getLogger(__name__)

STEPS = 2
"""Some schedulers divide by the number of steps less one."""

IMAGE_SIZE = 512
"""Height and width, in pixels, of the made input image of a pipeline that has no size of its own."""


class Failure(NamedTuple):
    """Why a wave did not run. It does not hold the exception, whose traceback holds the tensors."""

    reason: str
    is_out_of_memory: bool


def warm_up(adapter: PipelineAdapter, config: EngineConfig) -> None:
    """Run a wave of max_num_seqs requests at the model's default sampling parameters and at each of `warmup_shapes`.

    A pipeline that cannot be fused runs one request. Nothing is left of it but what the pipeline has compiled or
    allocated.

    Raises:
        ConfigurationError: a wave does not fit in memory, with the largest that does; or it failed otherwise.
    """
    began = time.monotonic()
    size = config.max_num_seqs if adapter.supports_request_batch else 1
    shapes = list(dict.fromkeys((SamplingParams(), *config.warmup_shapes)))
    fits, does_not_fit = size, ""
    for shape in shapes:
        failure = run_wave(adapter, shape, fits) if fits else None
        if failure is None:
            continue
        what = f"a wave of {fits} requests at {_named(adapter, shape)}"
        if not failure.is_out_of_memory:
            raise ConfigurationError(
                f"warm-up: {what} failed: {failure.reason}. Sampling parameters that work can be given by "
                "default_sampling_params; warmup false (--no-warmup) leaves the warm-up out"
            )
        does_not_fit = does_not_fit or f"{what} does not fit in memory ({_memory(adapter)}): {failure.reason}"
        fits = largest_wave(adapter, shape, fits)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what waves of other shapes do not need
    if does_not_fit:
        raise ConfigurationError(f"warm-up: {does_not_fit}. {_remedy(size, fits)}")
    logger.info(
        "warm-up: %d %s of %d requests in %.1f s, memory peak %s",
        len(shapes),
        "wave" if len(shapes) == 1 else "waves",
        size,
        time.monotonic() - began,
        _gigabytes(device_memory.peak_bytes()),
    )


def largest_wave(adapter: PipelineAdapter, shape: SamplingParams, too_many: int) -> int:
    """The most requests of a wave that runs, less than `too_many`; 0 if not even one does."""
    fits = 0
    while too_many - fits > 1:
        gc.collect()  # what failed may be held by its own traceback
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        middle = (fits + too_many) // 2
        if run_wave(adapter, shape, middle) is None:
            fits = middle
        else:
            too_many = middle
    return fits


def run_wave(adapter: PipelineAdapter, shape: SamplingParams, size: int) -> Failure | None:
    """Encode, denoise and decode so many requests in one wave; why that failed, if it did."""
    try:
        with _uncached(adapter.pipeline):
            requests = [_request(adapter, shape, number) for number in range(size)]
            return _first_failure(ModelRunner(adapter, tries_halves=False), requests)
    except Exception as error:
        return _failure(error)


def _first_failure(runner: ModelRunner, requests: list[OmniDiffusionRequest]) -> Failure | None:
    while requests:
        outputs = runner.execute(DiffusionRequestBatch(requests))
        for output in outputs.values():
            if output.error is not None:
                return _failure(output.error)
        requests = [request for request in requests if request.request_id not in outputs.denoised]
    for _, output in runner.decode():
        if output.error is not None:
            return _failure(output.error)
    return None


def _request(adapter: PipelineAdapter, shape: SamplingParams, number: int) -> OmniDiffusionRequest:
    """A request as a client could send it, of few steps."""
    params = shape.with_defaults(adapter.defaults)
    steps = shape.num_inference_steps or min(STEPS, params.num_inference_steps or STEPS)
    # All of the steps are run, whatever the strength; a negative prompt turns every kind of guidance on.
    wanted: dict[str, Any] = {
        **shape.given(),
        "prompt": f"a photograph of {number + 1} trees in the morning",
        "negative_prompt": "blurry",
        "num_inference_steps": steps,
        "num_images_per_prompt": shape.num_images_per_prompt or 1,
        "strength": 1.0,
        "seed": number,
        "lora": shape.lora or params.lora or adapter.loras.largest(number),
    }
    tensors = {}
    if "image" in adapter.taken:
        height, width = params.height or IMAGE_SIZE, params.width or IMAGE_SIZE
        tensors["image"] = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    request = parse_request(
        tensors,
        {name: value for name, value in wanted.items() if name in adapter.taken or name in shape.given()},
        request_id=f"warm-up-{number}",
        pipeline=adapter.name,
        taken=adapter.taken,
        defaults=adapter.defaults,
        random_seed=lambda: number,
    )
    adapter.check_request(request)
    return request


def _named(adapter: PipelineAdapter, shape: SamplingParams) -> str:
    params = shape.with_defaults(adapter.defaults)
    sizes = {name: getattr(params, name) for name in ("height", "width", "num_frames")}
    return describe({**{name: value for name, value in sizes.items() if value}, **shape.given()}) or "its defaults"


@contextlib.contextmanager
def _uncached(pipeline: Any) -> Iterator[None]:
    """Without the cache of encoded prompts, which are to be the users'."""
    cache = getattr(pipeline, "encode_prompt", None)
    if not isinstance(cache, PromptCache):
        yield
        return
    pipeline.encode_prompt = cache.encode_prompt
    try:
        yield
    finally:
        pipeline.encode_prompt = cache


def _failure(error: BaseException) -> Failure:
    return Failure(str(error).partition("\n")[0] or type(error).__name__, is_out_of_memory(error))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it came from, is of a device or a host without memory."""
    if error is None:
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    if isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text):
        return True
    return is_out_of_memory(error.__cause__) or is_out_of_memory(error.__context__)


def _memory(adapter: PipelineAdapter) -> str:
    device = adapter.pipeline.device
    peak = _gigabytes(device_memory.peak_bytes())
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return f"{device}: {_gigabytes(total)}, of which {_gigabytes(free)} are free without the wave; peak {peak}"
    memory, resident = psutil.virtual_memory(), psutil.Process().memory_info().rss
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    limited = "" if limit == resource.RLIM_INFINITY else f", address space limited to {_gigabytes(limit)}"
    return (
        f"{device}: {_gigabytes(memory.total)}, of which {_gigabytes(memory.available)} are available; this process "
        f"has {_gigabytes(resident)}, at its peak {peak}{limited}"
    )


def _remedy(size: int, fits: int) -> str:
    if fits:
        return f"The largest that fits is {fits}: set max_num_seqs (max_batch_size) from {size} to {fits}"
    return (
        "Not even one request fits: choose a smaller size by default_sampling_params, dtype bfloat16, or "
        "pipeline_calls (enable_model_cpu_offload, vae.enable_tiling)"
    )


def _gigabytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
