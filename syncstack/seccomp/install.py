"""Seccomp profiles on a node's disk, where a kubelet reads them, and the proof for a pod that they are there.

A pod whose profile is not on its node yet ends in CreateContainerError, over and over, and says a path. So one
container of the node writes the profiles and answers for what it wrote, and a pod's first container waits for that
answer. It asks for the content and not for a name: after an update of a profile, its pods do not start under the old.
"""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from syncstack.errors import DeadlineExceeded, ProfileError, SettingsError
from syncstack.files import write_whole
from syncstack.seccomp.profile import parse
from syncstack.wire.tcp import Address

POLL_S = 1.0
ASK_S = 5.0
"""How long the node's answer may take."""


def digest(content: bytes) -> str:
    """By what a profile's content is named: its SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def install(source: Path, target: Path) -> dict[str, str]:
    """Write every ``*.json`` of ``source`` into ``target``, each at once or not at all. Returns their digests by name.

    Raises ProfileError for a file that is no profile and for a folder that holds none, and SettingsError where
    ``target`` cannot be written; nothing was written then, or, in the last case, whole files only.
    """
    found = {path.name: path.read_bytes() for path in sorted(source.glob("*.json")) if path.is_file()}
    if not found:
        raise ProfileError(f"{source} holds no profile", expected="files *.json", consequence="Nothing was installed")
    for name, content in found.items():
        parse(content, origin=str(source / name))
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in found.items():
            # A kubelet that reads meanwhile finds the old profile or the new one.
            if not (target / name).is_file() or (target / name).read_bytes() != content:
                write_whole(target / name, content)
    except OSError as error:
        raise SettingsError(
            f"profiles cannot be written to {target}",
            observed=f"{error.strerror}: {error.filename}",
            next_step="run this as the folder's owner; a container that installs profiles needs uid 0, no capability",
        ) from None
    return {name: digest(content) for name, content in found.items()}


def serve(digests: Mapping[str, str], address: Address) -> None:
    """Answer ``GET /NAME`` with the digest of what was installed by that name, and ``GET /`` with nothing. Blocks until
    SIGTERM. To read only; there is no other route. Raises SettingsError where the address cannot be listened on."""

    class Answers(BaseHTTPRequestHandler):
        timeout = ASK_S

        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            status = HTTPStatus.OK if not name or name in digests else HTTPStatus.NOT_FOUND
            body = digests.get(name, "").encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing: each starting pod asks every second."""

    try:
        server = ThreadingHTTPServer((address.host, address.port), Answers)
    except OSError as error:
        raise SettingsError(f"{address} cannot be listened on", observed=str(error)) from None
    with server:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
        server.serve_forever()


def await_installed(profile: Path, url: str, wait_s: float, say: Callable[[str], None]) -> None:
    """Wait until the node answers that it has ``profile``, this very content, by its name. ``say`` is told why it
    waits, each reason once. Blocks; raises DeadlineExceeded after ``wait_s`` with the last reason."""
    wanted = digest(profile.read_bytes())
    deadline, last = time.monotonic() + wait_s, ""
    while True:
        why = _missing(profile.name, wanted, url)
        if not why:
            return
        if why != last:
            say(f"waiting for seccomp profile {profile.name}: {why}")
        last = why
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(
                f"this node did not get the seccomp profile {profile.name} within {wait_s:g} s",
                observed=why,
                consequence="Nothing of this pod was started",
                next_step="look at the installer: kubectl --namespace syncstack-seccomp get pods --output wide",
            )
        time.sleep(POLL_S)


def _missing(name: str, wanted: str, url: str) -> str:
    """Why the profile is not there yet; empty when it is."""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/{name}", timeout=ASK_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"nobody answers at {url} ({error}); the installer runs on each node that is to have profiles"
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return "the installer of this node has none of that name"
    if answer.status_code != HTTPStatus.OK:
        return f"the installer of this node answers {answer.status_code}"
    if answer.text != wanted:
        return f"this node has another version of it (observed: {answer.text[:12]}; expected: {wanted[:12]})"
    return ""
