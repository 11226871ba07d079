"""Fixtures of the cluster tests. All of it is real: the cluster, the pods, the profiles on the node, the model."""

from __future__ import annotations

import shutil

import pytest

from tests.compose.stack import ROOT, run
from tests.k8s.cluster import START_S


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "k8s"):
            item.add_marker(pytest.mark.k8s)
            item.add_marker(pytest.mark.timeout(3 * START_S))


@pytest.fixture(scope="session", autouse=True)
def kubectl_there() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")


@pytest.fixture(scope="session")
def cluster(kubectl_there: None) -> None:
    """Skip where there is no cluster to ask; whatever else is missing is a failure."""
    result = run("kubectl", "--request-timeout=20s", "get", "nodes", timeout_s=30)
    if result.returncode:
        pytest.skip(f"kubectl get nodes does not answer: {result.stdout.strip().splitlines()[-1]}")
