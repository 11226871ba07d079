"""The trainer's end of an engine's control endpoint."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from typing import TypeVar

import httpx
import msgspec

from syncstack.errors import (
    DeadlineExceeded,
    EngineNotReady,
    EngineUnreachable,
    LinkRefused,
    ProtocolError,
    SyncstackError,
)
from syncstack.plan import Choice
from syncstack.refit.dial import Dial, UnixDial, Way, dial
from syncstack.refit.messages import BeginRequest, EngineInfo, ErrorReply, LeaseLine, StepReply, StepRequest
from syncstack.refit.state import StateReport
from syncstack.settings import Settings
from syncstack.weights.meta import ParamMeta
from syncstack.wire.link import Link, greet
from syncstack.wire.messages import PROTOCOL_VERSION

T = TypeVar("T")

END_S = 0.5
"""How long a stream may take to end by itself after its session has."""

PROBE_S = 3.0
"""How long one look for somebody who listens may take."""

BEATS_BEFORE_LOST = 4
"""Heartbeats that may fail to come before a lease is given up."""


class Lease:
    """A session as the engine sees it: lives as long as the ``begin`` stream, which a thread of ours reads."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.ended = ""
        """How the session ended, once it has."""
        self._over = threading.Event()
        threading.Thread(target=self._read, name="syncstack-lease", daemon=True).start()

    def _read(self) -> None:
        try:
            for line in self._response.iter_lines():
                self.ended = msgspec.json.decode(line, type=LeaseLine).ended
                if self.ended:
                    break
            else:
                self.ended = "the engine closed the session's stream"
        except (httpx.HTTPError, httpx.StreamError, msgspec.DecodeError, OSError) as error:
            self.ended = f"the engine's control endpoint went away ({error or type(error).__name__})"
        finally:
            # Only this thread touches the response, so that nobody closes it under a read.
            with contextlib.suppress(httpx.HTTPError, OSError):
                self._response.close()
            self._over.set()

    def over(self) -> bool:
        """Whether the session has ended, for any reason."""
        return self._over.is_set()

    def close(self) -> None:
        """End the stream; the engine ends the session if it is still open. Blocks for at most a second."""
        if self._over.wait(END_S):
            return
        with contextlib.suppress(OSError):
            self._response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._over.wait(END_S)


class EngineClient:
    """One engine, as a trainer rank sees it. Not thread-safe, except that ``close`` may interrupt a call."""

    def __init__(self, way: Dial, settings: Settings) -> None:
        self._dial = way
        self._settings = settings
        self._http = way.http(settings.control_s)
        self.info: EngineInfo
        self.renew()

    @classmethod
    def connect(cls, address: str, *, settings: Settings) -> EngineClient:
        """Wait until the engine at ``unix:FOLDER`` or ``tcp://HOST:PORT`` answers, at most ``settings.engine_ready_s``.

        Raises UsageError for an address of another form, SettingsError for TCP without a token, EngineNotReady when
        the time is up, LinkRefused when the engine has another token.
        """
        return cls(dial(address, settings), settings)

    def renew(self, wait_s: float | None = None) -> None:
        """Ask the engine anew who it is: it may have been restarted. Waits as ``connect`` does, or for ``wait_s``."""
        wait_s = self._settings.engine_ready_s if wait_s is None else wait_s
        deadline = time.monotonic() + wait_s
        while True:
            answer_s = min(self._settings.control_s, max(0.1, deadline - time.monotonic()))
            try:
                self._dial.probe(deadline=min(deadline, time.monotonic() + PROBE_S))
                self.reset()  # to the address that answered
                self.info = self._call("GET", "/hello", EngineInfo, deadline_s=answer_s)
                break
            except (EngineUnreachable, DeadlineExceeded) as error:
                if time.monotonic() >= deadline:
                    raise EngineNotReady(
                        f"engine {self._dial.name} did not become ready within {wait_s:g} s",
                        observed=str(error),
                        next_step=f"look at the engine's log; {self._dial.hint}",
                    ) from None
        if self.info.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"engine {self.info.name} speaks another protocol version",
                observed=str(self.info.protocol),
                expected=str(PROTOCOL_VERSION),
                next_step="run the same syncstack release on both sides",
            )

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.info.name

    @property
    def way(self) -> Way:
        """How the engine was reached."""
        return self._dial.way

    @property
    def address(self) -> str:
        """By which another process reaches this same engine."""
        return self._dial.address

    def _call(self, method: str, path: str, kind: type[T], *, body: object = None, deadline_s: float) -> T:
        content = None if body is None else msgspec.json.encode(body)
        try:
            response = self._http.request(method, path, content=content, timeout=deadline_s)
        except httpx.TimeoutException:
            raise DeadlineExceeded(f"engine {self._dial.name} did not answer {path} within {deadline_s:g} s") from None
        except (httpx.HTTPError, RuntimeError, OSError) as error:
            raise EngineUnreachable(
                f"engine {self._dial.name} went away during {path}", observed=str(error) or type(error).__name__
            ) from None
        return self._decode(response, kind)

    def _decode(self, response: httpx.Response, kind: type[T]) -> T:
        try:
            if response.status_code == httpx.codes.OK:
                return msgspec.json.decode(response.content, type=kind)
            failure: SyncstackError = msgspec.json.decode(response.content, type=ErrorReply).to_error()
        except msgspec.DecodeError as error:
            failure = ProtocolError(
                f"engine {self._dial.name} answered with something else",
                observed=f"status {response.status_code}: {error}",
            )
        raise failure

    def state(self) -> StateReport:
        """The engine's state now."""
        return self._call("GET", "/state", StateReport, deadline_s=self._settings.control_s)

    def end(self) -> None:
        """Let the engine's server end as SIGTERM would, running requests included. Raises EngineBusy during a refit."""
        self._call("POST", "/end", StateReport, deadline_s=self._settings.control_s)

    def begin(self, session: str, version: int, tensors: tuple[ParamMeta, ...], *, stand_s: float = 0.0) -> Lease:
        """Open a session. ``stand_s``: see BeginRequest. Raises ManifestMismatch or EngineBusy; nothing has changed
        then."""
        body = msgspec.json.encode(BeginRequest(session=session, version=version, tensors=tensors, stand_s=stand_s))
        # A read timeout on the stream is the heartbeat's: an engine that is stopped is noticed without our asking.
        silence = self.info.heartbeat_s * BEATS_BEFORE_LOST + 1.0
        timeout = httpx.Timeout(self._settings.control_s, read=silence)
        request = self._http.build_request("POST", "/begin", content=body, timeout=timeout)
        try:
            response = self._http.send(request, stream=True)
            if response.status_code != httpx.codes.OK:
                response.read()
        except (httpx.HTTPError, OSError) as error:
            raise EngineUnreachable(f"engine {self.name} went away during /begin", observed=str(error)) from None
        if response.status_code != httpx.codes.OK:
            self._decode(response, LeaseLine)
        return Lease(response)

    def step(self, name: str, request: StepRequest, *, deadline_s: float) -> StepReply:
        """One step of the transaction; blocks until the engine has done it."""
        return self._call("POST", f"/{name}", StepReply, body=request, deadline_s=deadline_s)

    def open_links(self, rank: int, choices: Sequence[Choice]) -> list[Link]:
        """A data link to every worker, in rank order; ``choices`` says how each worker's descriptors travel."""
        links: list[Link] = []
        try:
            for worker, choice in zip(self.info.workers, choices, strict=True):
                deadline = time.monotonic() + self._settings.link_s
                link = self._way(choice).link(worker, rank=rank, deadline=deadline)
                links.append(link)
                peer = greet(link, role="trainer", rank=rank, deadline=deadline)
                if peer.nonce != worker.hello.nonce or peer.rank != worker.rank:
                    raise LinkRefused(
                        f"another process answers for {self.name}'s worker {worker.rank}",
                        observed=f"rank {peer.rank}, {peer.nonce}",
                        expected=f"rank {worker.rank}, {worker.hello.nonce}",
                        next_step="connect to the engine anew: it was restarted",
                    )
        except BaseException:
            for link in links:
                link.close()
            raise
        return links

    def _way(self, choice: Choice) -> Dial:
        """A descriptor in a message needs a unix socket, however the engine was reached."""
        if choice.fd == "scm" and self._dial.way != "unix":
            return UnixDial(self._settings.socket_dir / self.name)
        return self._dial

    def reset(self) -> None:
        """Drop every connection. A call that another thread has in flight ends at its own deadline at the latest."""
        self._http.close()
        self._http = self._dial.http(self._settings.control_s)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
