"""What the training left behind, and what the engine serves after it."""

from __future__ import annotations

import json
import os

import httpx
import jsonschema

from tests.compose.stack import ROOT, Stack


def test_every_refit_went_by_host_fd_and_was_proven(stack: Stack) -> None:
    refits = stack.report["refits"]
    assert len(refits) >= 2
    for refit in refits:
        assert refit["transport"] == "host_fd", refit["why_not"]
        assert set(refit["why_not"]) == {"cuda_fd", "cuda_ipc"}
        assert refit["digests_equal"] is True
        assert refit["digests_compared"] == refit["digests_matched"] == refit["tensors"] > 0
        # The engine's dtype travels, float32 by default: the trainer's small steps are not rounded away.
        assert refit["bytes"] == 4 * stack.report["model"]["parameters"]
        assert 0 <= refit["max_abs_dlogprob"] <= refit["parity_tolerance"]
        assert sum(refit["phases"].values()) <= refit["seconds"] * 1.01
        assert refit["paused_seconds"] <= refit["seconds"]
    versions = [refit["version"] for refit in refits]
    assert versions == sorted(set(versions)), "versions only go up"


def test_report_says_where_it_ran(stack: Stack) -> None:
    report = stack.report
    assert (report["layout"], report["profile"]) == ("colocated", stack.profile)
    assert report["outcome"]["status"] == "ok"
    assert len(report["steps"]) == 2
    assert report["facts"]["pidfd_getfd"] == {"permissive": "ok", "unconfined": "ok"}.get(stack.profile, "denied")


def test_report_follows_its_schema(stack: Stack) -> None:
    schema = json.loads((ROOT / "docs" / "report.schema.json").read_bytes())
    jsonschema.validate(stack.report, schema)


def test_results_are_the_callers(stack: Stack) -> None:
    (folder,) = stack.out.iterdir()
    names = {path.name for path in folder.iterdir()}
    assert {"report.json", "report.html"} <= names
    assert {path.stat().st_uid for path in (folder, *folder.iterdir())} == {os.getuid()}
    assert "Traceback" not in stack.output


def test_engine_still_serves_the_last_version(stack: Stack) -> None:
    base = f"http://127.0.0.1:{stack.port}/v1"
    model = httpx.get(f"{base}/models", timeout=30).json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 4}
    answer = httpx.post(f"{base}/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    assert answer.headers["x-syncstack-version"] == str(stack.report["refits"][-1]["version"])
