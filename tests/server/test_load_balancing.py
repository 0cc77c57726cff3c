"""A name with several addresses, as a headless Kubernetes service has it: the client spreads its requests over all."""

from __future__ import annotations

from pathlib import Path

from tests.server.conftest import TINY_DEFAULTS, metric
from tests.server.repository import add_model
from triton_diffusion.embedded import TritonServer
from triton_diffusion_client import DiffusionClient, SamplingParams


def test_requests_go_to_every_address_and_to_those_that_are_left(
    tmp_path: Path, server: TritonServer, checkpoint: Path
) -> None:
    add_model(tmp_path, "tiny", checkpoint, max_wait_ms=0, default_sampling_params=TINY_DEFAULTS)
    with TritonServer(tmp_path) as other:
        both = f"ipv4:{server.grpc_url},{other.grpc_url}"  # what a resolver makes of such a name
        before = metric(server, "tiny", "triton_diffusion_images_total")
        with DiffusionClient(both, "tiny") as client:
            for _ in range(8):
                client.generate("a cat", SamplingParams(num_inference_steps=1))[0].raise_for_error()
            assert metric(server, "tiny", "triton_diffusion_images_total") > before
            assert metric(other, "tiny", "triton_diffusion_images_total") > 0

            other.stop()
            for _ in range(4):
                client.generate("a cat", SamplingParams(num_inference_steps=1))[0].raise_for_error()
