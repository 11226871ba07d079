"""What the training left behind, and what the engine serves after it."""

from __future__ import annotations

import json
import os

import httpx
import jsonschema

from tests.compose.stack import ROOT, Stack

# What the layout leaves, and why not something better.
TRANSPORT = {
    "colocated": ("host_fd", {"cuda_fd", "cuda_ipc"}),
    "disagg": ("collective", {"cuda_fd", "cuda_ipc", "host_fd"}),
}


def test_every_refit_was_proven(stack: Stack) -> None:
    refits = stack.report["refits"]
    transport, better = TRANSPORT[stack.layout]
    for refit in refits:
        assert refit["transport"] == transport, refit["why_not"]
        assert set(refit["why_not"]) == better
        assert refit["digests_equal"] is True
        assert refit["digests_compared"] == refit["digests_matched"] == refit["tensors"] > 0
        # The engine's dtype travels, float32 by default: the trainer's small steps are not rounded away.
        assert refit["bytes"] == 4 * stack.report["model"]["parameters"]
        assert 0 <= refit["max_abs_dlogprob"] <= refit["parity_tolerance"]
        assert sum(refit["phases"].values()) <= refit["seconds"] * 1.01
        assert refit["paused_seconds"] <= refit["seconds"]
    for name in stack.engines:
        versions = [refit["version"] for refit in refits if refit["engine"] == name]
        assert versions == [1, 2, 3]
    assert len(refits) == 3 * len(stack.engines)


def test_every_refit_changed_what_the_engine_computes(stack: Stack) -> None:
    """Otherwise the parity above would prove nothing."""
    later = [refit for refit in stack.report["refits"] if refit["version"] > 1]
    assert all(refit["stale_abs_dlogprob"] > 2 * refit["parity_tolerance"] for refit in later), later


def test_report_says_where_it_ran(stack: Stack) -> None:
    report = stack.report
    assert (report["layout"], report["profile"]) == (stack.layout, stack.profile)
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


def test_every_engine_still_serves_the_last_version(stack: Stack) -> None:
    assert [engine["name"] for engine in stack.report["engines"]] == list(stack.engines)
    for name in stack.engines:
        base = f"{stack.url(name)}/v1"
        model = httpx.get(f"{base}/models", timeout=30).json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 4}
        answer = httpx.post(f"{base}/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        version = stack.report["refits"][-1]["version"]
        assert answer.headers["x-syncstack-version"] == str(version)
        newer = {"X-Syncstack-Min-Version": str(version + 1)}
        stale = httpx.post(f"{base}/chat/completions", json=body, headers=newer, timeout=60)
        assert (stale.status_code, stale.json()["error"]["type"]) == (503, "engine_stale")
        assert f"still serving: curl {base}/models" in stack.output
