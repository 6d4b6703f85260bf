"""The receiver's state machine."""

from __future__ import annotations

from typing import Any

import pytest

from torchtitan.weight_sync.states.receiver import BeginApply, ReceiverMachine, ReceiverState, Send


def receiving(buckets: int = 1) -> ReceiverMachine:
    machine = ReceiverMachine("e")
    machine.connected(1)
    machine.layout("layout")
    machine.offer(10, 5, "d5", [(0, bucket) for bucket in range(buckets)])
    return machine


def applied(machine: ReceiverMachine) -> ReceiverMachine:
    machine.bucket(10, (0, 0), True)
    machine.staged(10)
    machine.apply(10)
    machine.apply_finished(10, None, {})
    return machine


def kinds(commands: list[Any]) -> list[str]:
    return [c.message["type"] if isinstance(c, Send) else type(c).__name__ for c in commands]


def test_receiver_stages_only_what_is_whole() -> None:
    machine = receiving(2)
    machine.bucket(10, (0, 0), True)
    assert machine.staged(10) == [] and machine.apply(10) == []
    machine.bucket(10, (0, 1), True)
    assert kinds(machine.staged(10)) == ["staged"]
    assert machine.served is None
    assert kinds(machine.apply(10)) == ["BeginApply"]
    assert kinds(machine.abort(10)) == [], "nothing is aborted once apply has begun"
    assert kinds(machine.apply_finished(10, None, {})) == ["applied"]
    assert machine.served is not None and machine.served.version == 5


def test_receiver_refuses_what_is_corrupt_and_keeps_the_old() -> None:
    machine = receiving()
    assert kinds(machine.bucket(10, (0, 0), False)) == ["refused", "Discard"]
    assert machine.state is ReceiverState.READY and machine.refused_versions == 1 and machine.served is None
    assert machine.bucket(10, (0, 0), True) == []


def test_receiver_refuses_old_epochs_terms_attempts_and_versions() -> None:
    machine = applied(receiving())
    assert not machine.acceptable("other", 1) and not machine.acceptable("e", 0)
    assert machine.offer(9, 6, "d6", [(0, 0)]) == []
    assert kinds(machine.offer(11, 5, "d5", [(0, 0)])) == ["decline"]
    assert kinds(machine.offer(12, 4, "d4", [(0, 0)])) == ["decline"]
    assert kinds(machine.offer(13, 6, "d6", [(0, 0)])) == ["accept"]
    with pytest.raises(ValueError, match="term"):
        machine.connected(0)


def test_poisoned_receiver_takes_the_same_version_again() -> None:
    machine = applied(receiving())
    machine.offer(11, 6, "d6", [(0, 0)])
    machine.bucket(11, (0, 0), True)
    machine.staged(11)
    machine.apply(11)
    assert kinds(machine.apply_finished(11, "half written", {})) == ["poisoned"]
    assert machine.poisoned and machine.served is not None and machine.served.version == 5
    assert kinds(machine.offer(12, 5, "d5", [(0, 0)])) == ["accept"]


def test_receiver_of_an_engine_that_refuses_is_not_poisoned() -> None:
    machine = applied(receiving())
    machine.offer(11, 6, "d6", [(0, 0)])
    machine.bucket(11, (0, 0), True)
    machine.staged(11)
    machine.apply(11)
    assert kinds(machine.apply_finished(11, "does not fit", {}, refused=True)) == ["refused"]
    assert not machine.poisoned and machine.refused_versions == 1
    assert machine.served is not None and machine.served.version == 5
    assert kinds(machine.offer(12, 6, "d6", [(0, 0)])) == ["accept"]


def test_receiver_takes_a_delta_only_on_what_its_staging_memory_holds() -> None:
    machine = applied(receiving())
    bases = []
    for attempt, base in ((11, (5, "other")), (12, (5, "d5"))):
        machine.offer(attempt, 6, "d6", [(0, 0)], base)
        bases.append(machine.delta)
        machine.abort(attempt)
    assert bases == [False, False], "the first offer has invalidated it, from before the first byte"
    machine = applied(receiving())
    (accept,) = machine.offer(11, 6, "d6", [(0, 0)], (5, "d5"))
    assert isinstance(accept, Send) and accept.message["base"] is True and machine.delta
    machine.refuse(11, "checksum")
    machine.offer(12, 6, "d6", [(0, 0)], (5, "d5"))
    assert not machine.delta, "half a delta is no base"


def test_poisoned_receiver_has_no_base_and_relays_nothing() -> None:
    machine = applied(receiving())
    machine.offer(11, 6, "d6", [(0, 0)])
    machine.bucket(11, (0, 0), True)
    machine.staged(11)
    machine.apply(11)
    machine.apply_finished(11, "half written", {})
    assert machine.serving is None and machine.hello_fields()["shadow"] is False
    assert kinds(machine.relay(12, "b", 5, "d5", ["h:1"])) == ["broken"]
    machine.offer(13, 6, "d6", [(0, 0)], (5, "d5"))
    assert not machine.delta


def test_receiver_passes_on_what_it_holds_and_nothing_else() -> None:
    machine = applied(receiving())
    assert kinds(machine.relay(11, "b", 5, "other", ["h:1"])) == ["broken"]
    assert kinds(machine.relay(12, "b", 5, "d5", ["h:1"])) == ["BeginRelay"]
    assert kinds(machine.offer(13, 6, "d6", [(0, 0)])) == ["decline"], "its staging memory is being read"
    assert kinds(machine.abort(12)) == ["EndRelay"] and machine.relay_finished(12, "late") == []
    machine.relay(14, "b", 5, "d5", ["h:1"])
    assert kinds(machine.relay_finished(14, "connection lost")) == ["broken"]
    machine.relay(15, "b", 5, "d5", ["h:1"])
    assert kinds(machine.release(15)) == ["EndRelay"]
    machine.relay(16, "b", 5, "d5", ["h:1"])
    assert kinds(machine.disconnected()) == ["EndRelay"] and not machine.relays
    machine.connected(2)
    machine.layout("another layout")
    assert kinds(machine.relay(17, "b", 5, "d5", ["h:1"])) == ["broken"], "new staging memory"


def test_apply_survives_the_loss_of_the_coordinator() -> None:
    machine = receiving()
    machine.bucket(10, (0, 0), True)
    machine.staged(10)
    assert isinstance(machine.apply(10)[0], BeginApply)
    machine.disconnected()
    assert machine.state is ReceiverState.APPLYING
    assert machine.apply_finished(10, None, {}) == [], "nobody is there to hear it"
    assert machine.state is ReceiverState.DISCONNECTED
    assert machine.hello_fields()["served"] == ["e", 5, "d5"]
