"""The control endpoint as HTTP. This step serves it on a unix socket; the routes do not know.

Routes: ``GET /hello``, ``GET /state``, ``POST /begin`` (a stream: the lease), and ``POST`` of each step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Generator
from typing import TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from syncstack.errors import (
    EngineBusy,
    EngineDirty,
    EngineError,
    LinkRefused,
    ProtocolError,
    SyncstackError,
    UsageError,
)
from syncstack.refit.control import Control
from syncstack.refit.messages import MAX_BODY_BYTES, BeginRequest, ErrorReply, LeaseLine, StepRequest
from syncstack.wire import unix

log = logging.getLogger(__name__)

STEPS = ("pause", "load", "verify", "commit", "resume", "abort")

T = TypeVar("T")


def _status(error: SyncstackError) -> int:
    if isinstance(error, UsageError):
        return 422
    if isinstance(error, EngineBusy | EngineDirty):
        return 409
    return 400 if isinstance(error, ProtocolError) else 500


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def _body(request: Request, kind: type[T]) -> T:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ProtocolError("body too large", expected=f"<= {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the body is not a {kind.__name__}", observed=str(error)) from None


def build_app(control: Control) -> Starlette:
    """The routes over one engine's control."""

    async def hello(_: Request) -> Response:
        return _json(control.hello())

    async def state(_: Request) -> Response:
        return _json(control.state.report())

    async def begin(request: Request) -> Response:
        offer = await _body(request, BeginRequest)
        await control.begin(offer)

        async def lines() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(control.lease(offer.session)) as lease:
                async for ended in lease:
                    yield msgspec.json.encode(LeaseLine(alive=not ended, ended=ended)) + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def step(request: Request) -> Response:
        return _json(await control.step(request.url.path[1:], await _body(request, StepRequest)))

    async def on_error(_: Request, error: Exception) -> Response:
        if not isinstance(error, SyncstackError):
            log.error("control endpoint", exc_info=error)
            error = EngineError("the engine's control endpoint failed", observed=f"{type(error).__name__}: {error}")
        return _json(ErrorReply.of(error), _status(error))

    return Starlette(
        routes=[
            Route("/hello", hello),
            Route("/state", state),
            Route("/begin", begin, methods=["POST"]),
            *(Route(f"/{name}", step, methods=["POST"], name=name) for name in STEPS),
        ],
        exception_handlers={SyncstackError: on_error, Exception: on_error},
    )


class _PeerCheckedProtocol(H11Protocol):
    """HTTP/1.1 that asks the kernel who connected before it reads a byte."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        sock = transport.get_extra_info("socket")
        try:
            if sock.family == socket.AF_UNIX:
                unix.check_peer(sock)
        except LinkRefused as error:
            log.warning("control endpoint: %s", error)
            super().connection_made(transport)  # type: ignore[arg-type]
            transport.abort()  # type: ignore[attr-defined]
            return
        super().connection_made(transport)  # type: ignore[arg-type]


class ControlServer(uvicorn.Server):
    """uvicorn inside a program that owns its signals and its event loop."""

    def __init__(self, control: Control) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(control),
                http=_PeerCheckedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                limit_concurrency=64,
                timeout_graceful_shutdown=1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the engine's own server."""
        yield
