"""A pipeline whose every step can be watched and made to fail, and a reply that remembers what it was told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from triton_diffusion.adapters import Evaluation, RequestState, StepwiseAdapter
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import TritonDiffusionError
from triton_diffusion.output import DiffusionOutput
from triton_diffusion.receipt import Receipt
from triton_diffusion.reply import Reply
from triton_diffusion.request import OmniDiffusionRequest, unique_request_id
from triton_diffusion.sampling_params import SamplingParams

PATIENCE = 60.0
"""Seconds that a test waits for what must come; a loaded machine may be slow, so this only bounds a hang."""


class CountingPipeline:
    """Takes the arguments that the adapter looks for; it is never called."""

    device, dtype = torch.device("cpu"), torch.float32

    def __call__(self, prompt: str, height: int = 8, num_inference_steps: int = 3, generator: Any = None) -> None:
        raise NotImplementedError


class CountingScheduler:
    """Adds the noise prediction to the latents."""

    config = SimpleNamespace(stochastic_sampling=False)

    def __init__(self, steps: int) -> None:
        self.timesteps = torch.arange(steps)

    def step(self, prediction: torch.Tensor, timestep: Any, latents: torch.Tensor, return_dict: bool) -> Any:
        return (latents + prediction,)


class CountingAdapter(StepwiseAdapter):
    """Latents count the steps; `waves` lists which prompts shared each forward pass.

    A prompt says what goes wrong: `bad encode`, `bad step`, `bad decode`, `nan`.
    """

    key_fields: ClassVar[Mapping[str, str]] = {"height": "some reason"}

    def __init__(self, max_num_seqs: int = 8) -> None:
        super().__init__(CountingPipeline(), EngineConfig(max_num_seqs=max_num_seqs, model="fake"))
        self.waves: list[list[str]] = []
        self.before_step: Callable[[], None] = lambda: None

    def prepare_encode(self, request: OmniDiffusionRequest) -> RequestState:
        if request.prompt == "bad encode":
            raise RuntimeError("the tokenizer broke")
        steps = request.sampling_params.num_inference_steps or 3
        return RequestState(
            request=request,
            scheduler=CountingScheduler(steps),
            latents=torch.zeros(1, 1),
            conditioning={},
        )

    def denoise_step(self, states: Sequence[RequestState]) -> list[torch.Tensor]:
        self.before_step()
        prompts = [state.request.prompt for state in states]
        self.waves.append(prompts)
        if "bad step" in prompts:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return [torch.full((1, 1), float("nan") if prompt == "nan" else 1.0) for prompt in prompts]

    def predict(self, evaluations: Sequence[Evaluation]) -> torch.Tensor:
        raise NotImplementedError

    def decode(self, state: RequestState) -> Any:
        if state.request.prompt == "bad decode":
            raise ValueError("the decoder broke")
        return np.full([1, 2, 2, 3], int(state.latents), np.uint8)


class RecordedReply(Reply):
    """Remembers every answer; more than one is a fault that tests look for."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[DiffusionOutput | TritonDiffusionError] = []
        self.receipt: Receipt | None = None
        self.cancelled = False
        self._done = threading.Event()

    def send_output(self, output: DiffusionOutput, receipt: Receipt) -> None:
        self.answers.append(output)
        self.receipt = receipt
        self._done.set()

    def send_error(self, error: TritonDiffusionError) -> None:
        self.answers.append(error)
        self._done.set()

    def wait(self, timeout: float = PATIENCE) -> Any:
        """The one answer."""
        assert self._done.wait(timeout), "the request was never answered"
        assert len(self.answers) == 1
        return self.answers[0]


def fake_request(
    prompt: str = "good", reply: RecordedReply | None = None, deadline: float | None = None, **params: int
) -> OmniDiffusionRequest:
    """A request for `CountingAdapter`; `reply.cancelled` cancels it."""
    known = {"seed": 0, "height": 8, "num_inference_steps": 3, **params}
    return OmniDiffusionRequest(
        prompt=prompt,
        request_id=unique_request_id(),
        sampling_params=SamplingParams(**known),  # type: ignore[arg-type]
        deadline=deadline,
        is_cancelled=(lambda: reply.cancelled) if reply is not None else (lambda: False),
    )
