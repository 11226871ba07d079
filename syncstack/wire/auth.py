"""Who may talk over TCP: both sides prove that they hold one token, before any other frame and without sending it.

::

    worker -> trainer   Challenge  its rank, 32 random bytes
    trainer -> worker   Answer     its rank, 32 random bytes, HMAC-SHA256(key, "trainer" + transcript)
    worker -> trainer   Welcome                               HMAC-SHA256(key, "worker" + transcript)

The transcript is the protocol version, both ranks and both nonces, so a proof is good for one connection, one direction
and one pair of ranks. The trainer, who knows whom it dialled, proves first: nobody gets a proof to try tokens on by
merely connecting. Neither side encrypts: whoever can read or change packets between them can read and change what
follows. The network between trainer and engine must be trusted with the weights, or be a tunnel.

The control endpoint's bearer is derived from the token as well, and is not the token: who overhears or receives it can
speak to that endpoint, but cannot open a data link or pass for an engine's worker.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import struct
from pathlib import Path

from syncstack.errors import LinkRefused, ProtocolError, SettingsError
from syncstack.wire.link import Link, close_fds
from syncstack.wire.messages import PROTOCOL_VERSION, Answer, Challenge, Fault, Message, Welcome

MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096

AUTH_S = 5.0
"""How long a peer that connected may take to prove itself."""

AUTH_FRAME_BYTES = 16 << 10
"""Largest frame before that; a Fault's text is the longest of them."""

_TRANSCRIPT = struct.Struct("!HII")


class Token:
    """A secret that trainer and engine were both given. Nothing shows it: no repr, no error, no log, no frame."""

    def __init__(self, secret: bytes) -> None:
        """Raises SettingsError for a secret that is too short to be one, or absurdly long."""
        if not MIN_TOKEN_BYTES <= len(secret) <= MAX_TOKEN_BYTES:
            raise SettingsError(
                "the token cannot be used",
                observed=f"{len(secret)} bytes",
                expected=f"{MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} bytes",
                next_step="make one with `openssl rand -hex 32` and give it to trainer and engine",
            )
        self._link_key = hmac.digest(secret, b"syncstack data link", "sha256")
        self._bearer = hmac.digest(secret, b"syncstack control endpoint", "sha256").hex()
        self._cluster = hmac.digest(secret, b"syncstack ray cluster", "sha256").hex()

    def __repr__(self) -> str:
        return "Token(hidden)"

    @property
    def authorization(self) -> str:
        """The value of the Authorization header that an engine's control endpoint wants to see."""
        return f"Bearer {self._bearer}"

    @property
    def cluster_secret(self) -> str:
        """What the nodes of a Ray cluster prove themselves with. Ray sends it as it is: who hears it may run code on
        the nodes, but has neither of the other keys."""
        return self._cluster

    def authorizes(self, header: bytes) -> bool:
        """Whether a header's value is ours; takes as long whatever is wrong with it."""
        scheme, _, value = header.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), self._bearer.encode())

    def proof(self, role: str, challenge: Challenge, rank: int, nonce: bytes) -> bytes:
        """What the trainer or the worker of one connection proves itself with."""
        text = _TRANSCRIPT.pack(PROTOCOL_VERSION, challenge.rank, rank) + challenge.nonce + nonce
        return hmac.digest(self._link_key, role.encode() + b"\0" + text, "sha256")


def read_token(path: Path) -> Token:
    """The token in a file, without white space at its ends. Raises SettingsError, which never quotes it.

    On an ordinary file system it must be 0600 or 0400 and belong to this user or to root. On a read-only mount others
    may read it, and it may be anybody's: that is how Kubernetes (root's, 0644 or 0440) and compose (the file of whoever
    started it) mount a secret, inside one container's own mount namespace. Nobody but its owner may write it anywhere.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hang us
    except OSError as error:
        raise _unusable(path, error.strerror or str(error), "a file that this process can read") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _unusable(path, "not a regular file", "a regular file")
        mounted_read_only = bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY)
        forbidden = 0o022 if mounted_read_only else 0o077
        owned = mounted_read_only or status.st_uid in (0, os.geteuid())
        if status.st_mode & forbidden or not owned:
            raise _unusable(
                path,
                f"mode {status.st_mode & 0o7777:04o}, owner uid {status.st_uid}",
                f"mode 0600 or 0400, owner uid {os.geteuid()} or root; or a secret on a read-only mount",
            )
        return Token(os.read(fd, MAX_TOKEN_BYTES + 64).strip())
    finally:
        os.close(fd)


def _unusable(path: Path, observed: str, expected: str) -> SettingsError:
    return SettingsError(
        f"the token file {path} cannot be used",
        observed=observed,
        expected=expected,
        next_step="set SYNCSTACK_TOKEN_FILE to a file that only this user can read",
    )


def prove_as_trainer(link: Link, token: Token, *, rank: int, worker: int, deadline: float) -> None:
    """Prove the token to worker ``worker`` and see it proven. Raises LinkRefused, ProtocolError, LinkLost or
    DeadlineExceeded; the caller closes the link then."""
    challenge = _receive(link, deadline)
    if not isinstance(challenge, Challenge):
        raise _unexpected(challenge, "Challenge")
    if challenge.rank != worker:
        raise LinkRefused(
            "another worker answers at this address", observed=f"rank {challenge.rank}", expected=f"rank {worker}"
        )
    nonce = secrets.token_bytes(32)
    proof = token.proof("trainer", challenge, rank, nonce)
    link.send(Answer(rank=rank, nonce=nonce, proof=proof), deadline=deadline)
    welcome = _receive(link, deadline)
    if not isinstance(welcome, Welcome):
        raise _unexpected(welcome, "Welcome")
    if not hmac.compare_digest(welcome.proof, token.proof("worker", challenge, rank, nonce)):
        raise LinkRefused("the engine's worker did not prove that it holds our token", next_step=_SAME_TOKEN)
    link.proven = "worker", worker


def prove_as_worker(link: Link, token: Token, *, rank: int, deadline: float) -> None:
    """Have the trainer prove the token, then prove it in turn. Raises as ``prove_as_trainer`` does."""
    challenge = Challenge(rank=rank, nonce=secrets.token_bytes(32))
    link.send(challenge, deadline=deadline)
    answer = _receive(link, deadline)
    if not isinstance(answer, Answer):
        raise _unexpected(answer, "Answer")
    if not hmac.compare_digest(answer.proof, token.proof("trainer", challenge, answer.rank, answer.nonce)):
        raise LinkRefused("the trainer did not prove that it holds our token", next_step=_SAME_TOKEN)
    proof = token.proof("worker", challenge, answer.rank, answer.nonce)
    link.send(Welcome(proof=proof), deadline=deadline)
    link.proven = "trainer", answer.rank


_SAME_TOKEN = "give trainer and engine the same SYNCSTACK_TOKEN_FILE"  # noqa: S105 - a hint, not a secret


def _receive(link: Link, deadline: float) -> Message:
    message, fds = link.receive(deadline=deadline, max_bytes=AUTH_FRAME_BYTES)
    close_fds(fds)
    return message


def _unexpected(message: Message, expected: str) -> LinkRefused | ProtocolError:
    if isinstance(message, Fault):
        return LinkRefused(f"the peer refused the link: {message.text}")
    return ProtocolError("unexpected message from a peer", observed=type(message).__name__, expected=expected)
