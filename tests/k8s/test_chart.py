"""The chart is made of the kustomizations' own files; what it renders is what they render, for the same choices."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.compose.stack import ROOT, check
from tests.k8s.test_manifests import RELEASES, containers

CHART = "k8s/chart"
SAME = {
    ("colocated", "restrictive"): "k8s/colocated", ("disagg", "restrictive"): "k8s/disagg",
    ("colocated", "RuntimeDefault"): "k8s/base/colocated", ("disagg", "RuntimeDefault"): "k8s/base/disagg",
}  # fmt: skip
"""The kustomization of each choice."""


@pytest.fixture(scope="module", autouse=True)
def helm() -> None:
    if shutil.which("helm") is None:
        pytest.skip("helm is not installed")


def template(*values: str, chart: str = CHART) -> list[dict[str, Any]]:
    """The objects of a release in the namespace syncstack."""
    argv = ["helm", "template", "syncstack", chart, "--namespace", "syncstack", *(f"--set={value}" for value in values)]
    found = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout
    return [each for each in yaml.safe_load_all(found) if each]


def refused(*values: str) -> str:
    argv = ["helm", "template", "syncstack", CHART, *(f"--set={value}" for value in values)]
    result = subprocess.run(argv, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0, values
    return result.stderr


def comparable(objects: list[dict[str, Any]]) -> dict[tuple[str, ...], Any]:
    """By kind, namespace and name. The names that kustomize gives to a ConfigMap's content, and Helm's checksum of it
    and of a Job, serve one purpose and are left out; so are the workload's namespace, which Helm is told, and the
    chart's own test."""
    text = re.sub(r"\b(settings|seccomp-profiles)-[0-9a-z]{10}\b", r"\1", yaml.safe_dump_all(objects))
    found = {}
    for each in yaml.safe_load_all(text):
        meta = each["metadata"]
        if (each["kind"], meta["name"]) == ("Namespace", "syncstack") or "helm.sh/hook" in meta.get("annotations", {}):
            continue
        template = each.get("spec", {}).get("template", {}).get("metadata", {})
        if template.get("annotations", {}).pop("checksum/config", None):
            template.pop("annotations")
        if each["kind"] == "Job":
            meta["name"] = re.sub("-[0-9a-f]{8}$", "", meta["name"])
        found[each["kind"], meta.get("namespace", ""), meta["name"]] = each
    return found


@pytest.mark.parametrize("choice", SAME, ids="-".join)
def test_it_renders_what_the_kustomization_renders(choice: tuple[str, str]) -> None:
    layout, seccomp = choice
    ours = comparable(template(f"layout={layout}", f"seccomp={seccomp}"))
    theirs = comparable(list(yaml.safe_load_all(check("kubectl", "kustomize", SAME[choice]))))
    assert ours.keys() == theirs.keys()
    for key, each in ours.items():
        assert each == theirs[key], key


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("layout", ["colocated", "disagg"])
def test_every_object_is_valid_by_the_schema_of_each_release(layout: str, release: str) -> None:
    for each in template(f"layout={layout}"):
        kubernetes_validate.validate(each, release, strict=True)


def test_the_trainer_is_told_of_every_engine() -> None:
    objects = template("engines=3", "steps=7")
    (engines,) = (each for each in objects if each["kind"] == "StatefulSet")
    (job,) = (each for each in objects if each["kind"] == "Job")
    assert engines["spec"]["replicas"] == 3
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [arg for arg in args if arg.startswith("--engine=")] == [
        f"--engine=tcp://engine-{index}.engines:7000" for index in range(3)
    ]
    assert [arg for arg in args if arg.startswith("--engine-url=")] == [
        f"--engine-url=http://engine-{index}.engines:8000" for index in range(3)
    ]
    assert args[-1] == "--steps=7"


def test_images_model_and_profile_are_choices() -> None:
    objects = template(
        "images.trainer=r/t:1", "images.engine=r/e:2", "model.claim=mine", "model.path=/models/m", "seccomp=permissive"
    )
    pods = [each["spec"]["template"]["spec"] for each in objects if each["kind"] in ("Job", "StatefulSet", "DaemonSet")]
    assert {container["image"] for pod in pods for container in containers(pod)} == {"r/t:1", "r/e:2"}
    (settings,) = (each for each in objects if each["metadata"]["name"] == "settings")
    assert (settings["data"]["SYNCSTACK_MODEL"], settings["data"]["OWN_MODEL"]) == ("/models/m", "/models/m")
    claims = [v["persistentVolumeClaim"]["claimName"] for pod in pods for v in pod["volumes"] if v["name"] == "models"]
    assert claims == ["mine", "mine"]


def test_pods_are_replaced_when_a_profile_or_a_setting_changes() -> None:
    def sums(*values: str) -> dict[str, str]:
        return {
            each["kind"]: each["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for each in template(*values)
            if each["kind"] in ("StatefulSet", "DaemonSet")
        }

    before, after = sums(), sums("model.path=/models/other")
    assert before["StatefulSet"] != after["StatefulSet"]
    assert before["DaemonSet"] == after["DaemonSet"]


def test_a_changed_job_is_another_job_and_an_unchanged_one_is_not() -> None:
    def job(*values: str) -> str:
        (found,) = (each["metadata"]["name"] for each in template(*values) if each["kind"] == "Job")
        return str(found)

    assert job() == job("installer=false")
    assert len({job(), job("steps=3"), job("seccomp=permissive"), job("model.path=/models/other")}) == 4


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("layout=mixed", "layout"), ("seccomp=unconfined", "seccomp"), ("engine=2", "engine"), ("engines=0", "engines"),
        ("images.trainr=x", "trainr"), ("model.path=/etc", "model"),
    ],
)  # fmt: skip
def test_a_value_that_is_none_is_refused_by_name(value: str, said: str) -> None:
    assert said in refused(value)


def test_a_packed_chart_holds_what_its_links_lead_to(tmp_path: Path) -> None:
    check("helm", "package", CHART, "--destination", str(tmp_path))
    (packed,) = tmp_path.glob("*.tgz")
    assert template(chart=str(packed)) == template()


def test_helm_finds_nothing_to_complain_about() -> None:
    check("helm", "lint", "--strict", CHART)
