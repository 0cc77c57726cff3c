"""Finding a tritonserver, and what is said when there is none."""

from __future__ import annotations

import importlib.util
import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from triton_diffusion.embedded import TritonInstallation, TritonNotFoundError, TritonServer, TritonServerError
from triton_diffusion.embedded.ports import PortError, check_ports
from triton_diffusion.embedded.server_log import ServerLog


def test_the_container_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    monkeypatch.setenv("TRITONSERVER_ROOT", str(tmp_path))
    assert TritonInstallation.find().executable == tmp_path / "bin" / "tritonserver"


def test_without_a_server_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONSERVER_ROOT", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TritonNotFoundError, match=r"pip install 'triton-diffusion\[embedded\]'"):
        TritonInstallation.find()


def test_a_repository_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TritonServerError, match="nowhere is not a directory"), TritonServer(tmp_path / "nowhere"):
        pass


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield int(taken.getsockname()[1])


@pytest.mark.parametrize("option", ["http_port", "grpc_port", "metrics_port"])
def test_a_port_that_is_taken_is_an_error_before_anything_is_started(
    tmp_path: Path, taken_port: int, option: str
) -> None:
    server = TritonServer(tmp_path, **{option: taken_port})  # type: ignore[arg-type]
    flag = f"--{option.replace('_', '-')}"
    with pytest.raises(
        TritonServerError, match=f"^{flag} {taken_port}: .* is already in use; .*another port .0 takes"
    ):
        server.start()
    assert server.poll() is None
    assert list(server.log_lines) == []


def test_a_port_of_a_server_that_ended_is_free() -> None:
    """Its closed connections linger for a minute, which must not hinder a restart."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            accepted.close()  # the side that closes first lingers
            assert client.recv(1) == b""
    check_ports("127.0.0.1", {"--http-port": port})


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no host", "--host no host: is no address"),
        ("192.0.2.1", "--host 192.0.2.1: is no address of this machine"),
    ],
)
def test_an_address_that_cannot_be_bound_is_named(host: str, message: str) -> None:
    with pytest.raises(PortError, match=message):
        check_ports(host, {"--http-port": 0})


class AnotherTriton(BaseHTTPRequestHandler):
    """Calls itself ready, whatever it is asked."""

    def do_GET(self) -> None:
        body = json.dumps({"name": "triton"}).encode() if self.path == "/v2" else b"[]"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Not on the test's output."""


def test_another_server_on_the_port_does_not_make_ours_ready(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), AnotherTriton) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            with pytest.raises(TritonServerError, match="was not ready after 0 s"):
                TritonServer(tmp_path, http_port=other.server_port).wait_until_ready(timeout=0.3)
        finally:
            other.shutdown()
            thread.join()


def test_without_a_gpu_tritons_empty_list_is_explained() -> None:
    log = ServerLog()
    line = 'E1130 00:00:00.000000 1 a.cc:1] "failed to load x: invalid gpu id 0. GPUs with at least 6.0 are: "\n'
    log.read(io.StringIO(line))
    assert log.reason("ended").endswith("6.0 are: none: no GPU was found")


def test_of_a_wrong_option_the_complaint_is_shown_and_not_the_usage(tmp_path: Path) -> None:
    server = TritonServer(tmp_path, arguments=["--nonsense=1"])
    try:
        server.start()
        with pytest.raises(TritonServerError, match="unrecognized option '--nonsense=1'") as failed:
            server.wait_until_ready(timeout=None)
    finally:
        server.stop()
    assert "--http-port" not in str(failed.value)
