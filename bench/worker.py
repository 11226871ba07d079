"""The receiving half of the benchmark in a process of its own: a worker's data socket, and no engine behind it."""

from __future__ import annotations

import sys
from pathlib import Path

from syncstack.transports.endpoint import WorkerEndpoint

endpoint = WorkerEndpoint(Path(sys.argv[1]), rank=0, link_s=60.0)
print("ready", flush=True)
sys.stdin.read()
endpoint.close()
