"""The TCP ports of a server: free ones, and those that somebody else has."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Mapping

FREE_PORTS = range(20_000, 32_768)
"""Where free ports are looked for: below those that Linux gives to outgoing connections, any of which could take one
while the models are loaded."""


class PortError(ValueError):
    """A port or an address cannot be bound; the message names the option and the remedy."""


def free_ports(count: int) -> list[int]:
    """`count` different free TCP ports; all sockets are held until all ports are known."""
    sockets: list[socket.socket] = []
    try:
        for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)):
            if len(sockets) == count:
                break
            probe = socket.socket()
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                probe.close()
            else:
                sockets.append(probe)
        return [int(held.getsockname()[1]) for held in sockets]
    finally:
        for held in sockets:
            held.close()


def check_ports(host: str, ports: Mapping[str, int]) -> None:
    """
    Args:
        host: the address to bind.
        ports: by the name of the option, like --http-port.

    Raises:
        PortError: one of them cannot be bound.
    """
    family, address = check_address(host)
    for option, port in ports.items():
        with socket.socket(family) as probe:
            # Connections that a server has closed do not hold its port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                raise PortError(_reason(error, host, option, port)) from None


def check_address(host: str) -> tuple[int, str]:
    """The family of the address, and the address as a number.

    Raises:
        PortError: there is no such address.
    """
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise PortError(
            f"--host {host}: is no address ({why}); 127.0.0.1 is this machine, 0.0.0.0 lets others in"
        ) from None
    return family, str(address)


def _reason(error: OSError, host: str, option: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{option} {port}: {host}:{port} is already in use; end the program that has it, or choose another port "
            "(0 takes a free one)"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: is no address of this machine; 127.0.0.1 is, and 0.0.0.0 means all that it has"
    return f"{option} {port}: {host}:{port} cannot be bound: {os.strerror(error.errno or 0)}; choose another port"
