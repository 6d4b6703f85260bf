"""Who may come in, and how many may try at once."""

from __future__ import annotations

import pytest

from deterministic.machine import Machine, Process
from torchtitan.weight_sync import handshake
from torchtitan.weight_sync.handshake import ACTOR, RANK, TRAINER, Call, Gate, Identity
from torchtitan.weight_sync.wire import Channel, Message


class Port:
    """A gate that lets actors and ranks in."""

    def __init__(self, machine: Machine, token: str = "token"):
        self.process = Process(machine, "server")
        self.entered: list[Identity] = []
        admit = lambda _identity, _fields: {"term": 1}  # noqa: E731
        roles, runtime = frozenset((ACTOR, RANK)), self.process.runtime
        self.gate = Gate(runtime, roles, token, admit, self.enter)
        self.process.runtime.listen("server", self.gate.accept)

    def enter(self, _channel: Channel, identity: Identity, _fields: Message) -> None:
        self.entered.append(identity)


def call(machine: Machine, identity: Identity) -> list[str]:
    """What became of it: "ready", or the reason why not."""
    outcome: list[str] = []
    client = Process(machine, "client")
    ready = lambda _channel, _fields: outcome.append("ready")  # noqa: E731
    Call(client.runtime, "server", identity, {}, ready, outcome.append)
    machine.run(machine.now + 10.0)
    return outcome


def test_key_of_a_role_opens_nothing_else() -> None:
    machine = Machine(0)
    port = Port(machine)
    actor = Identity.of("token", ACTOR, "actor-0")
    assert call(machine, actor) == ["ready"]
    for stolen in (
        Identity(RANK, "0", actor.key),
        Identity(ACTOR, "actor-1", actor.key),
        Identity(RANK, "actor-0", actor.key),
    ):
        assert call(machine, stolen) == ["server refused: wrong key"]
    assert call(machine, Identity.of("token", TRAINER, "0")) == ["server refused: no trainer is expected here"]
    assert [identity.name for identity in port.entered] == ["actor-0"]


def test_server_without_the_token_is_not_obeyed() -> None:
    machine = Machine(0)
    Port(machine, "another token").gate._roles = frozenset()
    (outcome,) = call(machine, Identity.of("token", ACTOR, "actor-0"))
    assert "refused" in outcome

    def agree(channel: Channel, _message: Message) -> None:
        channel.send({"type": "welcome", "proof": "of nothing", "fields": {}})

    def accept(channel: Channel) -> None:
        channel.on_message = agree
        channel.send({"type": "challenge", "nonce": "n"})

    Process(machine, "impostor").runtime.listen("server", accept)
    (outcome,) = call(machine, Identity.of("token", ACTOR, "actor-0"))
    assert "does not know the key" in outcome


def test_flood_of_strangers_is_bounded_and_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MOST_HANDSHAKES", 8)
    machine = Machine(0)
    port = Port(machine)
    stranger = Process(machine, "stranger")

    def say_nothing(channel: Channel) -> None:
        channel.on_message = lambda _channel, _message: None

    for _ in range(100):
        stranger.runtime.dial("server", say_nothing, lambda _reason: None)
    machine.run(0.1)
    assert len(port.gate._waiting) == 8
    assert call(machine, Identity.of("token", ACTOR, "actor-0")) == ["ready"]
    assert not port.gate._waiting, "a handshake does not last for ever"
