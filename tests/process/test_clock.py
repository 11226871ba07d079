"""A wall clock that jumps: of Python's ``time.time`` only, and of these two processes. Setting the machine's clock
moves it for everybody on it, and needs a right that no container here has."""

from __future__ import annotations

import time
from pathlib import Path

from tests.process.conftest import REPO
from tests.process.test_refit import StartEngine, StartTrainer, close_to, read_line, state_of

DAY_S = 86400.0

JUMPING = f"""
import itertools, time
real, away = time.time, itertools.cycle([{DAY_S}, -{DAY_S}])
time.time = lambda: real() + next(away)
"""
"""Each look at the clock is two days away from the one before."""


def test_clock_jumps_end_no_refit_and_no_session(
    start_engine: StartEngine, start_trainer: StartTrainer, model: Path, socket_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    env = {"PYTHONPATH": f"{tmp_path}:{REPO}"}
    engine = start_engine(env=env, wrap=["env"], slow_s=0.05)  # wrapped: a process that reads sitecustomize
    trainer = start_trainer(model, "3", env=env, wrap=["env"])
    read_line(trainer)
    for version in (1, 2, 3):
        report = read_line(trainer)
        assert (report["version"], report["digests_equal"]) == (version, report["tensors"])
        assert sum(report["phases"].values()) < 60
    assert trainer.wait(timeout=30) == 0
    assert engine.complete().headers["x-syncstack-version"] == "3"
    assert close_to(engine.logprobs(), report["logprobs"])
    assert abs(state_of(socket_dir).since - time.time()) > DAY_S / 2  # it did jump there
