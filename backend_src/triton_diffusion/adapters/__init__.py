"""How the engine drives a diffusers pipeline; one module for each family of pipelines."""

from triton_diffusion.adapters.adapter import PipelineAdapter
from triton_diffusion.adapters.loading import load_adapter
from triton_diffusion.adapters.request_state import Evaluation, RequestState
from triton_diffusion.adapters.stable_diffusion_3 import StableDiffusion3Adapter
from triton_diffusion.adapters.stepwise import StepwiseAdapter
from triton_diffusion.adapters.stock import StockAdapter

__all__ = [
    "Evaluation",
    "PipelineAdapter",
    "RequestState",
    "StableDiffusion3Adapter",
    "StepwiseAdapter",
    "StockAdapter",
    "load_adapter",
]
