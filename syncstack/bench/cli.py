"""`syncstack bench`: one table of what moves a version how fast, here and now."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from syncstack.errors import HandleRefused, UsageError
from syncstack.output import Output, OutputOption

if TYPE_CHECKING:
    import torch

    from syncstack.bench.ways import Pair

Maker = Callable[[Any], Callable[[], None]]
"""Makes a way between a pair of processes."""


class PeerGroup(Enum):
    """How trainer and engine lie to each other, after verl's names."""

    COLOCATED = "colocated"
    STAGED = "staged"
    COLLECTIVE = "collective"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way. ``ms`` is the median of all versions but the first; ``floor_ratio`` is the floor's time by this one's, 1
    for the floor; ``failed`` says why there are no numbers, and ``refused`` that it is a way for other memory than
    this: each of ``cuda_fd`` and ``cuda_ipc`` may be."""

    way: str
    whose: str
    first_ms: float = 0.0
    ms: float = 0.0
    gb_per_s: float = 0.0
    floor_ratio: float = 0.0
    equal: bool = False
    """Whether the receiver's weights were the sender's, to the bit, after the last version."""
    failed: str = ""
    refused: bool = False


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What ``-o json`` prints."""

    peer_group: str
    device: str
    bytes: int
    tensors: int
    rounds: int
    rows: tuple[Row, ...]


def bench(
    peer_group: Annotated[PeerGroup, typer.Option(help="How trainer and engine lie to each other.")],
    mib: Annotated[int, typer.Option(min=1, help="Size of a version, in bf16.")] = 512,
    tensors: Annotated[int, typer.Option(min=1, max=10_000, help="In how many tensors.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Versions by each way, beside the first.")] = 9,
    device: Annotated[str, typer.Option(help="Where the weights lie, on both sides.", show_default="a GPU")] = "",
    output: OutputOption = Output.TEXT,
) -> None:
    """Move versions from this process to another, by our transports and by the ways of others, beside a floor that is
    taken in the same run."""
    document = _measured(peer_group, mib << 20, tensors, rounds, device)
    if output is Output.JSON:
        typer.echo(msgspec.json.encode(document).decode())
    else:
        _print(document)
    if any(row.failed and not row.refused for row in document.rows if row.whose == "syncstack"):
        raise typer.Exit(1)


def _measured(group: PeerGroup, nbytes: int, tensors: int, rounds: int, device: str) -> Document:
    import torch

    from syncstack.bench.ways import Pair

    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        module = _weights(nbytes, tensors, device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"there is no room for the weights on {device!r}, or no such device",
            observed=str(error).split("\n")[0],
            consequence="Nothing was measured",
            next_step="syncstack facts shows the GPUs; --mib makes a version smaller",
        ) from None
    total = sum(buffer.nbytes for buffer in module.buffers())
    with Pair(module, device) as pair:
        rows = [_row(way, whose, make, pair, rounds) for way, whose, make in _ways(group, device)]
    floor = rows[0].ms
    rows = [
        msgspec.structs.replace(row, gb_per_s=total / row.ms / 1e6, floor_ratio=floor / row.ms) if row.ms else row
        for row in rows
    ]
    return Document(
        peer_group=group.value, device=device, bytes=total, tensors=tensors, rounds=rounds, rows=tuple(rows)
    )


def _weights(nbytes: int, tensors: int, device: str) -> torch.nn.Module:
    import torch

    module = torch.nn.Module()
    for number in range(tensors):
        size = max(1, nbytes // tensors // 2)
        module.register_buffer(f"w{number}", torch.randn(size, device=device).to(torch.bfloat16))
    return module


def _ways(group: PeerGroup, device: str) -> list[tuple[str, str, Maker]]:
    """Name, whose it is, and what makes it; the floor first."""
    from syncstack.bench import ways

    def ours(*transports: str) -> list[tuple[str, str, Maker]]:
        return [(transport, "syncstack", partial(ways.Ours, transport=transport)) for transport in transports]

    pickled: tuple[str, str, Maker] = ("pickle and a pipe", "others", ways.by_pickle)
    if group is PeerGroup.COLLECTIVE:
        return [("broadcast by Gloo", "floor", ways.by_broadcast), *ours("collective", "stream"), pickled]
    if group is PeerGroup.STAGED:
        floor = "the bus, both ways at once" if device.startswith("cuda") else "one copy"
        return [(floor, "floor", ways.by_bus), *ours("host_fd", "stream"), pickled]
    in_place = ("cuda_fd", "cuda_ipc") if device.startswith("cuda") else ("host_fd",)
    return [
        ("one copy", "floor", ways.by_copy),
        *ours(*in_place),
        ("torch, one bucket", "others", ways.by_flat),
        ("torch, by tensor", "others", ways.by_torch),
        pickled,
    ]


def _row(way: str, whose: str, make: Maker, pair: Pair, rounds: int) -> Row:
    """Measure one way. What it raises is in the row."""
    pair.change()
    try:
        move = make(pair)
        try:
            seconds = [_seconds(move) for _ in range(rounds + 1)]
        finally:
            getattr(move, "close", lambda: None)()
        equal = whose != "floor" and pair.ask("digest") == pair.digest()
    except Exception as error:  # noqa: BLE001 - others' ways raise what they like, and the next one is wanted
        refused = isinstance(error, HandleRefused)
        return Row(way=way, whose=whose, failed=str(error) or type(error).__name__, refused=refused)
    return Row(way=way, whose=whose, first_ms=seconds[0] * 1e3, ms=statistics.median(seconds[1:]) * 1e3, equal=equal)


def _seconds(move: Callable[[], None]) -> float:
    begin = time.perf_counter()
    move()
    return time.perf_counter() - begin


def _print(document: Document) -> None:
    console = Console()
    table = Table(
        "way", *(Column(name, justify="right") for name in ("first ms", "ms", "GB/s", "% of floor")), "equal",
        title=f"{document.peer_group}: {document.bytes} bytes in {document.tensors} tensors on {document.device}, "
        f"median of {document.rounds}",
    )  # fmt: skip
    for row in document.rows:
        if row.failed:
            table.add_row(escape(row.way), Text("refused") if row.refused else Text("failed", style="red"))
            continue
        equal = "" if row.whose == "floor" else "yes" if row.equal else "NO"
        percent = f"{row.floor_ratio * 100:.0f}"
        table.add_row(escape(row.way), f"{row.first_ms:.1f}", f"{row.ms:.1f}", f"{row.gb_per_s:.2f}", percent, equal)
    console.print(table)
    for row in document.rows:
        if row.failed:
            why = f"{row.way} {'refused' if row.refused else 'failed'}: {row.failed}"
            console.print(why, soft_wrap=True, markup=False, highlight=False)
    console.print(
        "Each way ends when the receiver's own weights hold the version. syncstack has digested it on both sides "
        "before that and once more after the load; the others' ways do not look.",
        soft_wrap=True,
    )
