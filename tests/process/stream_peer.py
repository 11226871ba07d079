"""A worker's endpoint in a process of its own, for stages by ``stream``; it ends with its standard input.

usage: stream_peer.py FOLDER [MODE]    listen on FOLDER/worker-0.sock and on a port of 127.0.0.1, print the port;
                                       raises: making memory for a version fails after a while
                                       flips: what comes in a group loses a bit before it is looked at or passed on
Then, a line each: ``views SESSION``   print the digests of the views that a loader would get, by name, and drop them
                   ``hold SESSION``    the same, and keep the views
                   ``held``            print the digests of the views that are kept
                   ``finish SESSION``  as the engine does when the session has ended
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from syncstack.transports.endpoint import WorkerEndpoint
from syncstack.weights.digest import digest
from syncstack.wire import tcp
from syncstack.wire.auth import Token
from syncstack.wire.tcp import Address
from tests.process.peer import SECRET

Views = dict[str, torch.Tensor]


def digests(views: Views) -> dict[str, str]:
    return {name: digest(view.reshape(-1).view(torch.uint8).numpy()) for name, view in views.items()}


def answer(endpoint: WorkerEndpoint, held: Views, command: str, session: str) -> object:
    if command == "held":
        return digests(held)
    if command == "finish":
        endpoint.drop(session)
        return {}
    views = dict(endpoint.take(session).views())
    found = digests(views)
    endpoint.take(session).check_again()
    if command == "hold":
        held.update(views)
    return found


def main() -> None:
    if sys.argv[2:] == ["raises"]:
        from syncstack.transports.stream import receiver

        def broken(data_bytes: int) -> None:
            time.sleep(0.5)  # the sender has long turned to its source
            raise RuntimeError(f"broken while {data_bytes} bytes were asked for")

        receiver.OwnMemory = broken  # type: ignore[assignment,misc]
    if sys.argv[2:] == ["flips"]:
        from syncstack.transports.collective.group import Group

        finish = Group._finish

        def flip(group: Group, work: Any, data: torch.Tensor) -> None:
            finish(group, work, data)
            data[len(data) // 2] ^= 1

        Group._finish = flip  # type: ignore[method-assign]
    listener = tcp.listen(Address("127.0.0.1", 0))
    endpoint = WorkerEndpoint(Path(sys.argv[1]) / "worker-0.sock", rank=0, link_s=30, tcp=listener, token=Token(SECRET))
    print(endpoint.port, flush=True)
    held: Views = {}
    for line in sys.stdin:
        command, _, session = line.strip().partition(" ")
        print(json.dumps(answer(endpoint, held, command, session)), flush=True)
    endpoint.close()


if __name__ == "__main__":
    main()
