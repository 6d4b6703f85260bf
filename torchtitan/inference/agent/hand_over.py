"""How a staged, verified version gets from the agent into the engine."""

from __future__ import annotations

from typing import Protocol

from torchtitan.weight_sync.staging import StagedVersion


class HandOver(Protocol):
    """One way into one engine. All methods are called from the agent's threads and have deadlines of their own."""

    workers: int
    """0: the agent stages whole versions. n: so many workers inside the engine stage their parts (weight_sync.worker)
    and the agent leads them; `staged.tensors` is then empty and `staged.apply_on_workers()` has them apply."""

    def connected(self, leader: str, actor: str, epoch: str, token: str) -> None:
        """The agent has begun to receive for `actor`; with workers, have them connect to `leader` (host:port).

        Called after every connection; replaces earlier ones. Raises EngineError.
        """

    def prepare(self, staged: StagedVersion, label: str) -> None:
        """What can be done while the engine still generates, such as writing files. Whatever it raises leaves the
        engine as it is."""

    def load(self, staged: StagedVersion, label: str) -> None:
        """Called while the engine stands still. When it returns the engine holds the version, and says `label` of
        every token that it samples from here on.

        Raises WeightsRefused only where the engine is certainly as it was; anything else means that it may hold half
        a version.
        """

    def close(self) -> None:
        """Give up groups, files and threads. The engine may be gone already."""
