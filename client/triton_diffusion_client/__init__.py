"""Client of diffusion models served by triton-diffusion.

from triton_diffusion_client import DiffusionClient, SamplingParams

with DiffusionClient("localhost:8001", model="shapes") as client:
    for result in client.generate(["a large red circle", "a small star"], SamplingParams(seed=7)):
        result.raise_for_error().save("pictures")
"""

from triton_diffusion.receipt import Receipt
from triton_diffusion.sampling_params import SamplingParams
from triton_diffusion_client.async_client import AsyncDiffusionClient
from triton_diffusion_client.client import DiffusionClient
from triton_diffusion_client.errors import (
    DiffusionClientError,
    InvalidRequestError,
    RequestCancelledError,
    ServerError,
    ServerUnavailableError,
)
from triton_diffusion_client.prompt import Prompt
from triton_diffusion_client.result import GenerationResult

__all__ = [
    "AsyncDiffusionClient",
    "DiffusionClient",
    "DiffusionClientError",
    "GenerationResult",
    "InvalidRequestError",
    "Prompt",
    "Receipt",
    "RequestCancelledError",
    "SamplingParams",
    "ServerError",
    "ServerUnavailableError",
]
