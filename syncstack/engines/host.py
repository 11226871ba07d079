"""Start the control endpoint of an engine, from inside the engine's own server process."""

from __future__ import annotations

import asyncio
import logging
import socket

import msgspec

from syncstack.engines.listen import Listen, control_sockets
from syncstack.errors import LoadFailed, UsageError
from syncstack.refit.control import Control, EngineHost
from syncstack.refit.http import ControlServer
from syncstack.refit.messages import ErrorReply, WorkerInfo
from syncstack.refit.state import EngineState
from syncstack.settings import Settings
from syncstack.wire import tcp, unix
from syncstack.wire.auth import Token

log = logging.getLogger(__name__)

START_S = 120.0
"""How long the workers may take to open their data sockets."""


async def start_control(host: EngineHost, state: EngineState, settings: Settings) -> asyncio.Task[None]:
    """Open every worker's data sockets and serve the control endpoint; the engine is at version 0 from here on.

    Returns the server's task; cancel it to stop. Raises UsageError when it cannot listen as ``settings.listen`` says.
    """
    listen = Listen.of(settings)
    token = settings.required_token(f"listening on {listen.tcp}") if listen.tcp is not None else None
    if listen.folder is not None:
        unix.prepare_folder(listen.folder)
    workers = []
    for reply in await host.call_workers("info", "", "", START_S):
        if "error" in reply:
            raise ErrorReply(**reply["error"]).to_error()
        workers.append(msgspec.convert(reply, WorkerInfo))
    if not workers:
        raise LoadFailed("the engine has no workers")
    control = Control(
        name=settings.engine_name,
        host=host,
        state=state,
        workers=tuple(sorted(workers, key=lambda worker: worker.rank)),
        heartbeat_s=settings.heartbeat_s,
        stall_s=settings.stall_s,
    )
    sockets = control_sockets(listen, settings)
    state.started(held=settings.wait_for_refit)
    return asyncio.get_running_loop().create_task(_serve(control, sockets, token, listen))


async def _serve(control: Control, sockets: list[socket.socket], token: Token | None, listen: Listen) -> None:
    """One server for each socket: the one of TCP asks for the token, the other for the kernel's word.

    When one of them ends, the engine's health says so.
    """

    def deaf(_: asyncio.Task[None]) -> None:
        control.state.reachable = False

    servers = []
    for sock in sockets:
        local = sock.family == socket.AF_UNIX
        log.info("control endpoint at %s", sock.getsockname() if local else tcp.address_of(sock))
        serving = ControlServer(control, None if local else token).serve(sockets=[sock])
        servers.append(asyncio.create_task(serving))
        servers[-1].add_done_callback(deaf)
    try:
        await asyncio.wait(servers)
    finally:
        # In this very turn of the loop: when the engine's own server ends there may be no other.
        for server in servers:
            server.cancel()
        for path in () if listen.folder is None else listen.folder.glob("*.sock"):
            path.unlink(missing_ok=True)


def check_port(host: str, port: int) -> None:
    """Raise UsageError when ``port`` is taken: in a second, not after a minute of loading a model."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be listened on",
                observed=str(error),
                consequence="The engine was not started",
                next_step="choose another --port",
            ) from None
