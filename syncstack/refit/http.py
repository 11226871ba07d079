"""The control endpoint as HTTP, on a unix socket or over TCP; the routes do not know which.

Routes: ``GET /hello``, ``GET /state``, ``POST /begin`` (a stream: the lease), ``POST`` of each step, and ``POST
/end``. Over TCP each request carries ``Authorization: Bearer``; see ``wire/auth.py`` for what that proves and what it
does not.
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
    DeadlineExceeded,
    EngineBusy,
    EngineDirty,
    EngineError,
    LinkRefused,
    ProtocolError,
    SyncstackError,
    UsageError,
)
from syncstack.refit.control import Control
from syncstack.refit.gate import App, Receive, Scope, Send
from syncstack.refit.messages import MAX_BODY_BYTES, BeginRequest, ErrorReply, LeaseLine, StepRequest
from syncstack.wire import unix
from syncstack.wire.auth import Token

log = logging.getLogger(__name__)

STEPS = ("pause", "load", "verify", "commit", "resume", "abort")

HEAD_S = 10.0
"""How long a client may take from its connection, or from the last answer, to the end of a request's head. One that is
idle between two requests is closed by uvicorn before that."""

BODY_S = 30.0
"""How long it may then take to send the body. 64 MiB in that time are 18 Mbit/s."""

T = TypeVar("T")


def _status(error: SyncstackError) -> int:
    if isinstance(error, UsageError):
        return 422
    if isinstance(error, EngineBusy | EngineDirty):
        return 409
    if isinstance(error, LinkRefused):
        return 401
    return 400 if isinstance(error, ProtocolError) else 500


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def _body(request: Request, kind: type[T]) -> T:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise ProtocolError("body too large", expected=f"<= {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {BODY_S:g} s") from None
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

    async def end(_: Request) -> Response:
        return _json(await control.end())

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
            Route("/end", end, methods=["POST"]),
            *(Route(f"/{name}", step, methods=["POST"], name=name) for name in STEPS),
        ],
        exception_handlers={SyncstackError: on_error, Exception: on_error},
    )


class RequireToken:
    """Lets nobody through who does not show the token's bearer. Answers from the head alone, so reads no body."""

    def __init__(self, app: App, token: Token) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer 401."""
        given = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        if len(given) == 1 and self._token.authorizes(given[0]):
            await self._app(scope, receive, send)
            return
        error = LinkRefused(
            "the engine's control endpoint was not shown the token that it shares with its trainer",
            observed="another one" if given else "none",
            next_step="give trainer and engine the same SYNCSTACK_TOKEN_FILE",
        )
        log.warning("control endpoint: refused %s: %s", scope.get("client"), error)
        response = _json(ErrorReply.of(error), _status(error))
        response.headers.update({"www-authenticate": "Bearer", "connection": "close"})
        await response(scope, receive, send)


class _Protocol(H11Protocol):
    """HTTP/1.1 that asks the kernel who connected before it reads a byte, and waits for nobody's head for ever."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        sock = transport.get_extra_info("socket")
        try:
            if sock.family == socket.AF_UNIX:
                unix.check_peer(sock)
            elif not isinstance(self.config.app, RequireToken):
                raise LinkRefused("this control endpoint is for the engine's unix socket only")
        except LinkRefused as error:
            log.warning("control endpoint: %s", error)
            self.transport.abort()
            return
        self._expect_head()

    def _expect_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()  # a request is being served

    def on_response_complete(self) -> None:
        self._expect_head()  # before what may have been sent already is looked at
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)


class ControlServer(uvicorn.Server):
    """uvicorn inside a program that owns its signals and its event loop. Without a token: for unix sockets only."""

    def __init__(self, control: Control, token: Token | None = None) -> None:
        app = build_app(control)
        super().__init__(
            uvicorn.Config(
                app if token is None else RequireToken(app, token),
                http=_Protocol,
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
