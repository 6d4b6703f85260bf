"""The synchronisation is broken on purpose, in ways that were once overlooked; the runs have to notice each of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.unit_tests.weight_sync import runs
from tests.unit_tests.weight_sync.job import Job, Parts
from torchtitan.weight_sync import clients
from torchtitan.weight_sync.handshake import Identity
from torchtitan.weight_sync.puller import Puller
from torchtitan.weight_sync.shard_server import ShardServer
from torchtitan.weight_sync.slots import LiveSlots

MOST_RUNS = 400


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is broken on purpose is not worth a line each time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class LeasesOutliveTheRegistry(ShardServer):
    def look_after(self) -> None:
        if not self.registry.connected:
            self._lease_s = math.inf
        super().look_after()


class DoesNotWaitForWriters(Puller):
    def _is_quiet(self) -> bool:
        return True


class ReadsWhatIsGone(ShardServer):
    def end_what_is_gone(self) -> None:
        pass


class OldestFirst(ShardServer):
    def _next_to_hash(self, serials: list[int]) -> int:
        return min(serials)


class AnyEpoch(ShardServer):
    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.gate._admit = lambda _identity, _fields: {"rank": self.rank}


class HangsInPeace(ShardServer):
    def _works(self) -> bool:
        return True


@dataclass(frozen=True)
class Mutation:
    """What is broken, and the runs that find it."""

    run: Callable[[int, Parts], Job]
    parts: Parts


MUTATIONS = {
    "leases not ended when the registry is lost": Mutation(
        runs.run_without_registry, Parts(server=LeasesOutliveTheRegistry)
    ),
    "a new pull that does not wait for old writers": Mutation(runs.run_references, Parts(puller=DoesNotWaitForWriters)),
    "a transport that does not hold its slot": Mutation(runs.run_slow_fleet, Parts(server=ReadsWhatIsGone)),
    "restart reporting oldest first": Mutation(runs.run_faults, Parts(server=OldestFirst)),
    "a data port that ignores the epoch": Mutation(runs.run_relaunch, Parts(server=AnyEpoch)),
    "a hung checksum thread": Mutation(runs.run_faults, Parts(server=HangsInPeace)),
}


def runs_until_found(run: Callable[[int, Parts], Job], parts: Parts) -> int:
    """How many runs it takes. Whatever is raised counts: in production it ends a connection or a process."""
    for seed in range(MOST_RUNS):
        try:
            run(seed, parts)
        except Exception:
            return seed + 1
    raise AssertionError(f"{MOST_RUNS} runs have noticed nothing")


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name: str) -> None:
    mutation = MUTATIONS[name]
    runs_until_found(mutation.run, mutation.parts)


def test_client_that_does_not_check_the_servers_proof_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Identity.is_proof

    def believe(self: Identity, given: str, side: str, *nonces: str) -> bool:
        return side == "server" or genuine(self, given, side, *nonces)

    monkeypatch.setattr(Identity, "is_proof", believe)
    runs_until_found(runs.run_faults, Parts())


def test_actor_that_stays_with_a_silent_registry_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "SILENCE_SECONDS", math.inf)
    runs_until_found(runs.run_faults, Parts())


def test_stale_carrier_that_is_heard_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Puller, "is_current", lambda self, _message: self.transfer is not None)
    runs_until_found(runs.run_references, Parts())


def test_checksum_thread_that_does_not_hold_its_slot_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveSlots, "hold", lambda *_: None)
    monkeypatch.setattr(LiveSlots, "let_go", lambda *_: None)
    runs_until_found(runs.run_faults, Parts())
