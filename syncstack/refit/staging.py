"""The first half of a refit, while the engines still serve: who they are, by which transport, and the bytes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence

from syncstack.errors import PathTooSlow, RankLost, UsageError
from syncstack.facts import Hello
from syncstack.facts.cgroup import throttled_s
from syncstack.refit.agreement import Agreement
from syncstack.refit.kept import KeptVersion
from syncstack.refit.members import Members
from syncstack.refit.pace import ClockedSource, Stage, why_slow
from syncstack.refit.progress import Progress
from syncstack.refit.ranks import Alone, Retire, Send
from syncstack.refit.target import Target
from syncstack.refit.trial import Rate
from syncstack.settings import Settings
from syncstack.transports.senders import Sender, make_sender
from syncstack.weights.manifest import Manifest, Wanted, divide, part_of, resolve
from syncstack.weights.source import WeightSource, example_of
from syncstack.wire.messages import Staged

log = logging.getLogger(__name__)


def stage_share(
    sender: Sender, source: WeightSource, order: Send, targets: Sequence[Target], ranks: Alone, *, wait_s: float
) -> tuple[Manifest, list[Staged]]:
    """Move this rank's share of a version over its links to ``targets``. Blocks; raises as ``Sender.stage``."""
    share = divide(order.wanted, ranks.size)[ranks.rank]
    ways = {link: choice.fd for target in targets for link, choice in zip(target.links, target.choices, strict=True)}
    return sender.stage(
        source,
        part_of(order.wanted, share),
        list(ways),
        session=order.session,
        version=order.version,
        wait_s=wait_s,
        fd_ways={link: way for link, way in ways.items() if way},
        share=share,
    )


class Staging:
    """One coordinator's agreement with its engines, and its sender. Used from the coordinator's thread."""

    def __init__(self, source: WeightSource, members: Members, settings: Settings, ranks: Alone) -> None:
        self._source = source
        self._members = members
        self._settings = settings
        self._ranks = ranks
        self._agreement = Agreement(settings, ranks)
        self._planned: list[Target] = []
        """Whose links the transport was agreed on for."""
        self._transport = ""
        self._sender: Sender | None = None
        self._warm = False  # whether sender and workers have the segment of the last version
        self._told_slow = False

    @property
    def hello(self) -> Hello:
        """What this process says of itself, with its facts."""
        return self._agreement.hello

    @property
    def rate(self) -> Rate:
        """What the transport did in its trial on the links of the last version."""
        assert self._agreement.rate is not None
        return self._agreement.rate

    @contextlib.contextmanager
    def keeping(self, kept: KeptVersion | None, version: int) -> Iterator[None]:
        """What is staged in the block is kept as ``version``, where somebody keeps versions."""
        if kept is None:
            yield
            return
        with kept.keeping(self._source, version) as source:
            before, self._source = self._source, source
            try:
                yield
            finally:
                self._source = before

    def agree(self) -> tuple[Wanted, ...]:
        """Make sure that every engine is the one we know, and all links have a transport; plan anew if one is not."""
        self._members.renew_lost()
        targets = self._members.live
        wanted = self._resolve(targets)
        if targets != self._planned or not all(target.links for target in targets):
            self._planned = []
            self.retire()
            transport = self._agreement.reach(targets, wanted, example_of(self._source))
            self._take(transport)
            self._planned = targets
        return wanted

    def _take(self, transport: str) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = make_sender(
            transport, bucket_bytes=self._settings.bucket_bytes, device=self._agreement.hello.device
        )
        self._transport = transport
        self._told_slow = False

    def _resolve(self, targets: Sequence[Target]) -> tuple[Wanted, ...]:
        metadata, aliases = self._source.metadata(), self._source.aliases()
        wanted = resolve(metadata, targets[0].client.info.tensors, aliases)
        for target in targets[1:]:
            if resolve(metadata, target.client.info.tensors, aliases) != wanted:
                raise UsageError(
                    "the engines of one refit expect different tensors",
                    observed=target.client.name,
                    expected=f"those of {targets[0].client.name}",
                    next_step="start them from one model folder with one dtype, or refit them apart",
                )
        return wanted

    def stage(self, refit: Progress, wanted: Sequence[Wanted]) -> None:
        """Move the bytes to all workers and have them verified; fills ``refit``. Blocks."""
        assert self._sender is not None
        source = ClockedSource(self._source, whole=self._ranks.size > 1)
        order = Send(session=refit.session, version=refit.version, wanted=tuple(wanted))
        waited, begin = throttled_s(), time.perf_counter()
        with self._ranks.together(order, wait_s=3 * self._settings.link_s) as others, source:
            manifest, staged = stage_share(
                self._sender, source, order, self._members.live, self._ranks, wait_s=self._settings.link_s
            )
        everybody = [staged, *(other.staged for other in others)]
        refit.tensors = len(wanted)
        refit.digests_equal = sum(min(each.digests_equal for each in of_rank) for of_rank in everybody)
        refit.stage = Stage(
            bytes=manifest.payload_bytes + sum(other.bytes for other in others),
            seconds=time.perf_counter() - begin,
            first=not self._warm,
            source_s=source.seconds,
            worker_s=max(each.digest_s for of_rank in everybody for each in of_rank),
            cast_bytes=self._sender.cast_bytes + sum(other.cast_bytes for other in others),
            throttled_s=throttled_s() - waited,
            unpinned=self._sender.unpinned,
        )
        self._warm = True

    def look_at_pace(self, refit: Progress) -> None:
        """Say once for each plan that its path is slow; strict: end the refit while the engines still serve."""
        assert refit.stage is not None
        refit.slow = why_slow(self.rate, refit.stage)
        if not refit.slow:
            return
        if self._settings.strict:
            raise PathTooSlow(
                f"{self._transport} is slow: {refit.slow}",
                consequence="Strict mode forbids that, and the engines keep their old weights",
                next_step="remove the cause, or set SYNCSTACK_STRICT=false",
            )
        if not self._told_slow:
            self._told_slow = True
            log.warning("%s is slow: %s", self._transport, refit.slow)

    def retire(self, *, links: bool = False) -> None:
        """A worker may still read what was staged last: never write that memory again. With ``links`` the other ranks
        end theirs; this one's are the members'."""
        self._warm = False
        if self._sender is not None:
            self._sender.retire()
        with contextlib.suppress(RankLost):  # which the next order says again, where somebody hears it
            self._ranks.tell(Retire(links=links))

    def close(self) -> None:
        """Free what the sender holds. Links are the members'."""
        if self._sender is not None:
            self._sender.close()
