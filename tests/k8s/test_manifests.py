"""What would be applied, without a cluster: each combination against the schemas, and what its containers may do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from syncstack.seccomp.profile import parse
from tests.compose.stack import ROOT, check, run
from tests.k8s.cluster import kustomization

RELEASES = ("1.25", "1.31", "1.37")
SHIPPED = {
    "k8s/colocated": "restrictive", "k8s/disagg": "restrictive",
    "k8s/base/colocated": None, "k8s/base/disagg": None,
}  # fmt: skip
"""What is applied, and the profile of its pods: None is the runtime's own."""
WORKLOADS = ("Job", "StatefulSet", "DaemonSet", "Deployment", "Pod")


@cache
def _text(folder: str) -> str:
    return check("kubectl", "kustomize", folder)


def rendered(folder: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(_text(folder)))


@pytest.fixture(scope="module")
def sidecar() -> Iterator[str]:
    """What needs a newer release than the test cluster's: rendered and checked, not run."""
    text = "resources: [../../k8s/colocated]\ncomponents: [../../k8s/components/native-sidecar]\n"
    with kustomization("k8s-sidecar", text) as folder:
        yield folder


@pytest.fixture(scope="module")
def own() -> Iterator[str]:
    """A kustomization of a user's own, which takes other components."""
    components = ("seccomp-permissive", "model-volume", "disruption-budget")
    text = (
        "resources: [../../k8s/base/disagg]\n"
        f"components: [{', '.join(f'../../k8s/components/{name}' for name in components)}]\n"
        "configMapGenerator:\n"
        "  - {name: settings, namespace: syncstack, behavior: merge, "
        "literals: [SYNCSTACK_MODEL=/models/mine, OWN_MODEL=/models/mine]}\n"
    )
    with kustomization("k8s-own", text) as folder:
        yield folder


def pods(folder: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and pod of each workload."""
    return [
        (f"{each['metadata']['namespace']}/{each['metadata']['name']}", each["spec"]["template"]["spec"])
        for each in rendered(folder)
        if each["kind"] in WORKLOADS
    ]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("folder", SHIPPED)
def test_every_object_is_valid_by_the_schema_of_each_release(folder: str, release: str) -> None:
    for each in rendered(folder):
        kubernetes_validate.validate(each, release, strict=True)


@pytest.mark.parametrize("folder", SHIPPED)
def test_f03_every_pod_of_the_workload_meets_the_restricted_standard(folder: str) -> None:
    """Its level is the namespace's, so that a pod that does not meet it is refused and not only warned of."""
    (namespace,) = (
        each for each in rendered(folder) if each["kind"] == "Namespace" and each["metadata"]["name"] == "syncstack"
    )
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    workload = [(name, pod) for name, pod in pods(folder) if name.startswith("syncstack/")]
    assert workload
    for name, pod in workload:
        assert not {"hostPID", "hostIPC", "hostNetwork", "shareProcessNamespace"} & pod.keys(), name
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"]["type"] in ("Localhost", "RuntimeDefault")
        allowed = {"name", "configMap", "emptyDir", "secret", "persistentVolumeClaim"}
        assert all(volume.keys() <= allowed for volume in pod["volumes"])
        for container in containers(pod):
            assert ladder(container) == LOCKED, f"{name}/{container['name']}"


LOCKED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
"""The lowest rung of the privilege ladder."""


def ladder(container: dict[str, Any]) -> dict[str, Any]:
    """What a container may do, but for its profile: that has a test of its own."""
    context = dict(container["securityContext"])
    context.pop("seccompProfile", None)
    return context


def test_the_installer_is_the_one_exception_and_has_one_folder_of_its_node_and_no_capability() -> None:
    ((_, pod),) = ((name, pod) for name, pod in pods("k8s/disagg") if name == "syncstack-seccomp/installer")
    (container,) = containers(pod)
    assert ladder(container) == {**LOCKED, "runAsUser": 0, "runAsGroup": 0}
    paths = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
    assert paths == ["/var/lib/kubelet/seccomp"]
    assert not {"hostPID", "hostIPC", "hostNetwork"} & pod.keys()
    assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("folder", SHIPPED)
def test_f01_f02_a_profile_that_is_named_is_installed_and_waited_for(folder: str) -> None:
    """Its path is relative to the kubelet's folder, and is where the installer writes what the ConfigMap holds."""
    profile = SHIPPED[folder]
    for name, pod in pods(folder):
        if not name.startswith("syncstack/"):
            continue
        found = pod["securityContext"]["seccompProfile"]
        if profile is None:
            assert found == {"type": "RuntimeDefault"}
            continue
        assert found == {"type": "Localhost", "localhostProfile": f"syncstack/{profile}.json"}
        first = containers(pod)[0]
        assert first["args"][:3] == ["syncstack", "seccomp", "await"]
        assert first["args"][-1] == f"/profiles/{profile}.json"
        assert first["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, (
            "it runs before the profile is there"
        )
    maps = [each for each in rendered(folder) if each["metadata"]["name"].startswith("seccomp-profiles-")]
    assert sorted(each["metadata"]["namespace"] for each in maps) == (
        ["syncstack", "syncstack-seccomp"] if profile else []
    )
    for each in maps:
        assert each["data"][f"{profile}.json"] == (ROOT / "seccomp" / f"{profile}.json").read_text()


def test_the_profiles_are_flat_as_containerd_reads_no_conditions() -> None:
    for path in (ROOT / "seccomp").glob("*.json"):
        found = parse(path.read_bytes(), origin=str(path))
        assert found.arch_map is None
        assert all(rule.names and not rule.includes and not rule.excludes for rule in found.syscalls)


def test_another_profile_is_another_component(own: str) -> None:
    settings = [each for each in rendered(own) if each["metadata"]["name"].startswith("settings-")]
    assert [each["data"]["SYNCSTACK_PROFILE"] for each in settings] == ["permissive"]
    for name, pod in pods(own):
        if name.startswith("syncstack/"):
            assert pod["securityContext"]["seccompProfile"]["localhostProfile"] == "syncstack/permissive.json"
            assert containers(pod)[0]["args"][-1] == "/profiles/permissive.json"


def test_a_model_of_ones_own_is_a_claim_that_nobody_writes(own: str) -> None:
    (settings,) = (each for each in rendered(own) if each["metadata"]["name"].startswith("settings-"))
    assert (settings["data"]["SYNCSTACK_MODEL"], settings["data"]["OWN_MODEL"]) == ("/models/mine", "/models/mine")
    for name, pod in pods(own):
        if not name.startswith("syncstack/"):
            continue
        (models,) = (volume for volume in pod["volumes"] if volume["name"] == "models")
        assert models.pop("persistentVolumeClaim") == {"claimName": "syncstack-models", "readOnly": True}
        assert models == {"name": "models"}
        assert [each["name"] for each in pod["initContainers"]] == ["profile", "model"]
        assert pod["initContainers"][1]["args"][-1] == "--model=$(OWN_MODEL)"


@pytest.mark.parametrize("release", ["1.31", "1.37"])
def test_the_engine_as_a_sidecar_comes_last_and_ends_by_itself(sidecar: str, release: str) -> None:
    for each in rendered(sidecar):
        kubernetes_validate.validate(each, release, strict=True)
    ((_, pod),) = ((name, pod) for name, pod in pods(sidecar) if name == "syncstack/colocated")
    ((_, base),) = ((name, pod) for name, pod in pods("k8s/colocated") if name == "syncstack/colocated")
    assert [each["name"] for each in containers(pod)] == ["profile", "model", "engine", "trainer"]
    engine = pod["initContainers"][-1]
    assert engine.pop("restartPolicy") == "Always"
    assert engine == base["containers"][1]
    assert "--end-engines" not in pod["containers"][0]["args"]


def test_the_budget_is_for_the_engines(own: str) -> None:
    (budget,) = (each for each in rendered(own) if each["kind"] == "PodDisruptionBudget")
    (engine,) = (each for each in rendered(own) if each["kind"] == "StatefulSet")
    assert budget["spec"]["selector"]["matchLabels"].items() <= engine["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("release", RELEASES)
def test_the_components_are_valid_by_the_schema_of_each_release(own: str, release: str) -> None:
    for each in rendered(own):
        kubernetes_validate.validate(each, release, strict=True)


def test_the_layouts_run_what_compose_runs() -> None:
    """The engine's options are compose's, but for the model's path, which is in the environment here."""
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    told = compose["x-engine-command"].partition(" -- ")[2].split()
    options = {
        f"{name}={value}" if not value.startswith("-") else name
        for name, value in zip(told, [*told[1:], "-"], strict=True)
    }
    for folder, name in (("k8s/base/colocated", "syncstack/colocated"), ("k8s/base/disagg", "syncstack/engine")):
        (engine,) = (each for each in containers(dict(pods(folder))[name]) if each["name"] == "engine")
        mine = engine["args"][engine["args"].index("--") + 1 :]
        assert mine
        assert set(mine) <= options, folder


@pytest.mark.parametrize("variables", [{"LAYOUT": "mixed"}, {"SECCOMP": "none"}, {"STEPS": "many"}], ids=str)
def test_up_refuses_what_it_does_not_know_before_anything_is_asked(variables: dict[str, str], tmp_path: Path) -> None:
    result = run("k8s/up", KUBECONFIG=str(tmp_path / "none"), **variables)
    (name,) = variables
    assert (result.returncode, result.stdout.count("\n")) == (2, 1)
    assert name in result.stdout
    assert "expected" in result.stdout or "positive" in result.stdout


def test_up_says_what_to_do_without_a_cluster(tmp_path: Path) -> None:
    result = run("k8s/up", KUBECONFIG=str(tmp_path / "none"))
    assert result.returncode == 2
    assert result.stdout.startswith("error: kubectl has no current context")
