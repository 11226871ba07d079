"""The gate before an engine's own routes: nothing unverified serves, and every answer names its version.

A plain ASGI middleware, so that it fits any engine's server.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from syncstack.refit.state import EngineState, Step

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

VERSION_HEADER = b"x-syncstack-version"
MIN_VERSION_HEADER = b"x-syncstack-min-version"
"""A request's: the oldest weights that may answer it, a decimal number."""

MAX_DIGITS = 16

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/load", "/v1/models"})
"""Read-only routes that neither generate nor touch weights: always let through, but for a deaf engine's health."""

HEALTH_PATH = "/health"

READY_PATH = "/ready"
"""200 while a request would be served, 503 with the reason while it would not; asked for by who routes requests, such
as a kubelet. It is the gate's own answer on the engine's port, and says what any request would find out."""


class Gate:
    """Refuses every request that could generate while the weights are not verified.

    An engine whose control endpoint does not listen, not yet or no more, is not healthy, whatever else it can do: no
    trainer gets in. That is all that its health tells anybody who asks.

    A refused request gets 503 and, while an update is on, ``Retry-After: 1``. So does one that asks for newer weights
    than these, with ``Retry-After`` only where they are on their way: whoever cannot wait asks another engine.

    Version is that of the moment when the request was let in: with ``pause_mode=keep`` a request that is frozen over an
    update ends under the next one. The other modes wait for every request in the gate.
    """

    def __init__(self, app: App, state: EngineState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer for the engine."""
        path = scope["path"] if scope["type"] == "http" else ""
        if path == HEALTH_PATH and not self._state.reachable:
            await _answer(send, "no control endpoint listens", "engine_unreachable", [])
            return
        if scope["type"] == "lifespan" or path in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        wanted = _wanted(scope)
        if wanted is None:
            await _answer(send, _NO_VERSION, "bad_version", [], status=400)
            return
        if not self._state.accepts_requests or wanted > self._state.version:
            await self._refuse(scope, send, wanted)
            return
        version = str(self._state.version).encode()
        if path == READY_PATH:
            await _send(send, 200, [(VERSION_HEADER, version)], b"")
            return
        self._state.in_flight += 1
        try:
            await self._serve(scope, receive, send, version)
        finally:
            self._state.in_flight -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send, version: bytes) -> None:
        async def with_version(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept"):
                message["headers"] = [*message.get("headers", ()), (VERSION_HEADER, version)]
            await send(message)

        await self._app(scope, receive, with_version)

    async def _refuse(self, scope: Scope, send: Send, wanted: int) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013, "reason": "weights are not verified, or too old"})
            return
        state = self._state
        if state.accepts_requests:
            coming = state.target is not None and state.target >= wanted
            headers = [(VERSION_HEADER, str(state.version).encode()), *[(b"retry-after", b"1")] * coming]
            text = f"this engine serves version {state.version}, and the request asks for {wanted} or later"
            await _answer(send, text, "engine_stale", headers)
            return
        dirty = state.step is Step.DIRTY or bool(state.reason)
        updating = f"weights are being updated ({state.step})"
        if state.held:
            updating = f"the engine waits for its first refit ({state.step})"
        message = f"the engine refuses to serve: {state.reason}" if dirty else updating
        headers = [(VERSION_HEADER, str(state.version).encode())]
        if not dirty:
            headers.append((b"retry-after", b"1"))
        await _answer(send, message, "engine_dirty" if dirty else "engine_updating", headers)


_NO_VERSION = "X-Syncstack-Min-Version is no version: one decimal number of up to 16 digits"


def _wanted(scope: Scope) -> int | None:
    """The version that a request asks for at least, 0 where it asks for none; None for one that makes no sense."""
    given = [value for name, value in scope["headers"] if name == MIN_VERSION_HEADER]
    if not given:
        return 0
    value = given[0]
    return int(value) if len(given) == 1 and value.isdigit() and len(value) <= MAX_DIGITS else None


async def _answer(
    send: Send, message: str, kind: str, headers: list[tuple[bytes, bytes]], *, status: int = 503
) -> None:
    """A refusal in the form of OpenAI's errors."""
    error = {"message": message, "type": kind, "code": status}
    headers = [(b"content-type", b"application/json"), *headers]
    await _send(send, status, headers, json.dumps({"error": error}).encode())


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
