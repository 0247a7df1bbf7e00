"""The Kubernetes manifests against the published schemas and our command line; no cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from node.registration import check_registration
from tests.deploy.files import DEPLOY, node, parse
from tests.deploy.kustomize import Manifest, build, containers, load

FOLDER = DEPLOY / "kubernetes"
OVERLAYS = ("cpu", "gpu")
VERSIONS = ("1.30", "1.37")
STOP_S = 30 + 3 + 4 + 4
"""--drain-timeout and what comes after it."""


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return build(FOLDER / "overlays" / request.param)


def of_kind(manifests: list[Manifest], *kinds: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] in kinds}


def workloads(manifests: list[Manifest]) -> dict[str, Manifest]:
    found = of_kind(manifests, "Deployment", "StatefulSet")
    assert set(found) == {"router", "prefill", "decode"}
    return found


def pod(manifest: Manifest) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return spec


def arguments(manifest: Manifest, manifests: list[Manifest]) -> list[str]:
    """As the container gets them, with a folder of keys as in Compose."""
    (container,) = containers(manifest)
    values = {"POD_IP": "10.0.0.7", **of_kind(manifests, "ConfigMap")["tandem"]["data"]}
    names = {"/etc/tandem/api.keys": "/run/secrets/api_keys", "/etc/tandem/cluster.key": "/run/secrets/cluster_key"}
    said = []
    for argument in container["args"]:
        for name, value in {**{f"$({name})": value for name, value in values.items()}, **names}.items():
            argument = argument.replace(name, value)
        assert "$(" not in argument and "/etc/" not in argument, argument
        said.append(argument)
    return said


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_are_kept(manifests: list[Manifest], version: str) -> None:
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_fault_is_found() -> None:
    (broken,) = of_kind(build(FOLDER / "overlays" / "cpu"), "StatefulSet").values()
    broken["spec"]["replica"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_the_secret_template_keeps_the_schema_and_has_what_is_mounted(manifests: list[Manifest]) -> None:
    (secret,) = load(FOLDER / "secret.example.yaml")
    kubernetes_validate.validate(secret, VERSIONS[-1], strict=True)
    for manifest in workloads(manifests).values():
        (mounted,) = [each["secret"] for each in pod(manifest)["volumes"] if "secret" in each]
        assert mounted["secretName"] == secret["metadata"]["name"]
        keys = {each["key"] for each in mounted["items"]}
        assert keys <= set(secret["stringData"])
        assert ("cluster.key" in keys) == (manifest["metadata"]["name"] != "router"), "what only nodes need"


def test_images_that_are_on_a_machine_are_not_pulled(manifests: list[Manifest]) -> None:
    """By default every image whose tag is latest is."""
    for manifest in workloads(manifests).values():
        assert containers(manifest)[0]["imagePullPolicy"] == "IfNotPresent"


def test_pods_of_a_role_are_on_several_machines_where_there_are_some(manifests: list[Manifest]) -> None:
    for manifest in workloads(manifests).values():
        (spread,) = pod(manifest)["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        assert spread["labelSelector"] == manifest["spec"]["selector"]


def test_a_pod_that_does_not_work_may_be_evicted(manifests: list[Manifest]) -> None:
    for budget in of_kind(manifests, "PodDisruptionBudget").values():
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_new_node_waits_for_the_card_of_an_old_one_only_where_there_are_cards() -> None:
    for overlay, surge in (("cpu", 1), ("gpu", 0)):
        found = of_kind(build(FOLDER / "overlays" / overlay), "Deployment")
        assert [each["spec"]["strategy"]["rollingUpdate"]["maxSurge"] for each in found.values()] == [surge] * 2
        taints = [each["key"] for one in found.values() for each in pod(one).get("tolerations", ())]
        assert taints == (["nvidia.com/gpu"] * 2 if overlay == "gpu" else [])


@pytest.mark.parametrize("role", ("prefill", "decode"))
def test_a_node_takes_its_settings(role: str, manifests: list[Manifest], secrets: Path) -> None:
    config = node(arguments(workloads(manifests)[role], manifests), secrets)
    assert check_registration(config.role, config.server) is not None
    assert config.role.value == role
    assert config.transfer.host == "10.0.0.7" and config.server.advertise_url == "http://10.0.0.7:30000"


def test_the_router_takes_its_settings(manifests: list[Manifest]) -> None:
    values = parse(arguments(workloads(manifests)["router"], manifests))
    assert (values["host"], values["port"]) == ("0.0.0.0", 30000)


def test_nodes_register_at_every_router(manifests: list[Manifest], secrets: Path) -> None:
    """By the names that a StatefulSet gives, of a Service that has them before they are ready."""
    found = workloads(manifests)
    service = of_kind(manifests, "Service")[found["router"]["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    names = [
        f"http://router-{i}.{service['metadata']['name']}:30000" for i in range(found["router"]["spec"]["replicas"])
    ]
    for role in ("prefill", "decode"):
        assert list(node(arguments(found[role], manifests), secrets).server.routers) == names


def test_a_rank_has_a_card_each(manifests: list[Manifest], secrets: Path) -> None:
    for role in ("prefill", "decode"):
        manifest = workloads(manifests)[role]
        config = node(arguments(manifest, manifests), secrets)
        cards = containers(manifest)[0]["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert cards == (config.engine.dp_size if config.model.device == "cuda" else 0)


def test_selectors_find_their_pods(manifests: list[Manifest]) -> None:
    labels = {name: each["spec"]["template"]["metadata"]["labels"] for name, each in workloads(manifests).items()}
    selectors = [each["spec"]["selector"]["matchLabels"] for each in workloads(manifests).values()]
    selectors += [each["spec"]["selector"] for each in of_kind(manifests, "Service").values()]
    budgets = of_kind(manifests, "PodDisruptionBudget")
    selectors += [each["spec"]["selector"]["matchLabels"] for each in budgets.values()]
    for selector in selectors:
        assert sum(selector.items() <= each.items() for each in labels.values()) == 1
    assert set(budgets) == set(labels)


def test_pods_may_drain(manifests: list[Manifest]) -> None:
    for name, manifest in workloads(manifests).items():
        (container,) = containers(manifest)
        waits = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert pod(manifest)["terminationGracePeriodSeconds"] > STOP_S + int(waits[1])
        assert (name == "router") == (int(waits[1]) > 0), "nodes leave by themselves before they refuse"


def test_probes_ask_what_they_are_for(manifests: list[Manifest]) -> None:
    """A router without nodes is not ready, but no restart mends it. A node that drains or loads to take another role
    is not to be ended for that."""
    for name, manifest in workloads(manifests).items():
        (container,) = containers(manifest)
        paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness")}
        assert paths == {"startup": "/" if name == "router" else "/health", "readiness": "/health"}
        liveness = container["livenessProbe"]
        if name == "router":
            assert liveness["httpGet"]["path"] == "/"
        else:
            assert liveness["exec"]["command"] == ["python3", "-I", "-S", "/opt/tandem/healthy.py", "--alive"]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 30


def test_nobody_is_root_or_writes_to_the_image(manifests: list[Manifest]) -> None:
    for manifest in workloads(manifests).values():
        context, (container,) = pod(manifest)["securityContext"], containers(manifest)
        assert context["runAsNonRoot"] and context["runAsUser"] == 10001
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_mounts_have_volumes(manifests: list[Manifest]) -> None:
    for manifest in workloads(manifests).values():
        volumes = {each["name"] for each in pod(manifest)["volumes"]}
        assert {each["name"] for each in containers(manifest)[0]["volumeMounts"]} == volumes


def test_each_process_is_scraped_once(manifests: list[Manifest]) -> None:
    """By the ServiceMonitor, whose kind is not among the published schemas."""
    monitor = yaml.safe_load((FOLDER / "monitoring" / "servicemonitor.yaml").read_text())
    wanted = monitor["spec"]["selector"]["matchLabels"]
    (refused,) = monitor["spec"]["selector"]["matchExpressions"]
    assert refused["operator"] == "NotIn"
    found = [
        each["spec"]["selector"]["app.kubernetes.io/component"]
        for each in of_kind(manifests, "Service").values()
        if wanted.items() <= each["metadata"]["labels"].items()
        and each["metadata"]["labels"].get(refused["key"]) not in refused["values"]
    ]
    assert sorted(found) == ["decode", "prefill", "router"]
    ports = {port["name"] for each in of_kind(manifests, "Service").values() for port in each["spec"]["ports"]}
    assert {each["port"] for each in monitor["spec"]["endpoints"]} <= ports
