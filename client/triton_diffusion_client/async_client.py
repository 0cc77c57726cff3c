"""The asynchronous client: every prompt is a request of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any, Literal

import numpy as np
import PIL.Image
from triton_diffusion.receipt import Receipt
from triton_diffusion.request import BATCH_KEY, FIELDS
from triton_diffusion.sampling_params import SamplingParams
from triton_diffusion.sampling_params_key import SamplingParamsKey

from triton_diffusion_client.errors import DiffusionClientError, InvalidRequestError, as_client_error
from triton_diffusion_client.progress import Progress, track
from triton_diffusion_client.prompt import Prompt, prompt_inputs
from triton_diffusion_client.result import GenerationResult
from triton_diffusion_client.shared_memory import Region, SharedMemoryPool

Protocol = Literal["grpc", "http"]


class AsyncDiffusionClient:
    """Sends prompts to a served diffusion model. Use it as an async context manager, or call `close`.

    Args:
        url: host and port; `grpc://` or `http://` in front chooses the protocol.
        model: the name of the served model.
        protocol: grpc or http; over HTTP the server never notices a cancelled request.
        shared_memory: pictures through the machine's memory if the server is on this machine, found out by itself.
        max_concurrency: requests under way at once.
        timeout: seconds for one request; None waits as long as it takes.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        model: str = "shapes",
        *,
        protocol: Protocol = "grpc",
        shared_memory: bool = True,
        max_concurrency: int = 256,
        timeout: float | None = None,
    ) -> None:
        scheme, _, address = url.rpartition("://")
        self.model = model
        self.timeout = timeout
        self._triton, self._connection = _connect(scheme or protocol, address)
        self._pool = SharedMemoryPool(self._connection, shared_memory)
        self._slots = asyncio.Semaphore(max_concurrency)
        self._default_size: tuple[int, int] | None = None

    async def __aenter__(self) -> AsyncDiffusionClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give back the shared memory and close the connection."""
        await self._pool.close()
        await self._connection.close()

    async def is_ready(self) -> bool:
        """Whether the server answers and has the model ready."""
        try:
            return bool(await self._connection.is_model_ready(self.model))
        except Exception:
            return False

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress = None,
        on_result: Callable[[GenerationResult], None] | None = None,
    ) -> list[GenerationResult]:
        """Pictures for every prompt; the requests run concurrently and are fused by the server where they can be.

        Args:
            prompts: one prompt or many: a string, or a dict with `prompt`, `negative_prompt`, `multi_modal_data`.
            sampling_params: for all prompts, or one for each.
            progress: a progress bar; None shows one for several prompts on a terminal.
            on_result: called with each result as soon as it is there.

        Returns:
            One result for each prompt, in order. A prompt that failed has its error in the result.

        Raises:
            InvalidRequestError: `sampling_params` are not as many as `prompts`.
        """
        items: list[Any] = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(items)
        else:
            params = list(sampling_params)
        if len(params) != len(items):
            raise InvalidRequestError(f"{len(params)} sampling_params for {len(items)} prompts: give one, or one each")
        with track(len(items), progress) as advance:

            async def one(prompt: Prompt, own_params: SamplingParams) -> GenerationResult:
                async with self._slots:
                    result = await self._generate_one(prompt, own_params)
                advance(result)
                if on_result is not None:
                    on_result(result)
                return result

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*pair)) for pair in zip(items, params, strict=True)]
        return [task.result() for task in tasks]

    async def _generate_one(self, prompt: Prompt, params: SamplingParams) -> GenerationResult:
        result = GenerationResult(prompt=str(prompt.get("prompt", "") if isinstance(prompt, dict) else prompt))
        try:
            fields = {**prompt_inputs(prompt), **params.given()}
            result.negative_prompt = fields.get("negative_prompt")
            await self._infer(fields, params, result)
        except Exception as error:
            result.error = as_client_error(error)
        return result

    async def _infer(self, fields: dict[str, Any], params: SamplingParams, result: GenerationResult) -> None:
        values = {name: FIELDS[name].parse(value) for name, value in fields.items()}
        batch_key = np.empty(SamplingParamsKey.of(params).batch_key_shape(), np.uint8)
        tensors = [self._tensor("prompt", "BYTES", np.array([values.pop("prompt").encode()], np.object_))]
        tensors.append(self._tensor(BATCH_KEY, "UINT8", batch_key))
        if "image" in values:
            tensors.append(self._tensor("image", "UINT8", values.pop("image")))
        region = await self._pool.acquire(self._expected_bytes(params))
        images = self._triton.InferRequestedOutput("images")
        if region is not None:
            images.set_shared_memory(region.name, region.byte_size)
        outputs = [images, *(self._triton.InferRequestedOutput(name) for name in ("videos", "seed_used", "receipt"))]
        # Triton batches only requests with the same set of input tensors, so what differs goes as parameters.
        call = self._connection.infer(self.model, tensors, outputs=outputs, parameters=values)
        response = await asyncio.wait_for(call, self.timeout)
        self._read(response, region, result)
        if region is not None:
            self._pool.release(region)

    def _read(self, response: Any, region: Region | None, result: GenerationResult) -> None:
        result.receipt = Receipt.from_json(response.as_numpy("receipt").item())
        result.seeds = response.as_numpy("seed_used").reshape(-1).tolist()
        images = _pixels(response, "images", region)
        if images is not None:
            result.images = [PIL.Image.fromarray(image) for image in images[0]]
            self._learn_default_size(result.receipt)
        videos = _pixels(response, "videos", None)
        if videos is not None:
            result.videos = [[PIL.Image.fromarray(frame) for frame in video] for video in videos[0]]

    def _expected_bytes(self, params: SamplingParams) -> int:
        """The size of the pictures; 0 while the model's default size is not known yet."""
        height, width = (params.height, params.width)
        if (height is None or width is None) and self._default_size is not None:
            height, width = height or self._default_size[0], width or self._default_size[1]
        return 0 if height is None or width is None else height * width * 3 * (params.num_images_per_prompt or 1)

    def _learn_default_size(self, receipt: Receipt) -> None:
        params = receipt.sampling_params
        if self._default_size is None and params.height and params.width:
            self._default_size = (params.height, params.width)

    def _tensor(self, name: str, datatype: str, tensor: np.ndarray[Any, Any]) -> Any:
        """An input of one request: `tensor` with Triton's batch dimension of 1 in front."""
        infer_input = self._triton.InferInput(name, [1, *tensor.shape], datatype)
        infer_input.set_data_from_numpy(tensor[None])
        return infer_input


def _pixels(response: Any, name: str, region: Region | None) -> np.ndarray[Any, Any] | None:
    output = response.get_output(name)
    if output is None:
        return None
    if region is not None:
        return region.read([int(size) for size in (output["shape"] if isinstance(output, dict) else output.shape)])
    pixels: np.ndarray[Any, Any] | None = response.as_numpy(name)
    return pixels


def _connect(protocol: str, address: str) -> tuple[ModuleType, Any]:
    """tritonclient's module for the protocol, and its connection."""
    if protocol == "grpc":
        import tritonclient.grpc.aio as grpc_client

        return grpc_client, grpc_client.InferenceServerClient(address)
    if protocol == "http":
        import tritonclient.http.aio as http_client

        return http_client, http_client.InferenceServerClient(address)
    raise DiffusionClientError(f"unknown protocol {protocol!r}: use grpc or http")
