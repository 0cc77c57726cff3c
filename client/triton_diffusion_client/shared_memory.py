"""Regions of system shared memory that the server writes pictures into, when it is on this machine."""

from __future__ import annotations

import asyncio
import logging
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol

import numpy as np
from tritonclient.utils import InferenceServerException

logger = logging.getLogger(__name__)

ANSWERED = frozenset(
    {"StatusCode.INVALID_ARGUMENT", "StatusCode.INTERNAL", "StatusCode.NOT_FOUND", "400", "404", "500", "503"}
)
"""Statuses of errors that the server itself answered, when it was done with the request."""

MINIMUM_BYTES = 256 * 1024
"""Below this, a region saves less time than its registration costs."""


class Registrar(Protocol):
    """The part of tritonclient that makes a region known to the server; the same for gRPC and HTTP."""

    async def register_system_shared_memory(self, name: str, key: str, byte_size: int) -> Any: ...

    async def unregister_system_shared_memory(self, name: str = "") -> Any: ...


class Region:
    """A mapped region that the server knows by `name`."""

    def __init__(self, byte_size: int) -> None:
        self._memory = SharedMemory(create=True, size=byte_size)
        self.name = self._memory.name
        self.byte_size = byte_size

    def read(self, shape: list[int]) -> np.ndarray[Any, Any]:
        """A copy of the UINT8 array at the region's start."""
        return np.ndarray(shape, np.uint8, buffer=self._memory.buf).copy()

    def unlink(self) -> None:
        """Take the region's name out of /dev/shm; those who have it mapped keep it."""
        self._memory.unlink()

    def close(self) -> None:
        self._memory.close()


class SharedMemoryPool:
    """Registered regions, used again by later requests.

    Whether the server is on this machine is found by trying: it can only register a region that it can open. The
    name of a region leaves /dev/shm as soon as the server has it, so that even a killed client leaves none behind.

    Args:
        registrar: tritonclient's own client.
        enabled: False never uses shared memory.
    """

    def __init__(self, registrar: Registrar, enabled: bool = True) -> None:
        self._registrar = registrar
        self._enabled = enabled
        self._free: list[Region] = []
        self._all: list[Region] = []
        self._farewells: list[asyncio.Future[None]] = []
        self._trial = asyncio.Lock()

    @property
    def is_enabled(self) -> bool:
        """False once the server turned out not to share this machine's memory."""
        return self._enabled

    async def acquire(self, byte_size: int) -> Region | None:
        """A region of at least `byte_size` bytes for one request; None if the answer should come by the network."""
        if not self._enabled or byte_size < MINIMUM_BYTES:
            return None
        fitting = [region for region in self._free if region.byte_size >= byte_size]
        if fitting:
            region = min(fitting, key=lambda region: region.byte_size)
            self._free.remove(region)
            return region
        async with self._trial:  # while the first one is tried, the others wait for what it shows
            return await self._register(byte_size) if self._enabled else None

    def release(self, region: Region) -> None:
        """Give a region back whose request was answered.

        One whose request was cancelled must be abandoned instead: the server may still write into it.
        """
        self._free.append(region)

    def settle(self, region: Region | None, error: InferenceServerException) -> None:
        """Give a region back, or up, whose request failed with `error`."""
        if region is not None and str(error.status()) in ANSWERED:
            self.release(region)
        else:
            self.abandon(region)

    def abandon(self, region: Region | None) -> None:
        """Give up a region of which it is not certain that the server is done with it."""
        if region is not None:
            self._all.remove(region)
            self._farewells.append(asyncio.ensure_future(self._take_back(region)))

    async def forget(self, region: Region) -> None:
        """Take back a region that the server does not know or cannot use, and those that are free; new ones follow."""
        stale, self._free = [region, *self._free], []
        self._all = [other for other in self._all if other not in stale]
        for other in stale:
            await self._take_back(other)

    async def close(self) -> None:
        """Take back all regions."""
        regions, self._all, self._free = self._all, [], []
        for region in regions:
            await self._take_back(region)
        await asyncio.gather(*self._farewells)

    async def _take_back(self, region: Region) -> None:
        try:
            await self._registrar.unregister_system_shared_memory(region.name)
        except Exception as error:  # the server may be gone already
            logger.debug("shared memory region %s could not be unregistered: %s", region.name, error)
        region.close()

    async def _register(self, byte_size: int) -> Region | None:
        try:
            region = Region(byte_size)
        except OSError as error:
            logger.warning("no shared memory (%s): pictures come by the network", error)
            self._enabled = False
            return None
        try:
            await self._registrar.register_system_shared_memory(region.name, f"/{region.name}", byte_size)
        except Exception as error:
            logger.debug("the server cannot use shared memory: %s", error)
            # It has no such region: it is on another machine. Anything else may pass.
            self._enabled = "open shared memory region" not in str(error)
            region.close()
            return None
        finally:
            region.unlink()
        self._all.append(region)
        return region
