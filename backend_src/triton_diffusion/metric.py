"""The metrics that every model instance has on Triton's metrics endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "triton_diffusion_"
"""What every name begins with."""

BASE_LABELS = ("model", "instance")
"""The labels that every metric has."""

MOST_KEYS = 16
"""Different values of the label `key`; requests of further keys are counted as `other`."""

OTHER_KEYS = "other"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
"""Bounds of buckets, from a step of a tiny model to a video that waited for a quarter of an hour."""

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Bounds of buckets, exact where waves are small."""


@dataclass(frozen=True)
class Metric:
    """What Prometheus is told about a metric.

    Args:
        labels: beside BASE_LABELS.
        buckets: the upper bounds of a histogram's.
    """

    kind: Literal["gauge", "counter", "histogram"]
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS = {
    "triton_diffusion_waiting_requests": Metric("gauge", "Requests that wait in the engine.", ("key",)),
    "triton_diffusion_running_requests": Metric("gauge", "Requests that take denoising steps.", ("key",)),
    "triton_diffusion_live_states": Metric(
        "gauge", "Requests that have begun and not ended, those being decoded included; 0 when the engine is idle."
    ),
    "triton_diffusion_remaining_steps": Metric(
        "gauge", "Denoising steps that the requests which have begun still have to take."
    ),
    "triton_diffusion_device_memory_peak_bytes": Metric(
        "gauge",
        "The most memory that tensors have taken on the GPU (torch.cuda.max_memory_allocated); on the CPU, the "
        "process's largest resident set.",
    ),
    "triton_diffusion_steps_total": Metric(
        "counter", "Fused denoising steps; of a pipeline that runs by its own call, calls."
    ),
    "triton_diffusion_requests_total": Metric(
        "counter", "Requests that were answered, by outcome and by the error's class.", ("outcome", "reason")
    ),
    "triton_diffusion_images_total": Metric("counter", "Images (or videos) of completed requests."),
    "triton_diffusion_pixels_total": Metric("counter", "Pixels of these images, or of all frames of these videos."),
    "triton_diffusion_cancelled_steps_saved_total": Metric(
        "counter", "Denoising steps that cancelled and expired requests did not take, each request's counted alone."
    ),
    "triton_diffusion_wave_requests": Metric(
        "histogram", "Requests of each wave at its first step (step-wise, every step is a wave).", buckets=COUNTS
    ),
    "triton_diffusion_forward_rows": Metric(
        "histogram",
        "Rows of each forward pass of a step: one for each image, or two with a negative prompt in the same pass; of "
        "a pipeline that runs by its own call, images of each call.",
        buckets=COUNTS,
    ),
    "triton_diffusion_admission_wait_seconds": Metric(
        "histogram",
        "From arrival in the engine until the request ran, or left without running; Triton's own wait is before it.",
        buckets=SECONDS,
    ),
    "triton_diffusion_encode_seconds": Metric(
        "histogram", "Encoding of each request's prompts and images.", buckets=SECONDS
    ),
    "triton_diffusion_step_seconds": Metric(
        "histogram",
        "Each step that a wave took together, on a GPU only until it was launched; of a pipeline that runs by its own "
        "call, the call.",
        buckets=SECONDS,
    ),
    "triton_diffusion_decode_seconds": Metric("histogram", "Decoding of each request's latents.", buckets=SECONDS),
    "triton_diffusion_request_seconds": Metric(
        "histogram", "From arrival in the engine until the answer was sent, whatever it was.", buckets=SECONDS
    ),
}
"""Every metric by name."""
