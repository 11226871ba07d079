"""Every error that syncstack raises on purpose, as one tree.

::

    SyncstackError                 base; carries observed / expected / consequence / next step
    |-- UsageError                 the caller's input is wrong; nothing was started           (exit 2)
    |   |-- SettingsError          an option or environment variable has a bad value
    |   |   `-- PortTaken          somebody listens on that port already; names who, where it can be known
    |   |-- ModelFolderError       a model folder without config, with missing or broken shards
    |   |-- ProfileError           a seccomp profile that is unknown, malformed or not applicable
    |   |-- EngineNotReady         no engine answered within the time that was given for it to start
    |   `-- ManifestMismatch       the engine holds another model: names, shapes or dtypes differ
    |-- PlanError                  no transport can serve this link; lists why for each
    |-- LinkError                  the data link between a trainer rank and an engine worker
    |   |-- LinkRefused            the peer is not who it must be, or says no
    |   |-- LinkLost               the peer went away
    |   `-- ProtocolError          bytes that are not the protocol: bad frame, type, length, version
    |-- TransportError             moving or mapping bytes failed
    |   |-- HandleRefused          the peer's memory cannot be opened here; the text names the gate
    |   |-- GpuError               the CUDA driver refused a call; names the call and its answer
    |   |-- GroupLost              a group of trainer and workers could not be made, or a member broke off
    |   |-- PathTooSlow            strict: a transport is at less than half of what its trial measured
    |   `-- DigestMismatch         what arrived is not what was sent
    |-- EngineError                the engine's side of the transaction
    |   |-- EngineUnreachable      no answer within the deadline, or the connection ended
    |   |-- EngineBusy             another version's session is open
    |   |-- EngineDirty            weights may be mixed; the engine refuses to serve
    |   |-- LoadFailed             the engine's own loader failed
    |   `-- FleetTooSmall          fewer engines live than are needed, and nothing will change that in time
    |-- RankLost                   another rank of the same trainer has gone
    |-- RefitFailed                a refit ended without its version; names the phase and the state left behind
    `-- DeadlineExceeded           a bounded wait ran out
"""

from __future__ import annotations


class SyncstackError(Exception):
    """Base of the tree.

    The text says, in this order, what happened, what was observed and expected, what follows from it, and the next
    command or change. Parts that do not apply are left out; ``str()`` is the whole, in one line.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        observed: str | None = None,
        expected: str | None = None,
        consequence: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.observed = observed
        self.expected = expected
        self.consequence = consequence
        self.next_step = next_step
        super().__init__(self._text())

    def _text(self) -> str:
        text = self.what
        if self.observed is not None:
            text += f" (observed: {self.observed}"
            text += f"; expected: {self.expected})" if self.expected is not None else ")"
        elif self.expected is not None:
            text += f" (expected: {self.expected})"
        if self.consequence:
            text += f". {self.consequence}"
        if self.next_step:
            text += f". Next: {self.next_step}"
        return text


class UsageError(SyncstackError):
    """The caller's input is wrong and nothing was started."""

    exit_code = 2


class SettingsError(UsageError):
    """An option or environment variable has a value that cannot be used."""


class PortTaken(SettingsError):
    """Somebody listens on that port, or did a moment ago."""


class ModelFolderError(UsageError):
    """A model folder lacks its config, a shard, or holds something that cannot be read."""


class ProfileError(UsageError):
    """A seccomp profile is unknown, malformed, or cannot be applied by this process."""


class ManifestMismatch(UsageError):
    """The offered weights are not this engine's: names, shapes or dtypes differ. The engine kept its old weights."""


class EngineNotReady(UsageError):
    """No engine answered within the time that was given for it to start."""


class PlanError(SyncstackError):
    """No transport can serve a link."""


class LinkError(SyncstackError):
    """The data link between one trainer rank and one engine worker."""


class LinkRefused(LinkError):
    """The peer has the wrong identity, or refused the request."""


class LinkLost(LinkError):
    """The peer closed the link or died."""


class ProtocolError(LinkError):
    """Bytes on a link or a control endpoint that are not the protocol."""


class TransportError(SyncstackError):
    """Moving or mapping bytes failed."""


class HandleRefused(TransportError):
    """The peer's memory cannot be opened by this process. The text names what forbids it, and never only an errno."""


class GpuError(TransportError):
    """The CUDA driver refused a call. ``code`` is the CUresult's name."""

    def __init__(self, call: str, code: str = "", **parts: str) -> None:
        self.call = call
        self.code = code
        # The text alone comes back from another process: see ``transports.answers``.
        super().__init__(f"{call} failed" if code else call, **({"observed": code} if code else {}), **parts)


class GroupLost(TransportError):
    """A group of trainer and workers could not be made, or one of its members broke off."""


class PathTooSlow(TransportError):
    """A transport is much slower than its trial was, and strict mode forbids that."""


class DigestMismatch(TransportError):
    """What arrived is not what was sent."""


class EngineError(SyncstackError):
    """The engine's side of the transaction."""


class EngineUnreachable(EngineError):
    """No answer within the deadline, or the connection ended before the answer."""


class EngineBusy(EngineError):
    """Another version's session is open on the engine."""


class EngineDirty(EngineError):
    """The engine's weights may be mixed; it refuses to serve until a full refit."""


class LoadFailed(EngineError):
    """The engine's own loader failed."""


class FleetTooSmall(EngineError):
    """Fewer engines live than are needed, and nothing will change that in time. Names each with its state."""


class RankLost(SyncstackError):
    """Another rank of the same trainer has gone, or does not answer."""


class RefitFailed(SyncstackError):
    """A refit ended without publishing its version.

    ``phase`` is the phase that failed; ``engine_state`` the state the engine was last known to be in.
    """

    def __init__(self, what: str, *, phase: str, engine_state: str = "unknown", next_step: str | None = None) -> None:
        self.phase = phase
        self.engine_state = engine_state
        super().__init__(what, consequence=f"The engine is {engine_state}", next_step=next_step)


class DeadlineExceeded(SyncstackError):
    """A bounded wait ran out."""
