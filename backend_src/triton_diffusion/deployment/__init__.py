"""From the options of a command line or a deploy file to a Triton model repository."""

from triton_diffusion.deployment.model_options import MODEL_OPTIONS, ModelOption
from triton_diffusion.deployment.plan import plan_models
from triton_diffusion.deployment.repository import write_repository
from triton_diffusion.deployment.served_model import ServedModel

__all__ = ["MODEL_OPTIONS", "ModelOption", "ServedModel", "plan_models", "write_repository"]
