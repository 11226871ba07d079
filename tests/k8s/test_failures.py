"""What goes wrong in a cluster, and what it says: real pods that are kept from starting."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.compose.stack import check, run
from tests.k8s.cluster import get, kubectl, kustomization, until

pytestmark = pytest.mark.usefixtures("cluster")

Apply = Callable[[str], None]


@pytest.fixture
def apply() -> Iterator[Apply]:
    """Apply the colocated layout under the restrictive profile, with patches."""

    def start(patches: str) -> None:
        with kustomization("k8s-test", f"resources: [../../k8s/colocated]\npatches:\n{patches}") as folder:
            check("kubectl", "apply", "--kustomize", folder)

    yield start
    run("make", "down-k8s", timeout_s=180)


def ended(container: str) -> str | None:
    """What a first container said last, once it has failed."""
    for pod in get("pods", "--selector=app.kubernetes.io/name=colocated")["items"]:
        for status in pod["status"].get("initContainerStatuses", []):
            state = status["state"].get("terminated") or status["lastState"].get("terminated")
            if status["name"] == container and state and state["exitCode"]:
                return kubectl("logs", pod["metadata"]["name"], "--container", container)
    return None


def test_f01_without_its_profile_a_pod_says_what_it_waits_for_and_nothing_of_it_starts(apply: Apply) -> None:
    apply(
        "  - target: { kind: DaemonSet }\n"
        "    patch: |-\n"
        "      $patch: delete\n"
        "      apiVersion: apps/v1\n"
        "      kind: DaemonSet\n"
        "      metadata: { name: installer, namespace: syncstack-seccomp }\n"
        "  - target: { kind: Job }\n"
        "    patch: |-\n"
        "      - { op: replace, path: /spec/template/spec/initContainers/0/args/4, value: --wait=3 }\n"
    )
    said = until("the wait is over", lambda: ended("profile"))
    assert "waiting for seccomp profile restrictive.json: nobody answers at http://" in said
    assert "this node did not get the seccomp profile restrictive.json within 3 s" in " ".join(said.split())
    (pod,) = get("pods", "--selector=app.kubernetes.io/name=colocated")["items"]
    assert all("waiting" in status["state"] for status in pod["status"]["containerStatuses"])
    message = pod["status"]["initContainerStatuses"][0]
    assert "did not get" in " ".join(str(message).split()), "kubectl describe pod would not say it"
    result = run("make", "up-k8s")
    assert (result.returncode, "this cluster has one already (job.batch/colocated" in result.stdout) == (2, True)


def test_a_model_that_is_none_is_said_by_the_first_container_and_nothing_trains(apply: Apply) -> None:
    apply(
        "  - target: { kind: Job }\n"
        "    patch: |-\n"
        "      - { op: replace, path: /spec/template/spec/initContainers/1/args/5, value: --model=/models/none }\n"
    )
    said = until("the model was looked at", lambda: ended("model"))
    assert "error: " in said
    assert "/models/none" in said
    assert "Traceback" not in said
