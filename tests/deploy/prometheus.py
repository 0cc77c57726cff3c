"""A real Prometheus for the tests: this machine's own, else the Debian package, unpacked into build/prometheus."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.compose import ROOT

UNPACKED = ROOT / "build/prometheus"
BINARIES = UNPACKED / "root/usr/bin"
CONFIG = ROOT / "deploy/prometheus/prometheus.yml"


def binary(name: str) -> Path:
    """`prometheus` or `promtool`; skips the test where neither the program nor the package is to be had."""
    own = shutil.which(name)
    if own is not None:
        return Path(own)
    if not (BINARIES / name).is_file():
        _unpack()
    return BINARIES / name


def _unpack() -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("needs prometheus and promtool in PATH: without apt-get, they cannot be downloaded")
    UNPACKED.mkdir(parents=True, exist_ok=True)
    # Of this process alone, since tests run in several; nothing of the system's is touched, and nobody has to be root.
    with tempfile.TemporaryDirectory(dir=UNPACKED) as name:
        folder = Path(name)
        for subfolder in ("lists/partial", "cache/archives/partial"):
            (folder / subfolder).mkdir(parents=True)
        options = {
            "Dir::State::Lists": folder / "lists",
            "Dir::Cache": folder / "cache",
            "Acquire::Retries": 0,
            "Acquire::http::Timeout": 20,
            **({"APT::Sandbox::User": "root"} if os.geteuid() == 0 else {}),
        }
        apt = ["apt-get", "-qq", *(f"--option={name}={value}" for name, value in options.items())]
        for command in ([*apt, "update"], [*apt, "download", "prometheus"]):
            try:
                subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=180)
            except subprocess.SubprocessError as error:
                reason = str(getattr(error, "stderr", None) or error).strip()[-300:]
                pytest.skip(f"needs prometheus in PATH; it could not be downloaded: {reason}")
        (package,) = folder.glob("prometheus_*.deb")
        subprocess.run(["dpkg-deb", "--extract", package, folder / "root"], check=True)
        with contextlib.suppress(OSError):  # another process was faster
            (folder / "root").rename(UNPACKED / "root")


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from None

    def values(self, query: str) -> dict[str, float]:
        """What a query gives now, without what is not a number, by labels."""
        found = {json.dumps(one["metric"]): float(one["value"][1]) for one in self.get("query", query=query)["result"]}
        return {labels: value for labels, value in found.items() if not math.isnan(value)}


@contextmanager
def running(target: str, folder: Path, port: int, **labels: str) -> Iterator[Prometheus]:
    """A Prometheus with the configuration of the compose file; only the target and the pace are the test's."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(CONFIG.parent / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target], "labels": labels}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        str(binary("prometheus")),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        wait_for(lambda: _is_ready(prometheus.url), f"{(folder / 'log')}")
        yield prometheus
    finally:
        process.terminate()
        process.wait(timeout=60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready"):
            return True
    except OSError:
        return False


def wait_for(condition: Callable[[], object], what: str, timeout: float = 120) -> None:
    """Until the condition is true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.2)
