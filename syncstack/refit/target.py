"""One engine during a coordinator's life: its client, its links, the plan for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from syncstack.errors import DeadlineExceeded, EngineUnreachable, SyncstackError
from syncstack.plan import Choice
from syncstack.refit.client import EngineClient, Lease
from syncstack.refit.messages import StepRequest
from syncstack.wire.link import Link

ABORT_S = 5.0
"""How long a failed refit waits for the engine to say in which state it ended."""


class Target:
    """Used from the coordinator's thread only."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.links: list[Link] = []
        """One for each worker, in rank order; empty while there is no plan."""
        self.choices: list[Choice] = []
        """The plan of each link, in the same order."""
        self.lease: Lease | None = None
        self.manifest = ""
        """Digest of what its workers verified last."""
        self.gone = False
        """Whether a call that waited for it was cut off, because its process had gone."""
        self.away_since: float | None = None
        """On the monotonic clock: when it was left behind, if it has not served a version since."""
        self.synced: int | None = None
        """The version that it was brought to between two refits, since it was left behind."""
        self.knock: Future[None] | None = None
        """The last look whether it answers again."""

    @property
    def choice(self) -> Choice:
        """The plan of the first link. All links of a refit have one transport."""
        return self.choices[0]

    def lost(self) -> bool:
        """Whether the engine has gone, as far as its links and its lease tell."""
        return any(link.lost() for link in self.links) or (self.lease is not None and self.lease.over())

    def connect(self, choices: Sequence[Choice], rank: int) -> None:
        """Take ``choices`` and have links that suit them. Raises LinkRefused, LinkLost or DeadlineExceeded."""
        if [choice.fd for choice in choices] != [choice.fd for choice in self.choices]:
            self.drop_links()  # a descriptor that travels by message needs another socket than one that is fetched
        self.choices = list(choices)
        if not self.links:
            self.links = self.client.open_links(rank, self.choices)

    def abort(self, session: str, reason: str) -> str:
        """End a session that failed; returns the engine's state after it, or "unreachable". Blocks for ABORT_S."""
        request = StepRequest(session=session, reason=reason[:2000])
        try:
            self.client.reset()
            state = self.client.step("abort", request, deadline_s=ABORT_S).state
        except (EngineUnreachable, DeadlineExceeded):
            return "unreachable"
        except SyncstackError:
            # The session had ended already; the engine knows how.
            try:
                state = self.client.state()
            except SyncstackError:
                return "unreachable"
        return f"{state.step} (version {state.version})"

    def end_lease(self) -> None:
        """Hang up on the session's lease, if there is one."""
        if self.lease is not None:
            self.lease.close()
            self.lease = None

    def drop_links(self) -> None:
        """Close every link; the next plan opens them anew."""
        for link in self.links:
            link.close()
        self.links = []
