"""A rank's snapshots by themselves: its publisher, and what a shard server does with the slots."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks import common
from torchtitan.weight_sync.memory.slots import LiveSlots
from torchtitan.weight_sync.trainer.publisher import Publisher

WAIT_SECONDS = 60.0


class Snapshots:
    """Every snapshot that is whole is published at once, and no actor reads it: with one slot it is given up, with more
    of them the one before it is. options: the publisher's."""

    def __init__(self, parameters: dict[str, torch.Tensor], num_slots: int, bucket_bytes: int, **options: Any):
        self.publisher = Publisher(
            parameters, rank=0, dtype="bfloat16", num_slots=num_slots, bucket_bytes=bucket_bytes, **options
        )
        self.live = LiveSlots(self.publisher.slots.state_words)
        self.serial = 0

    @property
    def version_bytes(self) -> int:
        return self.publisher.layout.total_bytes

    def start(self) -> None:
        """Begin the next one."""
        # Slower than the publisher would be a shard server that never frees a slot.
        common.wait_for(self._reserved, WAIT_SECONDS, "no slot becomes free")
        self.serial += 1
        self.publisher.snapshot(self.serial, self.serial)

    def finish(self) -> None:
        """Wait until the last one is whole."""
        common.wait_for(lambda: self.serial in self.live.filled(), WAIT_SECONDS, "a snapshot does not end")

    def seconds(self) -> float:
        """Take one; returns what the caller spends on it, with the wait for its fence."""
        self._publish()
        taken = common.timed(lambda: (self.start(), self.publisher.fence()))
        self.finish()
        return taken

    def close(self) -> None:
        self.publisher.close()

    def _reserved(self) -> bool:
        if self.publisher.reserve():
            return True
        self._publish()
        return self.publisher.reserve()

    def _publish(self) -> None:
        filled = self.live.filled()
        if not filled:
            return
        newest, now = max(filled), time.monotonic()
        if self.publisher.slots.count == 1:
            self.live.live(-1, (), (newest,), now)
        else:
            self.live.live(newest, (), (), now)
