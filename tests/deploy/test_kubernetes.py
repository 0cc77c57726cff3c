"""The manifests: by Kubernetes' own schemas, and every name that one of them has for another."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.compose import ROOT

FOLDER = ROOT / "deploy/kubernetes"
VERSION = "1.34"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
MANIFESTS: dict[str, Any] = {name: yaml.safe_load((FOLDER / name).read_text()) for name in KUSTOMIZATION["resources"]}
DEPLOYMENT = MANIFESTS["deployment.yaml"]
POD = DEPLOYMENT["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
PORTS = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
GENERATED = {generator["name"]: generator["files"] for generator in KUSTOMIZATION["configMapGenerator"]}


def one(kind: str, name: str = "triton-diffusion") -> Any:
    (found,) = (item for item in MANIFESTS.values() if (item["kind"], item["metadata"]["name"]) == (kind, name))
    return found


@pytest.mark.parametrize("name", MANIFESTS)
def test_each_manifest_is_what_kubernetes_allows_and_nothing_else(name: str) -> None:
    kubernetes_validate.validate(MANIFESTS[name], VERSION, strict=True)


def test_the_schemas_would_find_a_misspelt_field() -> None:
    wrong = copy.deepcopy(DEPLOYMENT)
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessProb"):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_every_file_is_used() -> None:
    optional = {"grpc-route.yaml", "prometheus-adapter-values.yaml", "kustomization.yaml"}
    generated = {file for files in GENERATED.values() for file in files}
    assert {path.name for path in FOLDER.iterdir()} == set(MANIFESTS) | generated | optional


@pytest.mark.parametrize(
    "selector",
    [
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        one("Service")["spec"]["selector"],
        one("Service", "triton-diffusion-headless")["spec"]["selector"],
        one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        POD["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ],
)
def test_selectors_select_the_pods(selector: dict[str, str]) -> None:
    assert selector
    assert selector.items() <= POD["metadata"]["labels"].items()


def test_services_and_probes_use_ports_that_the_container_has() -> None:
    for name in ("triton-diffusion", "triton-diffusion-headless"):
        for port in one("Service", name)["spec"]["ports"]:
            assert PORTS[port["targetPort"]] == port["port"]
    for probe in ("startupProbe", "readinessProbe"):
        assert CONTAINER[probe]["httpGet"]["port"] in PORTS
    assert int(POD["metadata"]["annotations"]["prometheus.io/port"]) == PORTS["metrics"]


def test_the_grpc_route_leads_to_a_service() -> None:
    route = yaml.safe_load((FOLDER / "grpc-route.yaml").read_text())
    assert route["metadata"]["namespace"] == KUSTOMIZATION["namespace"]
    for backend in (backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]):
        assert backend["port"] in [port["port"] for port in one("Service", backend["name"])["spec"]["ports"]]


def test_volumes_accounts_and_the_autoscaler_name_what_there_is() -> None:
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == set(volumes)
    assert volumes["deploy"]["configMap"]["name"] in GENERATED
    assert one("PersistentVolumeClaim", volumes["cache"]["persistentVolumeClaim"]["claimName"])
    assert one("ServiceAccount", POD["spec"]["serviceAccountName"])
    assert one("Namespace", KUSTOMIZATION["namespace"])
    target = one("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (DEPLOYMENT["kind"], DEPLOYMENT["metadata"]["name"])
    assert "replicas" not in DEPLOYMENT["spec"], "two would decide on it"
    assert [image["name"] for image in KUSTOMIZATION["images"]] == [CONTAINER["image"]]


def test_serve_takes_the_arguments_and_the_deploy_file() -> None:
    (mounted,) = (mount["mountPath"] for mount in CONTAINER["volumeMounts"] if mount["name"] == "deploy")
    arguments = [argument.replace(mounted, str(FOLDER)) for argument in CONTAINER["args"]]
    command = [sys.executable, "-m", "triton_diffusion.cli", "serve", *arguments, "--dry-run"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    deployed = yaml.safe_load((FOLDER / "deploy.yaml").read_text())
    assert f"{deployed['name']}/config.pbtxt" in shown
    assert f"max_batch_size: {deployed['max_num_seqs']}" in shown


def test_the_autoscaler_and_the_adapter_speak_of_one_metric() -> None:
    (metric,) = one("HorizontalPodAutoscaler")["spec"]["metrics"]
    adapter = yaml.safe_load((FOLDER / "prometheus-adapter-values.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert rule["seriesQuery"].startswith(rule["name"]["as"])


def test_kubernetes_waits_longer_than_the_server_takes() -> None:
    options = dict(argument.split("=", 1) for argument in CONTAINER["args"])
    asleep = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["spec"]["terminationGracePeriodSeconds"] >= asleep + float(options["--exit-timeout"]) + 10
    liveness = CONTAINER["livenessProbe"]
    (timeout,) = (word for word in liveness["exec"]["command"] if word.startswith("--timeout="))
    assert liveness["timeoutSeconds"] > float(timeout.partition("=")[2])
    startup = CONTAINER["startupProbe"]
    assert DEPLOYMENT["spec"]["progressDeadlineSeconds"] > startup["periodSeconds"] * startup["failureThreshold"]


def test_the_pod_keeps_to_the_restricted_standard_that_its_namespace_asks_for() -> None:
    assert one("Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    pod, container = POD["spec"]["securityContext"], CONTAINER["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["allowPrivilegeEscalation"] is False
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert container["readOnlyRootFilesystem"] is True
    assert CONTAINER["resources"]["requests"]["nvidia.com/gpu"] == CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
