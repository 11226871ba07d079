"""Do more trainer ranks move a version faster? Real processes in network namespaces, each rank behind a limited link.

Every rank and every worker has a network namespace of its own, joined by one bridge; `tc tbf` lets each rank's
interface send no more than ``--mbit``. The workers' interfaces are not limited. One version goes to all workers, by
``stream`` and by ``collective``, from 1, 2 and 4 ranks that each send a share; the floor is a plain TCP connection from
one rank to one worker through the same interface, in the same run. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.__main__ import cpu_model
from syncstack.settings import Settings
from syncstack.transports.endpoint import WorkerEndpoint
from syncstack.transports.senders import make_sender
from syncstack.weights.manifest import divide, part_of, resolve
from syncstack.weights.source import ModuleSource
from syncstack.wire import tcp
from syncstack.wire.auth import Token, prove_as_trainer
from syncstack.wire.link import Link, greet
from syncstack.wire.tcp import Address

PREFIX, NET, HUB = "ssb", "10.213.0", "ssbhub"
LINK_S = 60.0
HIDDEN, MLP, LAYERS, VOCAB = 288, 768, 30, 24576
"""SmolLM2-135M at half its width and half its vocabulary: the embedding is a fifth of it, as there. 64 MB of bf16."""


def weights() -> torch.nn.Module:
    """A model of these sizes."""
    root = torch.nn.Module()
    root.register_buffer("embed", torch.randn(VOCAB, HIDDEN).to(torch.bfloat16))
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("q", HIDDEN, HIDDEN), ("o", HIDDEN, HIDDEN), ("gate", MLP, HIDDEN), ("up", MLP, HIDDEN),
            ("down", HIDDEN, MLP), ("norm", HIDDEN, 1),
        ):  # fmt: skip
            root.register_buffer(f"layer{layer}_{name}", torch.randn(rows, columns).to(torch.bfloat16))
    return root


# --- the processes -----------------------------------------------------------------------------------------------


def token() -> Token:
    """What the processes of one run prove to each other."""
    return Token(os.environ["BENCH_TOKEN"].encode())


def worker(host: str) -> None:
    """A worker's endpoint: prints its ports, and for each session how many tensors all shares together have."""
    listener, blast = tcp.listen(Address(host, 0)), socket.create_server((host, 0))
    endpoint = WorkerEndpoint(None, rank=0, link_s=LINK_S, tcp=listener, token=token())
    print(endpoint.port, blast.getsockname()[1], flush=True)
    for line in sys.stdin:
        session = line.strip()
        if session == "blast":
            with blast.accept()[0] as sock:
                while sock.recv(1 << 20):
                    pass
            print("done", flush=True)
            continue
        print(len(endpoint.take(session).tensors), flush=True)
        endpoint.drop(session)
    endpoint.close()


def rank(index: int, addresses: list[str]) -> None:
    """A trainer rank: for each line, a stage of its share; prints the seconds."""
    source = ModuleSource(weights())
    metas = source.metadata()
    wanted = resolve(metas, metas, {})
    links = list[Link]()
    senders: dict[tuple[str, int], Any] = {}
    print(sum(meta.nbytes for meta in metas), len(wanted), flush=True)
    for line in sys.stdin:
        what, session, count = (*line.split(), "", "")[:3]
        begin = time.perf_counter()
        if what == "blast":
            host, _, port = session.rpartition(":")
            with socket.create_connection((host, int(port))) as sock:
                sock.sendall(bytes(sum(meta.nbytes for meta in metas)))
                sock.shutdown(socket.SHUT_WR)
                sock.recv(1)
            print(time.perf_counter() - begin, flush=True)
            continue
        if (what, int(count)) not in senders:
            for each in (*senders.values(), *links):
                each.close()
            bucket_bytes = Settings.model_fields["bucket_bytes"].default
            senders = {(what, int(count)): make_sender(what, bucket_bytes=bucket_bytes)}
            links = [connect(address, index) for address in addresses]
        share = divide(wanted, int(count))[index]
        senders[what, int(count)].stage(
            source, part_of(wanted, share), links, session=session, version=1, wait_s=LINK_S, share=share
        )
        print(time.perf_counter() - begin, flush=True)


def connect(address: str, index: int) -> Link:
    """A link to one worker."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + LINK_S
    link = Link(tcp.connect(Address(host, int(port)), deadline=deadline))
    prove_as_trainer(link, token(), rank=index, worker=0, deadline=deadline)
    greet(link, role="trainer", rank=index, deadline=deadline)
    return link


# --- the parent --------------------------------------------------------------------------------------------------


def run(*command: str) -> None:
    """One command that must succeed."""
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def network(names: list[str], limited: dict[str, int]) -> Iterator[dict[str, str]]:
    """A namespace for each name, all on one bridge; yields their addresses. ``limited``: Mbit/s that one may send."""
    addresses = {name: f"{NET}.{number}" for number, name in enumerate(names, 1)}
    try:
        run("ip", "netns", "add", HUB)
        run("ip", "-n", HUB, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", HUB, "link", "set", "br0", "up")
        for name, address in addresses.items():
            run("ip", "netns", "add", PREFIX + name)
            run("ip", "-n", PREFIX + name, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", HUB)
            run("ip", "-n", HUB, "link", "set", name, "master", "br0", "up")
            run("ip", "-n", PREFIX + name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run("ip", "-n", PREFIX + name, "link", "set", device, "up")
            if name in limited:
                shape = ("rate", f"{limited[name]}mbit", "burst", "128kb", "latency", "50ms")
                run("tc", "-n", PREFIX + name, "qdisc", "add", "dev", "eth0", "root", "tbf", *shape)
        yield addresses
    finally:
        for name in (HUB, *(PREFIX + name for name in names)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


class Child:
    """One process in its namespace."""

    def __init__(self, name: str, *argv: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", PREFIX + name, sys.executable, "-m", "bench.senders", *argv],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def say(self, *words: object) -> None:
        assert self._process.stdin
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> list[str]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended")
        return line.split()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=30)


def measure(mbit: int, counts: list[int], num_workers: int, rounds: int) -> dict[str, Any]:
    """Seconds of each transport and number of ranks, and of the floor."""
    ranks = [f"r{number}" for number in range(max(counts))]
    workers = [f"w{number}" for number in range(num_workers)]
    os.environ["BENCH_TOKEN"] = secrets.token_hex(32)
    found: dict[str, Any] = {"floor": [], "stream": {}, "collective": {}}
    with network([*ranks, *workers], dict.fromkeys(ranks, mbit)) as at, contextlib.ExitStack() as stack:
        ends = [stack.enter_context(contextlib.closing(Child(n, "worker", at[n]))) for n in workers]
        ports = [end.answer() for end in ends]
        addresses = [f"{at[name]}:{port}" for name, (port, _) in zip(workers, ports, strict=True)]
        children = [
            stack.enter_context(contextlib.closing(Child(name, "rank", str(number), *addresses)))
            for number, name in enumerate(ranks)
        ]
        sizes = [child.answer() for child in children]
        found["bytes"], num_tensors = int(sizes[0][0]), int(sizes[0][1])
        for _ in range(rounds):
            ends[0].say("blast")
            children[0].say("blast", f"{at[workers[0]]}:{ports[0][1]}")
            found["floor"].append(float(children[0].answer()[0]))
            assert ends[0].answer() == ["done"]
        for transport in ("stream", "collective"):
            for count in counts:
                times = [once(children[:count], ends, transport, num_tensors) for _ in range(1 + rounds)]
                found[transport][count] = times[1:]  # the first makes the group and the memory
    return found


def once(ranks: list[Child], ends: list[Child], transport: str, num_tensors: int) -> float:
    """Seconds from the word to all ranks until every worker has verified every share."""
    session = secrets.token_hex(8)
    begin = time.perf_counter()
    for each in ranks:
        each.say(transport, session, len(ranks))
    for each in ranks:
        each.answer()
    seconds = time.perf_counter() - begin
    for end in ends:
        end.say(session)
        assert end.answer() == [str(num_tensors)]
    return seconds


def summary(found: dict[str, Any], mbit: int, workers: int, rounds: int) -> dict[str, Any]:
    """Medians, and the two ratios: to one rank, and to the floor."""
    floor = statistics.median(found["floor"])
    rows = []
    for transport in ("stream", "collective"):
        alone = statistics.median(found[transport][min(found[transport])])
        for count, times in found[transport].items():
            seconds = statistics.median(times)
            rows.append(
                {
                    "transport": transport, "ranks": count, "seconds": round(seconds, 3),
                    "mb_per_s_per_worker": round(found["bytes"] / seconds / 1e6, 1),
                    "scaling": round(alone / seconds / count, 3),
                    "of_the_ranks_links": round(floor / seconds / count, 3),
                }
            )  # fmt: skip
    return {
        "bytes": found["bytes"], "workers": workers, "mbit": mbit, "rounds": rounds,
        "floor_seconds": round(floor, 3), "floor_mb_per_s": round(found["bytes"] / floor / 1e6, 1), "rows": rows,
        "machine": {"cpus": os.cpu_count(), "model": cpu_model(), "kernel": os.uname().release},
        "torch": torch.__version__,
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """The table."""
    title = f"{result['bytes'] / 1e6:.0f} MB to {result['workers']} workers, {result['mbit']} Mbit/s for each rank"
    table = Table(title=f"{title}, median of {result['rounds']}; plain TCP: {result['floor_mb_per_s']} MB/s")
    for column in ("transport", "ranks", "s", "MB/s to each worker", "scaling (1: linear)", "of the ranks' links"):
        table.add_column(column, justify="left" if column == "transport" else "right")
    for row in result["rows"]:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=110).print(table)


def main() -> None:
    """Be what is asked for: the benchmark, or one of its processes."""
    if sys.argv[1:2] == ["worker"]:
        return worker(sys.argv[2])
    if sys.argv[1:2] == ["rank"]:
        return rank(int(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(prog="python -m bench.senders", description=__doc__)
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", default="", help="what is measured, for the record")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(given.mbit, given.ranks, given.workers, given.rounds)
    result = summary(found, given.mbit, given.workers, given.rounds)
    show(result)
    if given.json:
        given.json.write_text(json.dumps({"commit": given.commit, **result}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
