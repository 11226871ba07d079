"""Every option, typed, with its environment name. Nothing below this module and the CLI reads the environment.

An option ``x`` is read from ``SYNCSTACK_X``. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from syncstack.errors import SettingsError
from syncstack.wire.auth import Token, read_token

PauseMode = Literal["wait", "abort", "keep"]


class Settings(BaseSettings):
    """All options of trainer and engine. Build it once, at the edge, and pass it down."""

    model_config = SettingsConfigDict(env_prefix="SYNCSTACK_", frozen=True, extra="ignore")

    socket_dir: Path = Path("/run/syncstack")
    """Folder shared by trainer and engine; each engine has a sub-folder of mode 0700 in it."""
    engine_name: str = Field(default="engine-0", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of this engine: its folder below ``socket_dir``, and its name in every report."""
    listen: str = "unix"
    """Where an engine listens: ``unix`` (its folder), ``tcp://ADDRESS:PORT``, or both with a comma between. PORT is the
    control endpoint's, PORT + 1 + n that of worker n's data link; 0 takes free ones, ``auto`` the next of the bands
    ``control`` and ``data``. TCP needs a token."""
    port_bands: str = ""
    """Other ports than the default for some purposes: ``NAME=LOW-HIGH``, separated by commas (``syncstack ports``)."""
    token_file: Path | None = None
    """File with the token that trainer and engine prove to each other over TCP; see ``wire/auth.py`` for its mode."""
    token: SecretStr | None = None
    """The token itself, where there is no file. Every process of this user can read another's environment."""
    listen_fd: int | None = Field(default=None, ge=0)
    """Not for users: the socket of ``listen`` that ``syncstack engine`` opened before it became the engine's server."""
    engine_url: str = ""
    """An engine's side of a fleet: where its own server is reached by the trainer, ``http://HOST:PORT``."""
    node_pid: int | None = Field(default=None, ge=1)
    """Not for users: the process that ``syncstack node`` became."""
    fleet: str = ""
    """Not for users: the engines that ``syncstack launch`` has placed for ``syncstack run``."""
    profile: str = "unknown"
    """Name of the seccomp profile the container was started with. Only reported; the facts are probed."""
    transport: str = "auto"
    """``auto``, or transport names in order of preference, separated by commas."""
    strict: bool = False
    """Refuse a refit rather than fall back from the best transport that the hardware of both sides admits, or than move
    at less than half of the rate that a trial measured."""
    distinct_gpus: bool = True
    """Refuse a refit into workers that hold the same GPU, or of which only some hold one."""
    wire_dtype: Literal["checkpoint", "engine"] = "engine"
    """Dtype of floating-point weights on the way, chosen by the engine's side: the one it computes in, or that of its
    model folder (half the bytes for a float32 engine, but a trainer's small steps are rounded away)."""
    min_engines: int = Field(default=0, ge=0)
    """Engines that must be left for a refit to go on without one that fails; 0: all are needed. One that was left
    behind is taken in again by the first refit after it answers."""
    keep_version: bool = False
    """A trainer's side: keep a copy of the last version in host memory, and bring an engine that comes back to it at
    once instead of in the next refit. Costs the memory of one version, and copying it each time."""
    wait_for_refit: bool = False
    """An engine's side: refuse requests until the first refit. A restarted engine has the weights of its model folder,
    which are older than what the others serve."""
    probe_first_s: float = Field(default=300.0, gt=0)
    """A fleet's: how long an engine that was started may take to answer for the first time."""
    probe_interval_s: float = Field(default=5.0, gt=0)
    """Between two probes of one engine."""
    probe_timeout_s: float = Field(default=20.0, gt=0)
    """How long a probe, one generated token, may take."""
    probe_misses: int = Field(default=3, ge=1)
    """Probes in a row that may fail before the engine is dead."""
    restarts: int = Field(default=5, ge=0)
    """How often one engine is started again within ``restart_window_s``; after that it stays dead."""
    start_tries: int = Field(default=2, ge=1)
    """How often an engine that has never answered is started before it stays dead."""
    restart_window_s: float = Field(default=3600.0, gt=0)
    restart_backoff_s: float = Field(default=1.0, ge=0)
    """Wait before the first restart; twice as long before each one after it, up to ``restart_backoff_max_s``."""
    restart_backoff_max_s: float = Field(default=60.0, ge=0)
    engine_ready_s: float = Field(default=300.0, gt=0)
    """How long to wait for an engine to answer its control endpoint."""
    control_s: float = Field(default=30.0, gt=0)
    """Deadline of each control call that does not move or load weights."""
    link_s: float = Field(default=30.0, gt=0)
    """Deadline of each wait on a data link: for one message to be taken or to come, not for a whole version."""
    load_s: float = Field(default=300.0, gt=0)
    """Deadline of the engine's own loader."""
    pause_mode: PauseMode = "wait"
    """What happens to running requests: finish them, abort them, or freeze them over the update."""
    pause_s: float = Field(default=120.0, gt=0)
    """Deadline for running requests to end when ``pause_mode`` is ``wait``."""
    heartbeat_s: float = Field(default=0.5, gt=0)
    """Interval of the lease's heartbeat, set by the engine's side. A trainer waits for four and a second."""
    stall_s: float = Field(default=60.0, gt=0)
    """An engine's side: how long it stands between two steps for a trainer that lives but does nothing."""
    bucket_bytes: int = Field(default=8 << 20, ge=4096)
    """Bytes after which the receiver is told what it may read already."""

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Settings from the environment and ``overrides`` (None means: not given); SettingsError on bad values."""
        try:
            return cls(**{name: value for name, value in overrides.items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            hidden = name == "token"
            raise SettingsError(
                f"setting {name} cannot be used: {first['msg']}",
                observed="(not shown)" if hidden else repr(first.get("input")),
                next_step=f"set SYNCSTACK_{name.upper()} or the option of that name to a valid value",
            ) from None

    def shared_token(self) -> Token | None:
        """The token of ``token_file``, else of ``token``, else None; read anew each time. Raises SettingsError."""
        if self.token_file is not None:
            return read_token(self.token_file)
        if self.token is not None:
            return Token(self.token.get_secret_value().encode(errors="surrogateescape").strip())
        return None

    def required_token(self, why: str) -> Token:
        """The token, or a SettingsError that begins with ``why``."""
        token = self.shared_token()
        if token is None:
            raise SettingsError(
                f"{why} needs a token, and none is set",
                consequence="Anybody who reaches the port could replace the weights",
                next_step="make one with `openssl rand -hex 32` and set SYNCSTACK_TOKEN_FILE on both sides",
            )
        return token
