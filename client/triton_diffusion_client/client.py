"""The synchronous client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from triton_diffusion.sampling_params import SamplingParams
from triton_diffusion_client.async_client import AsyncDiffusionClient, Transport
from triton_diffusion_client.progress import Progress
from triton_diffusion_client.prompt import Prompt
from triton_diffusion_client.result import GenerationResult

Result = TypeVar("Result")


class DiffusionClient:
    """`AsyncDiffusionClient` for code without an event loop: it runs one on a thread of its own.

    Use it as a context manager, or call `close`. The arguments are those of `AsyncDiffusionClient`.
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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="diffusion-client", daemon=True)
        self._thread.start()

        async def connect() -> AsyncDiffusionClient:
            return AsyncDiffusionClient(
                url,
                model,
                transport=transport,
                shared_memory=shared_memory,
                max_concurrency=max_concurrency,
                timeout=timeout,
            )

        try:
            self._client = self._run(connect())
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> DiffusionClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back the shared memory and close the connection; calling it again does nothing."""
        if not self._loop.is_closed():
            try:
                self._run(self._client.close())
            finally:
                self._stop()

    def is_ready(self) -> bool:
        """Whether the server answers and has the model ready."""
        return self._run(self._client.is_ready())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        progress: Progress = None,
        on_result: Callable[[GenerationResult], None] | None = None,
    ) -> list[GenerationResult]:
        """As `AsyncDiffusionClient.generate`. Ctrl-C cancels the requests that are under way."""
        return self._run(
            self._client.generate(prompts, sampling_params, priority=priority, progress=progress, on_result=on_result)
        )

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("on_result must not use its own client: this call would wait for itself")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
