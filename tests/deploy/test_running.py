"""What the containers run, run for real: the server, its health check, Prometheus, and the dashboard's queries."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import compose
from tests.deploy.compose import CPU, ROOT, seconds, words
from tests.deploy.prometheus import CONFIG, Prometheus, binary, running, wait_for
from tests.deploy.test_dockerfile import instruction
from triton_diffusion.metric import METRICS
from triton_diffusion_client import DiffusionClient, SamplingParams

DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/triton-diffusion.json").read_text())
ADAPTER = yaml.safe_load((ROOT / "deploy/kubernetes/prometheus-adapter-values.yaml").read_text())
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}, {target['legendFormat']}")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]
SERVICE: dict[str, Any] = compose.read(CPU)["services"]["triton"]


@dataclass(frozen=True)
class Served:
    grpc: str
    metrics: str


def program(name: str) -> str:
    """A command of the image's virtual environment, in that of the tests."""
    return str(Path(sys.executable).parent / name)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The CPU variant's container without the container: its command, with free ports and its volume's folder."""
    (models,) = (entry.split(":")[0] for entry in SERVICE["volumes"] if ":/models:" in entry)
    name, *arguments = json.loads(instruction("ENTRYPOINT"))[-2:]
    arguments += words(SERVICE["command"])
    arguments = [str(ROOT / models) if word == "/models" else word for word in arguments]
    arguments[arguments.index("0.0.0.0")] = "127.0.0.1"
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as output:
        process = subprocess.Popen([program(name), *arguments, *ports], stderr=output)

    def ready() -> re.Match[str] | None:
        assert process.poll() is None, log.read_text()
        return re.search(r"ready: gRPC (\S+), HTTP \S+, metrics (\S+)/metrics", log.read_text())

    try:
        wait_for(ready, "the server is ready", timeout=200)
        found = ready()
        assert found is not None
        yield Served(found[1], found[2])
        process.send_signal(getattr(signal, instruction("STOPSIGNAL")))
        assert process.wait(timeout=seconds(SERVICE["stop_grace_period"])) == 0
    finally:
        process.kill()


@pytest.fixture(scope="module")
def prometheus(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes the server while requests run, right ones and wrong ones."""
    done = threading.Event()

    def send() -> None:
        right, wrong = SamplingParams(num_inference_steps=3), SamplingParams(height=7, width=7)
        with DiffusionClient(served.grpc, "shapes") as client:
            while not done.is_set():
                client.generate(["a large red circle on a white background"] * 3, [right, right, wrong])

    folder = tmp_path_factory.mktemp("prometheus")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running(served.metrics, folder, port, namespace="here", pod="triton-0") as started:
        sender = threading.Thread(target=send)
        sender.start()
        yield started
        done.set()
        sender.join()


def test_the_health_check_of_the_compose_file_finds_the_server_healthy(served: Served) -> None:
    kind, name, *arguments = SERVICE["healthcheck"]["test"]
    assert kind == "CMD"
    checked = subprocess.run(
        [program(name), *arguments],
        env={**os.environ, "TRITON_DIFFUSION_URL": served.grpc},
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr
    assert re.fullmatch(r"healthy: shapes: answered in \S+ s\n", checked.stdout)


def test_prometheus_scrapes_the_server(prometheus: Prometheus) -> None:
    wait_for(lambda: prometheus.values('up{job="triton"} == 1'), "the target is up")
    wait_for(lambda: prometheus.values("increase(triton_diffusion_images_total[1m]) > 0"), "images are counted")


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_of_the_dashboard_returns_data(prometheus: Prometheus, query: str) -> None:
    if "nv_gpu_" in query and not Path("/dev/nvidiactl").exists():
        pytest.skip("Triton has GPU metrics only where there is a GPU")
    query = query.replace("$__rate_interval", "1m").replace("$model", "shapes|other")
    assert "$" not in query
    wait_for(lambda: prometheus.values(query), query)


def test_the_dashboard_finds_the_models(prometheus: Prometheus) -> None:
    (variable,) = DASHBOARD["templating"]["list"]
    series, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
    wait_for(lambda: prometheus.get(f"label/{label}/values", **{"match[]": series}) == ["shapes"], series)


def test_the_autoscaler_gets_its_metric(prometheus: Prometheus) -> None:
    (rule,) = ADAPTER["rules"]["custom"]
    assert prometheus.get("series", **{"match[]": rule["seriesQuery"]})
    query = rule["metricsQuery"].replace("<<.Series>>", rule["name"]["as"]).replace("<<.GroupBy>>", "pod")
    query = query.replace("<<.LabelMatchers>>", 'namespace="here",pod=~"triton-0"')
    assert list(prometheus.values(query)) == ['{"pod": "triton-0"}']


def test_no_alert_fires_while_all_is_well(prometheus: Prometheus) -> None:
    def evaluated() -> list[dict[str, Any]]:
        rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else []

    wait_for(evaluated, "every rule is evaluated")
    assert {rule["name"]: rule["health"] for rule in evaluated()} == {rule["name"]: "ok" for rule in evaluated()}
    assert [rule["name"] for rule in evaluated() if rule["state"] == "firing"] == []


def test_the_alert_rules_fire_when_they_should() -> None:
    promtool = binary("promtool")
    for command in (["check", "config", str(CONFIG)], ["test", "rules", str(CONFIG.parent / "alerts_test.yml")]):
        checked = subprocess.run([promtool, *command], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", ["prometheus/alerts.yml", "grafana/dashboards/triton-diffusion.json"])
def test_every_metric_that_is_asked_for_exists(name: str) -> None:
    asked = set(re.findall(r"triton_diffusion_\w+", (ROOT / "deploy" / name).read_text()))
    assert asked
    assert {re.sub(r"_(bucket|sum|count)$", "", metric) for metric in asked} <= set(METRICS)
