"""The other end of ``bench.child``: commands as JSON lines on stdin, answers on stdout."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


def confine(profile: str) -> None:
    """Put this process, before it has a thread, under a profile; "" is none."""
    if profile:
        from syncstack.seccomp.apply import apply
        from syncstack.seccomp.load import load

        apply(load(profile))


def serve(side: Any, commands: Mapping[str, Callable[..., Answer]]) -> None:
    """Say who this is, then answer with ``commands`` or the methods of ``side`` until stdin ends."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(json.dumps({"uid": os.getuid(), "pid": os.getpid(), "seccomp": status["Seccomp"], "caps": status["CapEff"],
                      "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}), flush=True)  # fmt: skip
    for line in sys.stdin:
        asked = json.loads(line)
        call = commands.get(asked["do"]) or getattr(side, asked["do"])
        try:
            answer = partial(call, **asked.get("with", {}))()
        except Exception as error:  # noqa: BLE001 - whoever asked wants to know
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
