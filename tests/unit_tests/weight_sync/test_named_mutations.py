"""The synchronisation is broken on purpose, in ways that were once overlooked; the runs have to notice each of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit_tests.weight_sync import runs
from tests.unit_tests.weight_sync.job import Job, Parts
from torchtitan.weight_sync.actor.puller import Puller
from torchtitan.weight_sync.memory.slots import LiveSlots
from torchtitan.weight_sync.registry.registry import Registry
from torchtitan.weight_sync.trainer.shard_server import ShardServer
from torchtitan.weight_sync.wire import clients
from torchtitan.weight_sync.wire.handshake import Identity
from torchtitan.weight_sync.wire.runtime import Channel, Message

MOST_RUNS = 400


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is broken on purpose is not worth a line each time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class LeasesOutliveTheRegistry(ShardServer):
    def tick(self) -> None:
        if not self.registry.connected:
            self._lease_s = math.inf
        super().tick()


class DoesNotWaitForWriters(Puller):
    def _is_quiet(self) -> bool:
        return True


class ReadsWhatIsGone(ShardServer):
    def close_stale_readers(self) -> None:
        pass


class OldestFirst(ShardServer):
    def _next_to_hash(self, serials: list[int]) -> int:
        return min(serials)


class AnyEpoch(ShardServer):
    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.acceptor._admit = lambda _identity, _fields: {"rank": self.rank}


class HangsInPeace(ShardServer):
    def _works(self) -> bool:
        return True


def believe_servers(patch: pytest.MonkeyPatch) -> None:
    genuine = Identity.is_proof
    patch.setattr(
        Identity, "is_proof", lambda self, given, side, *ns: side == "server" or genuine(self, given, side, *ns)
    )


def hold_nothing(patch: pytest.MonkeyPatch) -> None:
    for name in ("retain", "release"):
        patch.setattr(LiveSlots, name, lambda *_: None)


class ForgivesAtEveryAttempt(Registry):
    def _actor_entered(self, channel: Channel, name: str, fields: Message) -> None:
        super()._actor_entered(channel, name, fields)
        self.actors[name].late = ""

    def _on_actor_message(self, name: str, channel: Channel, message: Message) -> None:
        super()._on_actor_message(name, channel, message)
        self.actors[name].offered_since = None


# What is broken -> the runs that find it, and how it is broken: by other parts, or by patches of what there is.
MUTATIONS: dict[str, tuple[Callable[[int, Parts], Job], Parts | Callable[[pytest.MonkeyPatch], None]]] = {
    "leases not ended when the registry is lost": (runs.run_without_registry, Parts(server=LeasesOutliveTheRegistry)),
    "a new pull that does not wait for old writers": (runs.run_references, Parts(puller=DoesNotWaitForWriters)),
    "a transport that does not hold its slot": (runs.run_slow_fleet, Parts(server=ReadsWhatIsGone)),
    "restart reporting oldest first": (runs.run_faults, Parts(server=OldestFirst)),
    "a deadline for each attempt alone": (runs.run_hung, Parts(registry=ForgivesAtEveryAttempt)),
    "a data port that ignores the epoch": (runs.run_relaunch, Parts(server=AnyEpoch)),
    "a hung checksum thread": (runs.run_faults, Parts(server=HangsInPeace)),
    "a client that does not check the server's proof": (runs.run_faults, believe_servers),
    "an actor that stays with a silent registry": (
        runs.run_faults, lambda patch: patch.setattr(clients, "SILENCE_SECONDS", math.inf),
    ),
    "a stale carrier that is heard": (
        runs.run_references, lambda patch: patch.setattr(Puller, "is_current", lambda obj, _: obj.transfer is not None),
    ),
    "a checksum thread that does not hold its slot": (runs.run_faults, hold_nothing),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is raised counts: in production it ends a connection or a process."""
    run, broken = MUTATIONS[name]
    if not isinstance(broken, Parts):
        broken(monkeypatch)
    for seed in range(MOST_RUNS):
        try:
            run(seed, broken if isinstance(broken, Parts) else Parts())
        except Exception:
            return
    raise AssertionError(f"{MOST_RUNS} runs have noticed nothing")
