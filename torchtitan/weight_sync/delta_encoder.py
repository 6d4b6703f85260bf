"""Deltas of a courier: each bucket of a version is encoded once against a base, for all actors that hold the base.

Encoding takes longer than the event loop may be kept, so a thread does it. What it has made is kept as long as somebody
sends it or may come to, at most the bytes of one slot per pair of versions.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial

from torchtitan.weight_sync.delta import encode
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.progress import Progress
from torchtitan.weight_sync.states.slot import SlotKeeper
from torchtitan.weight_sync.transports.base import BucketKey, Payload

# One bucket takes a fraction of a second.
LONGEST_BUCKET_SECONDS = 60.0
Wake = Callable[[], None]
Pair = tuple[int, int]
"""(serial, serial of the base)"""


class EncodedVersion:
    """One rank's snapshot, bucket by bucket, as what differs from another. `new` and `base` are equally long."""

    def __init__(self, pair: Pair, new: memoryview, base: memoryview, bucket_bytes: int, element_bytes: int):
        self.pair = pair
        self._new, self._base, self._bucket_bytes, self._element_bytes = new, base, bucket_bytes, element_bytes
        self._payloads: list[Payload | None] = [None] * -(-len(new) // bucket_bytes)
        self._waiting: dict[int, set[Wake]] = {}
        self.users = 0
        """Deliveries that send it"""
        self.cancelled = False

    def payload(self, key: BucketKey, wake: Wake) -> Payload | None:
        """What is sent for this bucket; None while it is being made: wake() follows. On the loop's thread."""
        bucket = key[1]
        made = self._payloads[bucket]
        if made is None:
            self._waiting.setdefault(bucket, set()).add(wake)
        return made

    def make(self, made: Callable[[Callable[[], None]], None], progress: Progress) -> None:
        """Encode all buckets in order, until cancelled. On the encoder's thread; made(call) runs call on the loop's."""
        for bucket in range(len(self._payloads)):
            if self.cancelled:
                return
            progress.begin()
            start = bucket * self._bucket_bytes
            end = start + self._bucket_bytes
            self._payloads[bucket] = Payload(*encode(self._new[start:end], self._base[start:end], self._element_bytes))
            made(partial(self._made, bucket))

    def _made(self, bucket: int) -> None:
        for wake in self._waiting.pop(bucket, ()):
            wake()


class DeltaEncoder:
    """Who needs which delta, and the thread that makes them. All methods are for the loop's thread."""

    def __init__(self, loop: EventLoop, keeper: SlotKeeper, bucket_bytes: int, element_bytes: int):
        self._loop, self._keeper = loop, keeper
        self._bucket_bytes, self._element_bytes = bucket_bytes, element_bytes
        self._versions: dict[Pair, EncodedVersion] = {}
        self._jobs: queue.SimpleQueue[EncodedVersion] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.progress = Progress(LONGEST_BUCKET_SECONDS)

    def version(self, pair: Pair, new: memoryview, base: memoryview) -> EncodedVersion:
        """The version's deltas, being made if they are not there yet. The slots are held while they are read."""
        version = self._versions.get(pair)
        if version is None:
            version = EncodedVersion(pair, new, base, self._bucket_bytes, self._element_bytes)
            self._versions[pair] = version
            for serial in pair:
                self._keeper.hold(serial, _reason(pair))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="deltas", daemon=True)
                self._thread.start()
            self._jobs.put(version)
        return version

    def use(self, pair: Pair) -> None:
        """One more delivery sends it."""
        self._versions[pair].users += 1

    def end_use(self, pair: Pair) -> None:
        """A delivery does not send it any more."""
        self._versions[pair].users -= 1
        self.trim()

    def trim(self) -> None:
        """Drop what nobody sends, unless it is the newest version against the base that is kept."""
        for pair, version in list(self._versions.items()):
            if not version.users and pair != (self._keeper.pinned, self._keeper.retained):
                version.cancelled = True
                del self._versions[pair]

    def _run(self) -> None:
        try:
            while True:
                version = self._jobs.get()
                version.make(self._loop.call_from_thread, self.progress)
                self.progress.end()
                self._loop.call_from_thread(partial(self._finished, version))
        except Exception as error:
            self._loop.call_from_thread(partial(self._failed, error))

    def _finished(self, version: EncodedVersion) -> None:
        if self._versions.get(version.pair) in (version, None):
            for serial in version.pair:
                self._keeper.let_go(serial, _reason(version.pair))

    def _failed(self, error: Exception) -> None:
        # Ends the process: a new one starts with empty hands, this one would leave actors waiting.
        raise RuntimeError("the thread that encodes deltas has failed") from error


def _reason(pair: Pair) -> str:
    return f"delta {pair[0]} - {pair[1]}"
