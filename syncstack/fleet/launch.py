"""``syncstack launch``: a trainer's command and its engines, each in its own container of a cluster."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import msgspec

from syncstack.errors import EngineUnreachable, SyncstackError
from syncstack.fleet import cluster
from syncstack.fleet.node import ray_environment
from syncstack.fleet.placement import FleetSpec, Layout, Placement, actor_name

POLL_S = 0.3
ASK_S = 60.0
"""How long the trainer's actor may take to answer; a machine that swaps is not a trainer that is lost."""
END_S = 30.0
"""How long a trainer that was told to end may take over its report."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One launch."""

    cluster: str
    secret: str
    layout: Layout
    engines: int
    engine_command: tuple[str, ...]
    trainer_command: tuple[str, ...]
    trainer: str | None = None
    """The node that the trainer shall be on; None: any with that role."""
    wait_s: float
    stay: bool


def launch(job: Job) -> int:
    """Place it, run it, pass on what the trainer prints; returns the trainer's exit status. Blocks until it has ended;
    ended by SIGTERM or Ctrl-C, it ends the trainer the same way. Raises UsageError, EngineUnreachable or
    DeadlineExceeded; nothing of it runs then."""
    with cluster.connected(job.cluster):
        placement = cluster.await_placement(job.layout, job.engines, job.trainer, job.wait_s)
        placed = cluster.Placed(placement, job.layout, detached=job.stay)
        code = 1
        try:
            sys.stderr.write(f"trainer on {placement.trainer}, engines on {', '.join(placement.engines)}\n")
            _start(placed.trainer, job, placement)
            code = _follow(placed.trainer)
        finally:
            if code == 0 and job.stay:
                placed.leave()
            else:
                placed.close()
        return code


def _start(trainer: Any, job: Job, placement: Placement) -> None:
    spec = FleetSpec(
        cluster=job.cluster,
        engines=tuple(actor_name("engine", name) for name in placement.engines),
        command=job.engine_command,
        stay=job.stay,
    )
    env = ray_environment(job.secret) | {"SYNCSTACK_FLEET": msgspec.json.encode(spec).decode()}
    cluster.ask(trainer, "start", job.trainer_command, env, keep_output=True, wait_s=cluster.PLACE_S)


def _follow(trainer: Any) -> int:
    """Until the trainer has ended and everything that it printed was passed on."""
    offset = 0
    try:
        while True:
            code = cluster.ask(trainer, "status", wait_s=ASK_S)
            offset = _pass_on(trainer, offset)
            if code is not None:
                return int(code) if code >= 0 else 128 - code
            time.sleep(POLL_S)
    except EngineUnreachable as error:
        raise EngineUnreachable(
            "the trainer's node was lost",
            observed=error.observed,
            consequence="The training has ended; its engines were ended too",
            next_step="look at that container's log, and launch again",
        ) from None
    except KeyboardInterrupt:
        _end(trainer, offset)
        raise


def _end(trainer: Any, offset: int) -> None:
    """Tell it to end, and pass on its last words."""
    deadline = time.monotonic() + END_S
    try:
        cluster.ask(trainer, "signal", signal.SIGTERM, wait_s=ASK_S)
        while cluster.ask(trainer, "status", wait_s=ASK_S) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        _pass_on(trainer, offset)
    except SyncstackError as error:
        sys.stderr.write(f"the trainer was not asked to end: {error}\n")


def _pass_on(trainer: Any, offset: int) -> int:
    """Print what the trainer has written from ``offset`` on; returns where that ends."""
    while more := cluster.ask(trainer, "read", offset, wait_s=ASK_S):
        offset += len(more)
        sys.stdout.buffer.write(more)
        sys.stdout.buffer.flush()
    return offset
