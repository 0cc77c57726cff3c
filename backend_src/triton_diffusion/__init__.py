"""Request-level batching for diffusers pipelines on Triton Inference Server."""

from importlib.metadata import PackageNotFoundError, version

from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams
from triton_diffusion.sampling_params_key import SamplingParamsKey

try:
    __version__ = version("triton-diffusion")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0"

__all__ = ["OmniDiffusionRequest", "SamplingParams", "SamplingParamsKey", "__version__"]
