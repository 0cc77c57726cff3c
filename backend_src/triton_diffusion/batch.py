"""The requests of one wave, as a pipeline's `forward` receives them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from triton_diffusion.request import OmniDiffusionRequest
from triton_diffusion.sampling_params import SamplingParams


class DiffusionRequestBatch:
    """Compatible requests of different users, in the order in which their outputs are returned.

    Raises:
        ValueError: no request, or two of the same id.
    """

    def __init__(self, requests: Sequence[OmniDiffusionRequest]) -> None:
        self.requests = list(requests)
        if not self.requests:
            raise ValueError("a batch needs at least one request")
        if len(set(self.request_ids)) != len(self.requests):
            raise ValueError(f"request ids must be unique, got {self.request_ids}")

    def __iter__(self) -> Iterator[OmniDiffusionRequest]:
        return iter(self.requests)

    @property
    def num_reqs(self) -> int:
        return len(self.requests)

    @property
    def request_ids(self) -> list[str]:
        return [request.request_id for request in self.requests]

    @property
    def prompts(self) -> list[str]:
        return [request.prompt for request in self.requests]

    @property
    def sampling_params_list(self) -> list[SamplingParams]:
        """The sampling parameters of each request."""
        return [request.sampling_params for request in self.requests]

    # The following are the first request's: enough for a pipeline written for vLLM-Omni that handles one request,
    # or reads only what the key holds equal.

    @property
    def request_id(self) -> str:
        return self.requests[0].request_id

    @property
    def sampling_params(self) -> SamplingParams:
        return self.requests[0].sampling_params

    @property
    def kv_sender_info(self) -> dict[str, Any] | None:
        return self.requests[0].kv_sender_info
