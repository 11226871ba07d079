"""Both layouts under each profile: `make up-k8s`, a look into every container while it trains, and what came of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s.cluster import LAYOUTS, PROFILES, Training, get, inside, kubectl, running, seccomp_mode, until

pytestmark = pytest.mark.usefixtures("cluster")

TRANSPORT = {"colocated": "host_fd", "disagg": "collective"}
GETFD = {"restrictive": "denied", "permissive": "ok", "RuntimeDefault": "denied"}
APPLICATIONS = {"colocated": ["colocated"], "disagg": ["trainer", "engine"]}
CONTAINERS = {"colocated": 2, "disagg": 3}
STEPS = 3
ROWS: list[str] = []
"""Of the table that is printed at the end."""


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\nlayout      profile         seccomp  pidfd_getfd  transport   refits  ms    first refit after")
        print("\n".join(ROWS))


@pytest.fixture
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    layout, profile = request.param
    made = Training(tmp_path / "output", LAYOUT=layout, SECCOMP=profile, STEPS=str(STEPS))
    yield made
    made.close()


COMBINATIONS = [pytest.param((layout, profile), layout, profile) for profile in PROFILES for layout in LAYOUTS]


@pytest.mark.parametrize(("training", "layout", "profile"), COMBINATIONS, indirect=["training"], ids=str)
def test_it_trains_with_verified_refits_in_restricted_pods(training: Training, layout: str, profile: str) -> None:
    begin = time.monotonic()
    places: set[str] = set()
    for application in APPLICATIONS[layout]:

        def all_running(name: str = application) -> set[str] | None:
            training.going()
            return running(name)

        places |= until(f"{application} runs", all_running)
    assert len(places) == CONTAINERS[layout]
    modes = {place: seccomp_mode(place) for place in places}
    assert modes == dict.fromkeys(places, 2)
    getfd = set()
    for place in places:
        facts = json.loads(inside(place, "python", "-m", "syncstack.facts"))
        getfd.add(facts["syscalls"]["pidfd_getfd"]["verdict"])
        assert (place, getfd) == (place, {GETFD[profile]})
        assert (facts["uid"], facts["no_new_privs"], facts["capabilities"]["effective"]) == (10001, True, [])

    def first_refit() -> float | None:
        training.going()
        return time.monotonic() - begin if re.search(r"^ start ", training.output, re.MULTILINE) else None

    after = until("the first refit", first_refit)
    output = training.done()
    expected = {"colocated": STEPS + 1, "disagg": 2 * (STEPS + 1)}[layout]
    refits = re.search(rf"^refits +{expected} .*by {TRANSPORT[layout]}, median (\d+) ms", output, re.MULTILINE)
    assert refits is not None, output
    assert f"digests   equal in {expected} of {expected} refits" in output
    seen = f"{max(modes.values()):<8} {getfd.pop():<12} {TRANSPORT[layout]:<11} {expected:<7} {refits[1]:<5}"
    ROWS.append(f"{layout:<11} {profile:<15} {seen} {after:.0f} s")
    if layout == "disagg":
        until("engines are ready", lambda: _ready() == {"engine-0": True, "engine-1": True}, 60)
    else:
        assert get("job", "colocated")["status"]["succeeded"] == 1


def _ready() -> dict[str, bool]:
    pods = get("pods", "--selector=app.kubernetes.io/name=engine")["items"]
    return {
        pod["metadata"]["name"]: all(status["ready"] for status in pod["status"].get("containerStatuses", []))
        for pod in pods
    }


def test_an_engine_whose_pod_is_deleted_comes_back_and_is_ready_at_the_current_version_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path / "output", LAYOUT="disagg", SECCOMP="restrictive", STEPS="60")
    try:

        def trained() -> bool:
            training.going()
            return re.search(r"^ +2 +\d", training.output, re.MULTILINE) is not None

        until("the second step", trained)
        begin = time.monotonic()
        kubectl("delete", "pod", "engine-1", "--wait=true", timeout_s=90)
        # It refuses every request from its start on, and says that it waits for its first refit.
        refused = until("the new engine answers", _refusal)
        assert refused == "503"
        until("it is ready again", lambda: training.going() or _ready().get("engine-1", False))
        with capfd.disabled():
            print(f"\nengine-1 was deleted and ready again after {time.monotonic() - begin:.0f} s")
        back = re.search(r"engine-1 is back with version (\d+)", training.output)
        assert back is not None, training.output
        status, version = inside("engine-1/engine", "python", "-c", _ASK).split()
        assert (status, int(version) >= int(back[1])) == ("200", True)
    finally:
        training.close()


_ASK = """
import urllib.error, urllib.request
try:
    with urllib.request.urlopen("http://127.0.0.1:8000/ready") as answer:
        print(answer.status, answer.headers["x-syncstack-version"])
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    pass
"""


def _refusal() -> str | None:
    """The first answer of the new engine to who asks whether it is ready."""
    if running("engine") is None:
        return None
    return inside("engine-1/engine", "python", "-c", _ASK).strip()
