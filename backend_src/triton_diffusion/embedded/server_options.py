"""What `serve` may be told about the server itself."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from triton_diffusion.embedded.ports import PortError, check_address
from triton_diffusion.errors import ConfigurationError

LONGEST_EXIT_TIMEOUT = 86_400.0

SET_ELSEWHERE = {
    "model-repository": "MODEL or --repository",
    "http-address": "--host",
    "http-port": "--http-port",
    "grpc-address": "--host",
    "grpc-port": "--grpc-port",
    "metrics-address": "--host",
    "metrics-port": "--metrics-port",
    "exit-timeout-secs": "--exit-timeout",
}
"""Options of tritonserver that are options of `serve`, too."""

NEEDED = ("id", "backend-directory", "allow-http")
"""Options of tritonserver that `serve` itself relies on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """
    Args:
        host: the address to bind.
        http_port, grpc_port, metrics_port: 0 takes a free one.
        exit_timeout: seconds for running requests to finish at the end.
        triton_options: further options of tritonserver, `NAME=VALUE` each.
        quiet: of the log, only warnings and errors are shown.

    Raises:
        ConfigurationError: naming the option, its value and what is allowed.
    """

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    exit_timeout: float
    triton_options: Sequence[str]
    quiet: bool

    def __post_init__(self) -> None:
        ports = {"--http-port": self.http_port, "--grpc-port": self.grpc_port, "--metrics-port": self.metrics_port}
        owners: dict[int, str] = {}
        for option, port in ports.items():
            if not 0 <= port <= 65535:
                raise ConfigurationError(f"{option} {port}: must be from 0 to 65535; 0 takes a free one")
            if port and port in owners:
                raise ConfigurationError(f"{option} {port}: {owners[port]} is the same; give each a port of its own")
            owners[port] = option
        if not 0 <= self.exit_timeout <= LONGEST_EXIT_TIMEOUT or math.isnan(self.exit_timeout):
            raise ConfigurationError(
                f"--exit-timeout {self.exit_timeout:g}: must be seconds from 0 to {LONGEST_EXIT_TIMEOUT:g}, a day"
            )
        try:
            check_address(self.host)
        except PortError as error:
            raise ConfigurationError(str(error)) from None
        for text in self.triton_options:
            _check_triton_option(text)

    @property
    def arguments(self) -> list[str]:
        """The further command line arguments for tritonserver."""
        return [f"--{text.removeprefix('--')}" for text in self.triton_options]


def _check_triton_option(text: str) -> None:
    found = re.fullmatch(r"(?:--)?([a-z][a-z0-9-]*)=.*", text, re.DOTALL)
    if found is None:
        raise ConfigurationError(
            f"--triton-option {text}: must be NAME=VALUE, an option of tritonserver, like log-verbose=1"
        )
    if found[1] in SET_ELSEWHERE:
        raise ConfigurationError(f"--triton-option {text}: give {SET_ELSEWHERE[found[1]]} instead")
    if found[1] in NEEDED:
        raise ConfigurationError(f"--triton-option {text}: serve needs {found[1]} for itself; leave it out")
