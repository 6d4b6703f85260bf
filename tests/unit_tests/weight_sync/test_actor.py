"""An actor's outer side: what it says of itself, and of an engine whose workers apply."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tests.deterministic.machine import Machine, Process
from tests.deterministic.parts import BUCKET_BYTES, TOKEN, whole_layout
from tests.patience import PATIENCE_S, until
from tests.unit_tests.weight_sync.clients import Client
from torchtitan.utils.addresses import reachable_host
from torchtitan.weight_sync.actor import group
from torchtitan.weight_sync.actor.actor import StagingEngine, SyncActor
from torchtitan.weight_sync.actor.group import LeadingEngine, as_figures
from torchtitan.weight_sync.actor.puller import Served
from torchtitan.weight_sync.memory.manifest import Manifest, WeightsRefused
from torchtitan.weight_sync.memory.slots import SharedSlots, file_reference
from torchtitan.weight_sync.memory.staging import ExpectedChecksums, StagedVersion
from torchtitan.weight_sync.memory.transfer import Transfer
from torchtitan.weight_sync.transports.bucket_server import Relay
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.handshake import PEER

MANIFEST = Manifest("e", 3, "layout", (), "digest")
DONE, REFUSED, TORN = {"bytes_full": 7}, WeightsRefused("not now"), RuntimeError("half")
Outcome = dict[str, int] | Exception


@pytest.mark.parametrize(
    ("host", "peer", "told"),
    [
        ("10.1.2.3", "127.0.0.1", "10.1.2.3"), ("node-3", "127.0.0.1", "node-3"),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"), ("::", "::1", "::1"),
    ],
)  # fmt: skip
def test_others_are_told_an_address_that_they_reach(host: str, peer: str, told: str) -> None:
    assert reachable_host(host, peer) == told
    address = wire.format_address(told, 7)
    assert wire.parse_address(address) == (told, 7) and address.startswith("[") == (":" in told)


def test_status_says_what_is_served_and_why_a_thread_has_failed() -> None:
    actor = SyncActor("127.0.0.1:9", "a", "e", "k", lambda _staged: None, relay_host="127.0.0.1")
    assert (
        actor.status()["failure"] is None and actor.status()["state"] == "joining" and not actor.status()["connected"]
    )
    actor.puller.serving = Served("e", 3, "digest")
    served = {name: actor.status()[name] for name in Served._fields}
    assert served == {"epoch": "e", "version": 3, "digest": "digest"}
    actor.puller.start = lambda _listener: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    actor.start()
    until(lambda: actor.status()["failure"])
    assert "ZeroDivisionError" in str(actor.status()["failure"])
    actor.close()


def test_actor_that_is_closed_while_its_thread_is_busy_begins_nothing_afterwards() -> None:
    actor, busy = SyncActor("127.0.0.1:9", "a", "e", "k", lambda _staged: None), threading.Event()
    actor.start()
    actor._runtime.post(lambda: busy.wait(PATIENCE_S) and None)
    assert actor.puller._may_begin(MANIFEST)
    actor.close(timeout=0.0)
    assert not actor.puller._may_begin(MANIFEST), "another connection has its memory now"
    busy.set()
    actor.close()


@pytest.mark.parametrize(
    ("cost", "found"), [(0.5, {"pause_s": 0.5}), ({"drain_s": 2, "pause_s": 1}, {"drain_s": 2.0, "pause_s": 1.0})]
)
def test_engines_may_say_what_an_apply_has_cost(cost: Any, found: dict[str, float]) -> None:
    assert as_figures(cost, time.monotonic()) == found
    assert 5 <= as_figures(None, time.monotonic() - 5)["pause_s"] < 5 + PATIENCE_S


def engine(apply: Callable[[StagedVersion], Any], outcome: Outcome | None, lives: bool = True) -> LeadingEngine:
    """Of workers whose leader answers so, or never."""
    runtime: Any = SimpleNamespace(post=lambda function: function(), runs=lives)
    made = LeadingEngine(apply, runtime)

    def settle(_manifest: Manifest, order: Future[Any]) -> None:
        if isinstance(outcome, Exception):
            order.set_exception(outcome)
        elif outcome is not None:
            order.set_result(outcome)

    leader: Any = SimpleNamespace(order=settle)
    made.leader = leader
    return made


def on_workers(staged: StagedVersion) -> None:
    assert (staged.epoch, staged.version, staged.digest) == ("e", 3, "digest") and not staged.tensors
    assert staged.apply_on_workers is not None
    staged.apply_on_workers()


def on_workers_and_then(raised: Exception | None) -> Callable[[StagedVersion], None]:
    def apply(staged: StagedVersion) -> None:
        try:
            on_workers(staged)
        except (WeightsRefused, RuntimeError):
            assert raised is None
        if raised is not None:
            raise raised

    return apply


def test_an_engine_serves_what_all_its_workers_have_applied() -> None:
    figures = engine(lambda staged: on_workers(staged) or 0.25, DONE).apply(MANIFEST)  # type: ignore[func-returns-value]
    assert figures == {"bytes_full": 7, "pause_s": 0.25}


@pytest.mark.parametrize(
    ("apply", "outcome", "kind", "said"),
    [
        (on_workers, REFUSED, WeightsRefused, "not now"),
        (on_workers, TORN, RuntimeError, "half"),
        (lambda _staged: None, DONE, RuntimeError, "did not have all workers"),
        (on_workers_and_then(None), TORN, RuntimeError, "did not have all workers"),
        (on_workers_and_then(WeightsRefused("no")), DONE, RuntimeError, "applied what the engine refuses: no"),
        (lambda _staged: (_ for _ in ()).throw(WeightsRefused("no")), DONE, WeightsRefused, "no"),
    ],
)
def test_an_engine_is_as_it_was_only_where_all_its_workers_are(
    apply: Callable[[StagedVersion], Any], outcome: Outcome, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said) as raised:
        engine(apply, outcome).apply(MANIFEST)
    assert type(raised.value) is kind


def test_nobody_waits_for_workers_whose_leader_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "POLL_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="closed meanwhile"):
        engine(on_workers, None, lives=False).apply(MANIFEST)


def test_a_relay_has_what_is_verified_of_one_snapshot() -> None:
    relay = Relay(Process(Machine(0), "a").runtime, "e", lambda _key: memoryview(b"bytes"), "key")
    assert relay.version(5) is None and relay.buckets(0) is None and not relay.has(5, 0, 0, None)
    layout = whole_layout(2, 3)
    relay.hold(layout, Transfer(1, 5, MANIFEST, layout, {0: {1}}, 0.0, moved_at=0.0))
    # What is newer may be asked for: it is about to come here, too.
    assert [relay.version(serial) for serial in (4, 5, 6)] == [None, 3, -1]
    assert [relay.buckets(rank) for rank in (-1, 0, 1, 2)] == [None, 3, 3, None]
    asked = [(5, 0, 0), (5, 1, 1), (5, 0, 1), (4, 0, 0), (6, 0, 0)]
    assert [relay.has(*bucket, None) for bucket in asked] == [True, True, False, False, False]
    reader: Any = SimpleNamespace(rank=0)
    assert relay.read(reader, 0, 4, False) == ({}, b"bytes")
    relay.hold(None, None)
    assert relay.version(5) is None and relay.buckets(0) is None


def test_a_relay_sends_nothing_of_memory_that_belongs_to_the_next_version() -> None:
    machine = Machine(0)
    relay = Relay(Process(machine, "a").runtime, "e1", lambda _key: memoryview(bytes(BUCKET_BYTES)), TOKEN)
    relay.start("10.0.1.1:7000")
    layout = whole_layout(1, 2)
    first, second = (Transfer(number, 4 + number, MANIFEST, layout, {}, 0.0, moved_at=0.0) for number in (1, 2))
    relay.hold(layout, first)
    peer = Client(machine, "10.0.1.1:7000", PEER, "b", beats=False, rank=0)
    peer.process.rate = 1.0
    peer.say("open", pull=1, serial=5, buckets=[[0, 2]])
    assert not peer.over
    relay.hold(layout, second)
    machine.run(machine.now + 0.1)
    assert peer.over and not peer.count("bucket")


@pytest.mark.parametrize(("ranks", "buckets", "workers"), [(1, 5, 2), (3, 1, 3), (2, 3, 1)])
def test_workers_fetch_each_bucket_once_into_memory_that_they_share(ranks: int, buckets: int, workers: int) -> None:
    layout = whole_layout(ranks, buckets)
    slots = SharedSlots.create(1, layout.total_bytes)
    shared = {"staging": {**file_reference(slots.data_fd), "workers": workers}}
    engines = [StagingEngine(lambda _staged: None, "cpu", lambda work: work(), number) for number in range(workers)]
    needs = [engine.prepare(layout, shared) for engine in engines]
    assert sorted(key for share in needs for key in share) == sorted(layout.bucket_keys())
    assert max(map(len, needs)) - min(map(len, needs)) <= 1
    engines[0].memory((0, 0))[:1] = b"x"
    assert all(bytes(engine.memory((0, 0))[:1]) == b"x" for engine in engines)
    slots.close_files()


def test_staging_memory_that_has_been_written_since_proves_nothing() -> None:
    layout, proofs = whole_layout(1, 2), list[ExpectedChecksums]()
    slots = SharedSlots.create(1, layout.total_bytes)

    def keep(staged: StagedVersion) -> None:
        assert staged.proof is not None
        proofs.append(staged.proof)

    engine = StagingEngine(keep, "cpu", lambda work: work())
    engine.prepare(layout, {})
    for write in (
        lambda: engine.fetch((0, 0), slots.refer(0, *layout.bucket_range(0, 0))),
        lambda: engine.pieces((0, 1)),
    ):
        engine.apply(MANIFEST)
        assert proofs[-1].still_staged()
        write()
        assert not proofs[-1].still_staged()
    slots.close_files()
