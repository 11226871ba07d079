"""The plan of a refit: one transport over all workers of all engines, made anew when an engine is another process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncstack import Coordinator, Settings
from syncstack.errors import EngineBusy, PlanError, RefitFailed, SettingsError, UsageError
from syncstack.facts import Hello
from syncstack.plan import Policy
from syncstack.refit.dial import Way
from syncstack.refit.messages import EngineInfo, WorkerInfo
from syncstack.refit.planning import Plans, plan_ranks
from syncstack.refit.state import StateReport, Step
from syncstack.refit.trial import Ended, Rate
from syncstack.transports import SPOKEN
from tests.unit.hellos import OTHER_GPU, best_pair, cpu_pair, put


def info(name: str, *hellos: Hello) -> EngineInfo:
    workers = [
        WorkerInfo(socket=f"worker-{rank}.sock", hello=put(hello, "rank", rank)) for rank, hello in enumerate(hellos)
    ]
    return EngineInfo(
        protocol=1,
        name=name,
        kind="reference",
        kind_version="1",
        model="m",
        dtype="float32",
        tensors=(),
        workers=tuple(workers),
        heartbeat_s=0.5,
        state=StateReport(step=Step.SERVING, version=0, target=None, accepts_requests=True, reason="", since=0.0),
    )


def reached(*engines: EngineInfo) -> list[tuple[EngineInfo, Way]]:
    return [(engine, "unix") for engine in engines]


TRAINER, ENGINE = cpu_pair()


def plan(sender: Hello, engines: list[tuple[EngineInfo, Way]], policy: Policy) -> Plans:
    """The plan of a trainer of one rank."""
    return plan_ranks([sender], engines, policy)[0]


MUTE = put(ENGINE, "transports", ())
STREAM_ONLY = put(ENGINE, "transports", ("stream",))


def test_c21_the_worst_worker_decides_for_every_engine_in_any_order() -> None:
    engines = reached(info("a", ENGINE, STREAM_ONLY), info("b", ENGINE))
    choices = plan(TRAINER, engines, Policy())
    assert [[choice.transport for choice in workers] for workers in choices] == [["stream", "stream"], ["stream"]]
    reason = "a worker 1 cannot take it: not in this build of the engine (0.1.0)"
    assert [workers[0].why_not["host_fd"] for workers in choices] == [reason, reason]
    assert plan(TRAINER, engines[::-1], Policy()) == choices[::-1]


def test_a_worker_that_nothing_reaches_is_named() -> None:
    with pytest.raises(PlanError, match="host_fd: b worker 1: not in this build of the engine"):
        plan(TRAINER, reached(info("a", ENGINE), info("b", ENGINE, MUTE)), Policy())


def test_two_engines_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="same name .observed: a, a"):
        plan(TRAINER, reached(info("a", ENGINE), info("a", ENGINE)), Policy())


def test_a40_engines_that_landed_on_one_gpu_are_refused_before_anything_moves() -> None:
    sender, one = best_pair()
    engines = reached(info("a", one), info("b", one))
    with pytest.raises(PlanError, match="a worker 0 and b worker 0 hold the same GPU"):
        plan(sender, engines, Policy())
    plan(sender, engines, Policy(distinct_gpus=False))
    with pytest.raises(PlanError, match="hold none, while others do"):
        plan(sender, reached(info("a", one, put(one, "device", ""))), Policy())
    plan(sender, reached(info("a", one), info("b", put(one, "device", OTHER_GPU))), Policy.of("stream"))


def test_the_engines_hello_survives_its_endpoint() -> None:
    sent = info("a", ENGINE, MUTE)
    assert msgspec.json.decode(msgspec.json.encode(sent), type=EngineInfo) == sent
    assert [worker.rank for worker in sent.workers] == [0, 1]


class StubLink:
    def __init__(self) -> None:
        self.gone = False

    def lost(self) -> bool:
        return self.gone

    def close(self) -> None:
        self.gone = True


class StubClient:
    """An engine that says hello and is too busy for a session."""

    way: Way = "unix"
    address = "unix:/run/syncstack/engine-0"

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.name = info.name
        self.link = StubLink()
        self.begun = 0

    def renew(self, wait_s: float | None = None) -> None:
        self.link = StubLink()

    def open_links(self, rank: int, choices: Sequence[object]) -> list[StubLink]:
        return [self.link]

    def begin(self, *_: object, **__: object) -> None:
        self.begun += 1
        raise EngineBusy("busy")

    def reset(self) -> None:
        """Nothing is open."""

    def close(self) -> None:
        """Nothing is open."""


class StubTrials:
    """Links that are no sockets pass every trial."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def run(self, wait_s: float) -> list[Ended]:
        return []

    def measure(self, *_: object) -> Rate:
        return Rate(first=1e9, again=1e9)


@pytest.fixture(autouse=True)
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncstack.refit.agreement.Trials", StubTrials)


class StubSource:
    def metadata(self) -> Sequence[object]:
        return ()

    def aliases(self) -> dict[str, str]:
        return {}


def coordinator(folder: Path, *clients: StubClient, **settings: Any) -> Coordinator:
    made = Settings.load(socket_dir=folder, **settings)
    return Coordinator(source=StubSource(), engines=clients, settings=made)  # type: ignore[arg-type]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "syncstack.refit.agreement"]
    caplog.clear()
    return found


def test_a_choice_is_told_once_for_each_engine_and_again_only_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clients = [StubClient(info(name, ENGINE)) for name in "ab"]

    def refit() -> list[str]:
        with pytest.raises(RefitFailed, match="busy"):
            made.refit(1)
        return lines(caplog)

    with coordinator(tmp_path, *clients) as made:
        first = refit()
        assert [line.partition(" (")[0] for line in first] == ["a: host_fd", "b: host_fd"]
        assert refit() == []
        clients[0].link.close()  # another process answers now, and it says the same
        assert refit() == []
        clients[0].link.close()
        clients[0].info = info("a", put(ENGINE, "facts.gpu", best_pair()[1].facts.gpu))  # with a GPU this time
        assert [line.partition(" (")[0] for line in refit()] == ["a: host_fd"]


def test_a_refit_without_a_transport_is_a_plan_error_and_nothing_has_begun(tmp_path: Path) -> None:
    clients = [StubClient(info("a", ENGINE)), StubClient(info("b", MUTE))]
    with coordinator(tmp_path, *clients) as made:
        for _ in range(2):  # a plan that failed is not taken for one that was made
            with pytest.raises(PlanError, match="host_fd: b worker 0: not in this build"):
                made.refit(1)
        clients[1].info = info("b", ENGINE)
        with pytest.raises(RefitFailed, match="busy"):
            made.refit(1)
    assert [client.begun for client in clients] == [1, 0]


def test_the_settings_reach_the_plan(tmp_path: Path) -> None:
    client = StubClient(info("a", ENGINE))
    with pytest.raises(SettingsError, match="no known transport"):
        coordinator(tmp_path, client, transport="hostfd")
    with (
        coordinator(tmp_path, client, transport="disk") as made,
        pytest.raises(PlanError, match="disk: a worker 0"),
    ):
        made.refit(1)
    with coordinator(tmp_path, client, strict=True) as made, pytest.raises(RefitFailed, match="busy"):
        made.refit(1)


def test_the_trainers_hello_says_what_it_speaks_and_which_folder_it_has(tmp_path: Path) -> None:
    with coordinator(tmp_path, StubClient(info("a", ENGINE))) as made:
        hello = made.hello
    assert (hello.role, hello.transports, hello.reachable) == ("trainer", SPOKEN, ())
    assert hello.facts.socket_dir is not None
    assert hello.facts.socket_dir.path == str(tmp_path)


def test_an_engine_reached_over_tcp_needs_more_than_one_that_was_reached_by_its_socket() -> None:
    """The socket is the way for the descriptor; without it the two must share a folder or a PID namespace."""
    apart = put(put(ENGINE, "facts.socket_dir", None), "facts.namespaces", {**ENGINE.facts.namespaces, "pid": "9"})
    ((by_socket,),) = plan(TRAINER, [(info("a", apart), "unix")], Policy.of("host_fd"))
    assert by_socket.fd == "scm"
    with pytest.raises(PlanError, match="they share no folder.*different PID namespaces"):
        plan(TRAINER, [(info("a", apart), "tcp")], Policy.of("host_fd"))
