"""Run a test's body in a process of its own: what it does to itself cannot be undone."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from syncstack.facts import TargetFact
from tests.process import kernel

REPOSITORY = Path(__file__).parents[2]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="root is needed to make the causes")


def alone(scenario: Callable[..., None]) -> Callable[..., None]:
    """Run the test in a fresh process. Its arguments are paths; kernel.skip skips it."""

    @functools.wraps(scenario)
    def test(**given: Path) -> None:
        code = f"from {scenario.__module__} import {scenario.__name__} as test; import json, sys, pathlib; "
        code += "test.__wrapped__(**{k: pathlib.Path(v) for k, v in json.loads(sys.argv[1]).items()})"
        paths = json.dumps({name: str(path) for name, path in given.items()})
        # Into a file: a forked peer that is left over would keep a pipe open.
        with tempfile.TemporaryFile("w+") as output:
            child = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", code, paths],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                status = child.wait(60)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            output.seek(0)
            text = output.read()
        if status == kernel.SKIPPED:
            pytest.skip(text)
        assert status == 0, text

    return test


def is_cause(fact: TargetFact, verdict: str, cause: str, *evidence: str) -> None:
    assert (fact.verdict, fact.cause) == (verdict, cause), fact
    for text in evidence:
        assert text in fact.evidence, (text, fact)
