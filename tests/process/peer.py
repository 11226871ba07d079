"""One side of a hand-over by pidfd, in a process of its own; it ends with its standard input.

usage: peer.py hold [undumpable]    hold a segment and print its offer's fields as JSON
       peer.py take OFFER           accept the offer (JSON) as a worker would and print what came of it as JSON
       peer.py serve [broken]       be a worker's endpoint, print its TCP port; broken: its import raises after a while
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import msgspec

from syncstack.errors import SyncstackError
from syncstack.transports import pidfd
from syncstack.transports.host_fd.handover import taken
from syncstack.transports.host_fd.segment import ReceiverSegment, SenderSegment
from syncstack.weights.manifest import TensorSlot
from syncstack.wire import tcp
from syncstack.wire.auth import Token
from syncstack.wire.messages import Handle, Offer
from syncstack.wire.tcp import Address

SECRET = b"a secret of at least sixteen bytes"
PR_SET_DUMPABLE = 4
SLOT = TensorSlot(name="w", dtype="uint8", shape=(64,), offset=0, nbytes=64)


def offer(segment: SenderSegment, **change: object) -> Offer:
    """An offer of a segment of this process, to be taken by pidfd."""
    own = pidfd.myself()
    handle = Handle(kind="memfd-pidfd", pid=own.pid, pid_ns=own.pid_ns, start_ticks=own.start_ticks, fd=segment.fd)
    found = Offer(
        session="s" * 8,
        version=1,
        segment=segment.nonce,
        segment_bytes=segment.data_bytes,
        generation=segment.generation,
        handle=handle,
        tensors=(SLOT,),
    )
    return msgspec.structs.replace(found, **change)


def hold(mode: str) -> None:
    segment = SenderSegment(64)
    segment.data[:] = os.urandom(64)
    line = {"offer": msgspec.to_builtins(offer(segment)), "content": bytes(segment.data).hex()}
    if mode == "undumpable":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    print(json.dumps(line), flush=True)
    sys.stdin.read()


def take(found: Offer) -> dict[str, Any]:
    before = len(os.listdir("/proc/self/fd"))
    try:
        with taken(found.handle, []) as fd:
            segment = ReceiverSegment(fd, nonce=found.segment, data_bytes=found.segment_bytes)
        result = {"content": bytes(segment.data).hex()}
        segment.close()
    except SyncstackError as error:
        result = {"error": type(error).__name__, "text": str(error)}
    return {**result, "leaked": len(os.listdir("/proc/self/fd")) - before}


def serve(mode: str) -> None:
    from syncstack.transports.endpoint import WorkerEndpoint
    from syncstack.transports.host_fd import receiver

    def broken(*_: object, **__: object) -> None:
        time.sleep(0.5)  # the sender has long turned to its source
        raise RuntimeError("broken inside the import")

    if mode == "broken":
        receiver.ReceiverSegment = broken  # type: ignore[assignment,misc]
    listener = tcp.listen(Address("127.0.0.1", 0))
    endpoint = WorkerEndpoint(None, rank=0, link_s=30, tcp=listener, token=Token(SECRET))
    print(endpoint.port, flush=True)
    sys.stdin.read()
    endpoint.close()


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(sys.argv[2] if len(sys.argv) > 2 else "")
    elif sys.argv[1] == "serve":
        serve(sys.argv[2] if len(sys.argv) > 2 else "")
    else:
        print(json.dumps(take(msgspec.json.decode(sys.argv[2], type=Offer))), flush=True)
