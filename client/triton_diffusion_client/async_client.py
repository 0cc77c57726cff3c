"""The asynchronous client: every prompt is a request of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, Literal

import numpy as np
import PIL.Image
from tritonclient.utils import InferenceServerException

from triton_diffusion.receipt import Receipt
from triton_diffusion.request import BATCH_KEY, FIELDS
from triton_diffusion.sampling_params import SAMPLING_FIELDS, SamplingParams
from triton_diffusion.sampling_params_key import SamplingParamsKey
from triton_diffusion_client.errors import InvalidRequestError, as_client_error
from triton_diffusion_client.progress import Progress, track
from triton_diffusion_client.prompt import Prompt, prompt_inputs
from triton_diffusion_client.result import GenerationResult
from triton_diffusion_client.shared_memory import Region, SharedMemoryPool

Transport = Literal["grpc", "http"]

MICROSECONDS = 1e6

GRPC_OPTIONS = [
    # Each request goes to the next of the addresses that a name has; gRPC's default stays with the first.
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]


class AsyncDiffusionClient:
    """Sends prompts to a served diffusion model. Use it as an async context manager, or call `close`.

    Args:
        url: host and port; `grpc://` or `http://` in front chooses the transport.
        model: the name of the served model.
        transport: grpc or http; over HTTP the server never notices a cancelled request.
        shared_memory: pictures through the machine's memory if the server is on this machine, found out by itself.
        max_concurrency: requests under way at once.
        timeout: seconds for one request, for the server too; None waits as long as it takes.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        model: str = "shapes",
        *,
        transport: Transport = "grpc",
        shared_memory: bool = True,
        max_concurrency: int = 256,
        timeout: float | None = None,
    ) -> None:
        scheme, _, address = url.rpartition("://")
        self.model = model
        self.timeout = timeout
        self._triton, self._connection = connect(scheme or transport, address, max_concurrency)
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
        priority: int = 0,
        progress: Progress = None,
        on_result: Callable[[GenerationResult], None] | None = None,
    ) -> list[GenerationResult]:
        """Pictures for every prompt; the requests run concurrently and are fused by the server where they can be.

        Args:
            prompts: one prompt or many: a string, or a dict with `prompt`, `negative_prompt`, `multi_modal_data`.
            sampling_params: for all prompts, or one for each.
            priority: of these requests among those that wait in the server; the smaller goes first.
            progress: a progress bar; None shows one for several prompts on a terminal.
            on_result: called with each result as soon as it is there; an error of its own is raised at the end.

        Returns:
            One result for each prompt, in order. A prompt that failed has its error in the result.

        Raises:
            InvalidRequestError: `sampling_params` are not as many as `prompts`.
        """
        items: list[Any] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(items)
        else:
            params = list(sampling_params)
        if len(params) != len(items):
            raise InvalidRequestError(f"{len(params)} sampling_params for {len(items)} prompts: give one, or one each")
        callback_errors: list[Exception] = []
        with track(len(items), progress) as advance:

            async def one(prompt: Prompt, own_params: SamplingParams) -> GenerationResult:
                async with self._slots:
                    result = await self._generate_one(prompt, own_params, priority)
                advance(result)
                try:
                    if on_result is not None:
                        on_result(result)
                except Exception as error:
                    callback_errors.append(error)
                return result

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*pair)) for pair in zip(items, params, strict=True)]
        if callback_errors:
            raise callback_errors[0]
        return [task.result() for task in tasks]

    async def _generate_one(self, prompt: Prompt, params: SamplingParams, priority: int) -> GenerationResult:
        result = GenerationResult(prompt=str(prompt.get("prompt", "") if isinstance(prompt, Mapping) else prompt))
        try:
            values = {**prompt_inputs(prompt), **params.given()}
            if priority:
                values["priority"] = priority
            values = {name: FIELDS[name].parse(value) for name, value in values.items()}
            result.negative_prompt = values.get("negative_prompt")
            async with asyncio.timeout(self.timeout):
                await self._infer(values, result)
        except Exception as error:
            result.error = as_client_error(error)
        return result

    async def _infer(self, values: dict[str, Any], result: GenerationResult) -> None:
        region = await self._pool.acquire(self._expected_bytes(values))
        try:
            response = await self._send(values, region)
            self._read(response, values, region, result)
        except InferenceServerException as error:
            if region is None or "shared memory" not in str(error):
                self._pool.settle(region, error)
                raise
            # Too small for what the pipeline made, or forgotten by a server that was started again.
            await self._pool.forget(region)
            self._read(await self._send(values, None), values, None, result)
            return
        except BaseException:  # out of time, or cancelled
            self._pool.abandon(region)
            raise
        if region is not None:
            self._pool.release(region)

    async def _send(self, values: dict[str, Any], region: Region | None) -> Any:
        key = SamplingParamsKey.of(SamplingParams(**{n: v for n, v in values.items() if n in SAMPLING_FIELDS}))
        tensors = [
            self._tensor("prompt", "BYTES", np.array([values["prompt"].encode()], np.object_)),
            self._tensor(BATCH_KEY, "UINT8", np.empty(key.batch_key_shape(), np.uint8)),
        ]
        if "image" in values:
            tensors.append(self._tensor("image", "UINT8", values["image"]))
        if "priority" in values:  # a parameter of that name is Triton's own, which no model can see
            tensors.append(self._tensor("priority", "INT32", np.array([values["priority"]], np.int32)))
        raw = {name: self._triton.InferRequestedOutput(name) for name in ("images", "videos")}
        if region is not None:
            raw[_raw_output(values)].set_shared_memory(region.name, region.byte_size)
        outputs = [*raw.values(), *(self._triton.InferRequestedOutput(name) for name in ("seed_used", "receipt"))]
        # Triton batches only requests with the same set of input tensors, so what differs goes as parameters.
        parameters = {name: value for name, value in values.items() if name not in ("prompt", "image", "priority")}
        timeout = None if self.timeout is None else round(self.timeout * MICROSECONDS)
        return await self._connection.infer(
            self.model, tensors, outputs=outputs, parameters=parameters, timeout=timeout
        )

    def _read(self, response: Any, values: dict[str, Any], region: Region | None, result: GenerationResult) -> None:
        result.receipt = Receipt.from_json(response.as_numpy("receipt").item())
        result.seeds = response.as_numpy("seed_used").reshape(-1).tolist()
        shared = _raw_output(values)
        images = _pixels(response, "images", region if shared == "images" else None)
        if images is not None:
            result.images = [PIL.Image.fromarray(image) for image in images[0]]
        videos = _pixels(response, "videos", region if shared == "videos" else None)
        if videos is not None:
            result.videos = [[PIL.Image.fromarray(frame) for frame in video] for video in videos[0]]
        params = result.receipt.sampling_params
        if "height" not in values and "width" not in values and params.height and params.width:
            self._default_size = (params.height, params.width)

    def _expected_bytes(self, values: dict[str, Any]) -> int:
        """The size of the pictures; 0 while the model's default size is not known yet."""
        default_height, default_width = self._default_size or (0, 0)
        height, width = values.get("height", default_height), values.get("width", default_width)
        images = values.get("num_images_per_prompt", 1) * values.get("num_frames", 1)
        return int(height * width * 3 * images)

    def _tensor(self, name: str, datatype: str, tensor: np.ndarray[Any, Any]) -> Any:
        """An input of one request: `tensor` with Triton's batch dimension of 1 in front."""
        infer_input = self._triton.InferInput(name, [1, *tensor.shape], datatype)
        infer_input.set_data_from_numpy(tensor[None])
        return infer_input


def _raw_output(values: dict[str, Any]) -> str:
    """The output that is expected to hold the raw pixels: only videos have a number of frames."""
    return "videos" if "num_frames" in values else "images"


def _pixels(response: Any, name: str, region: Region | None) -> np.ndarray[Any, Any] | None:
    output = response.get_output(name)
    if output is None:
        return None
    if region is not None:
        return region.read([int(size) for size in (output["shape"] if isinstance(output, dict) else output.shape)])
    pixels: np.ndarray[Any, Any] | None = response.as_numpy(name)
    return pixels


def connect(transport: str, address: str, connections: int) -> tuple[ModuleType, Any]:
    """tritonclient's module for the transport, and its connection."""
    if transport == "grpc":
        import tritonclient.grpc.aio as grpc_client

        return grpc_client, grpc_client.InferenceServerClient(address, channel_args=GRPC_OPTIONS)
    if transport == "http":
        import tritonclient.http.aio as http_client

        # Its own timeout would end requests that the caller is willing to wait for.
        return http_client, http_client.InferenceServerClient(address, conn_limit=connections, conn_timeout=None)
    raise InvalidRequestError(f"unknown transport {transport!r}: use grpc:// or http://")
