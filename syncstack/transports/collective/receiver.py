"""The worker's half of ``collective``: as ``stream`` receives, but the bytes come from the member before this one in
the group, and go on to the one behind it while more are coming."""

from __future__ import annotations

import time

from syncstack.errors import ProtocolError
from syncstack.transports.collective.group import Exchange, Group
from syncstack.transports.stream.memory import OwnMemory
from syncstack.transports.stream.receiver import StreamedVersion, StreamReceiver
from syncstack.wire.messages import BucketReady, Join, Offer, Staged

KIND = "group"
"""The handle of an offer whose bytes come in the sender's group."""

JOIN_S = 10.0
"""How long the members of a group may take to reach each other. It is a matter of milliseconds."""


class CastVersion(StreamedVersion):
    """A version whose bytes come in a group, from the first of the data area to the last."""

    def __init__(self, offer: Offer, memory: OwnMemory, map_s: float, receiver: CollectiveReceiver) -> None:
        super().__init__(offer, memory, map_s)
        self._receiver = receiver

    def join(self, join: Join, exchange: Exchange) -> None:
        """See StagedVersion."""
        begin = time.perf_counter()
        self._receiver.join(join, exchange)
        self._map_s += time.perf_counter() - begin

    def take_cast(self, nbytes: int) -> None:
        """See StagedVersion. Complete when its tensors are announced."""
        self._receiver.group.receive(super().place(nbytes))

    def place(self, nbytes: int) -> memoryview:
        """See StagedVersion."""
        raise ProtocolError("bytes on the link for a version that comes in a group", observed=f"{nbytes} bytes")

    def read_bucket(self, bucket: BucketReady) -> None:
        """See StagedVersion."""
        self._receiver.group.settle()
        super().read_bucket(bucket)

    def finish_staging(self) -> Staged:
        """See StagedVersion. What this worker passed on has left it: its memory may be used for another version."""
        self._receiver.group.settle(passed_on=True)
        return super().finish_staging()


class CollectiveReceiver(StreamReceiver):
    """The group and the memory of one link. Called from that link's thread only."""

    def __init__(self, host: str, link_s: float) -> None:
        """``host`` is this side's address of the link, "" where it is a unix socket."""
        super().__init__()
        self._host = host
        self._link_s = link_s
        self._group: Group | None = None

    @property
    def group(self) -> Group:
        """The sender's group. Raises ProtocolError where it has made none."""
        if self._group is None:
            raise ProtocolError("a version was cast to a worker that is in no group", expected="Join")
        return self._group

    def join(self, join: Join, exchange: Exchange) -> None:
        """Become a member of a new group, and of no other. Blocks; raises GroupLost, ProtocolError or what ``exchange``
        does."""
        self.leave()
        if join.place >= join.size or not self._host:
            raise ProtocolError(
                "no place in a group",
                observed=f"member {join.place} of {join.size}, by {self._host or 'a unix socket'}",
                expected="a place below the group's size, by TCP",
            )
        join_s = min(JOIN_S, self._link_s)
        self._group = Group(
            join.place, join.size, host=self._host, exchange=exchange, join_s=join_s, wait_s=self._link_s
        )

    def leave(self) -> None:
        """End the group, for all its members: nobody knows how far each has come."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _version(self, offer: Offer, memory: OwnMemory, map_s: float) -> StreamedVersion:
        return CastVersion(offer, memory, map_s, self)

    def close(self) -> None:
        """See StreamReceiver; and leave the group."""
        self.leave()
        super().close()
