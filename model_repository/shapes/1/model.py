from triton_diffusion.python_backend.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
