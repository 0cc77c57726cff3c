"""A tritonserver run by this process: found, prepared, started, awaited and stopped."""

from triton_diffusion.embedded.installation import TritonInstallation, TritonNotFoundError
from triton_diffusion.embedded.server import TritonServer, TritonServerError

__all__ = ["TritonInstallation", "TritonNotFoundError", "TritonServer", "TritonServerError"]
