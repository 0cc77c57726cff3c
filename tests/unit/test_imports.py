"""What may be imported where: the client without torch, the scheduler without torch and Triton."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "triton_diffusion_client",
        "triton_diffusion_client.cli",
        "triton_diffusion.cli",
        "triton_diffusion.embedded",
        "triton_diffusion.request",
        "triton_diffusion.scheduling",
        "triton_diffusion.config",
        "triton_diffusion.python_backend.triton_outputs",
    ],
)
def test_these_need_neither_torch_nor_triton(module: str) -> None:
    heavy = "{'torch', 'diffusers', 'transformers', 'triton_python_backend_utils'}"
    check = f"import sys, {module}; loaded = {heavy} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize("package", ["triton_diffusion", "triton_diffusion_client", "triton_diffusion.adapters"])
def test_every_public_name_is_there_and_sorted(package: str) -> None:
    module = importlib.import_module(package)
    assert all(hasattr(module, name) for name in module.__all__)
    assert module.__all__ == sorted(module.__all__)
