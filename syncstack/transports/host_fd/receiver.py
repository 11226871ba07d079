"""The worker's half of ``host_fd``: map the sender's segment read-only, digest what comes, hand out views.

Nothing is copied: the engine's loader reads the sender's memory. The rule of ownership: from Staged until the session
is finished the segment belongs to the receiver, and the sender does not write it. The generation in its header makes a
breach visible: it is compared before every tensor that is handed out, and after the load all is digested once more.
"""

from __future__ import annotations

import time

from syncstack.errors import ProtocolError
from syncstack.transports.host_fd.handover import taken
from syncstack.transports.host_fd.segment import ReceiverSegment
from syncstack.transports.staged import StagedVersion, check_offer
from syncstack.wire.messages import Offer


class HostFdReceiver:
    """The segments of one link. Called from that link's thread only."""

    def __init__(self) -> None:
        self._segment: ReceiverSegment | None = None

    def open(self, offer: Offer, fds: list[int]) -> StagedVersion:
        """Accept an offer. The caller closes ``fds``. Raises TransportError or ProtocolError; maps nothing then.

        A segment is known by its nonce alone: not by a process number, which two containers may share, nor by a handle,
        which may differ each time it is made.
        """
        check_offer(offer)
        begin = time.perf_counter()
        if self._segment is None or self._segment.nonce != offer.segment:
            with taken(offer.handle, fds) as fd:
                fresh = ReceiverSegment(fd, nonce=offer.segment, data_bytes=offer.segment_bytes)
            self.close()
            self._segment = fresh
        elif self._segment.data_bytes != offer.segment_bytes:
            raise ProtocolError("a segment changed its size", observed=str(offer.segment_bytes))
        return StagedVersion(offer, self._segment, time.perf_counter() - begin)

    def close(self) -> None:
        """Unmap; views that a loader still holds keep the pages alive until they are dropped."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
