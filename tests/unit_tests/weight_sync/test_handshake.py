"""Who may come in, and how many may try at once; strangers at every port, without end."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.deterministic.machine import Machine, Process
from tests.deterministic.parts import REGISTRY
from tests.unit_tests.weight_sync.job import Actor, Job, Shape
from torchtitan.weight_sync.wire import handshake
from torchtitan.weight_sync.wire.handshake import ACTOR, RANK, TRAINER, Acceptor, Dialer, Identity
from torchtitan.weight_sync.wire.runtime import Channel, Message


class Port:
    """An acceptor that lets actors and ranks in."""

    def __init__(self, machine: Machine, token: str = "token"):
        self.process = Process(machine, "server")
        self.entered: list[Identity] = []
        admit = lambda _identity, _fields: {"term": 1}  # noqa: E731
        roles, runtime = frozenset((ACTOR, RANK)), self.process.runtime
        self.acceptor = Acceptor(runtime, roles, token, admit, self.enter)
        self.process.runtime.listen("server", self.acceptor.accept)

    def enter(self, _channel: Channel, identity: Identity, _fields: Message) -> None:
        self.entered.append(identity)


def call(machine: Machine, identity: Identity) -> list[str]:
    """What became of it: "ready", or the reason why not."""
    outcome: list[str] = []
    client = Process(machine, "client")
    ready = lambda _channel, _fields: outcome.append("ready")  # noqa: E731
    Dialer(client.runtime, "server", identity, {}, ready, outcome.append)
    machine.run(machine.now + 10.0)
    return outcome


def answer(machine: Machine, hello: Message | Callable[[Message], Message]) -> Message:
    """What the server answers to this hello, or to the one that is made of its challenge."""
    replies = list[Message]()

    def opened(channel: Channel) -> None:
        def challenged(channel: Channel, challenge: Message) -> None:
            channel.on_message = lambda _channel, message: replies.append(message)
            channel.send(hello(challenge) if callable(hello) else hello)

        channel.on_message = challenged

    Process(machine, "stranger").runtime.dial("server", opened, lambda _reason: None)
    machine.run(machine.now + 1.0)
    return replies[0]


def recording(accept: Callable[[Channel], None], said: list[Message]) -> Callable[[Channel], None]:
    """The same, of a server on whose network somebody listens."""

    def accept_recorded(channel: Channel) -> None:
        accept(channel)
        heard = channel.on_message

        def record(channel: Channel, message: Message) -> None:
            said.append(message)
            heard(channel, message)

        channel.on_message = record

    return accept_recorded


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
    Port(machine, "another token").acceptor._roles = frozenset()
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


def test_a_recorded_handshake_opens_nothing() -> None:
    machine, messages = Machine(0), list[Message]()
    port = Port(machine)
    port.process.runtime.listen("server", recording(port.acceptor.accept, messages))
    assert call(machine, Identity.of("token", ACTOR, "actor-0")) == ["ready"]
    hello = messages[0]
    assert "wrong key" in answer(machine, hello)["reason"] and len(port.entered) == 1


def test_a_proof_counts_to_its_last_digit() -> None:
    machine, identity = Machine(0), Identity.of("token", ACTOR, "actor-0")
    port = Port(machine)

    def say(change: Callable[[str], str]) -> Message:
        def hello(challenge: Message) -> Message:
            proof = change(identity.proof("client", challenge["nonce"], "n"))
            names = {"role": ACTOR, "name": "actor-0"}
            return {"type": "hello", **names, "nonce": "n", "proof": proof, "fields": {}}

        return answer(machine, hello)

    for change in (lambda proof: proof[:-1] + "g", lambda proof: proof[:-1], lambda proof: proof + "0"):
        assert "wrong key" in say(change)["reason"]  # type: ignore[arg-type]
    assert not port.entered and say(str)["type"] == "welcome"


def test_the_callers_own_proof_proves_nothing_to_it() -> None:
    machine = Machine(0)

    def reflect(channel: Channel, hello: Message) -> None:
        channel.send({"type": "welcome", "proof": hello["proof"], "fields": {}})

    def accept(channel: Channel) -> None:
        channel.on_message = reflect
        channel.send({"type": "challenge", "nonce": "n"})

    Process(machine, "mirror").runtime.listen("server", accept)
    (outcome,) = call(machine, Identity.of("token", ACTOR, "actor-0"))
    assert "does not know the key" in outcome


def test_a_call_that_is_given_up_leaves_nothing_behind() -> None:
    machine = Machine(0)
    port, client = Port(machine), Process(machine, "client")
    never = lambda *_: pytest.fail("it was given up")  # noqa: E731
    Dialer(client.runtime, "server", Identity.of("token", ACTOR, "a"), {}, never, never).cancel()
    machine.run(1.0)
    assert not client.channels and not port.process.channels and not port.entered


def test_a_call_that_is_not_answered_in_time_is_hung_up() -> None:
    machine = Machine(0)
    client, mute = Process(machine, "client"), Process(machine, "mute")
    mute.runtime.listen("server", lambda _channel: None)
    reasons: list[str] = []
    never = lambda *_: pytest.fail("nobody has answered")  # noqa: E731
    Dialer(client.runtime, "server", Identity.of("token", ACTOR, "a"), {}, never, reasons.append)
    machine.run(handshake.HANDSHAKE_SECONDS + 1.0)
    assert len(reasons) == 1 and "did not answer" in reasons[0] and not client.channels


def test_flood_of_strangers_is_bounded_and_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MAX_HANDSHAKES", 8)
    machine = Machine(0)
    port = Port(machine)
    stranger = Process(machine, "stranger")

    def say_nothing(channel: Channel) -> None:
        channel.on_message = lambda _channel, _message: None

    for _ in range(100):
        stranger.runtime.dial("server", say_nothing, lambda _reason: None)
    machine.run(0.1)
    assert len(port.acceptor._waiting) == 8
    assert call(machine, Identity.of("token", ACTOR, "actor-0")) == ["ready"]
    assert not port.acceptor._waiting, "a handshake does not last for ever"


STRANGERS = 2000


def flood(job: Job, ports: list[str], seconds: float) -> list[Channel]:
    """So many connections to each of the ports within so many seconds, all of which then say nothing."""
    stranger, opened, rng = Process(job.machine, "stranger"), list[Channel](), random.Random(1)

    def stay(channel: Channel) -> None:
        channel.on_message = lambda _channel, _challenge: None
        opened.append(channel)

    def dial(port: str) -> None:
        stranger.runtime.dial(port, stay, lambda _reason: None)

    for port in ports:
        for _ in range(STRANGERS):
            job.machine.at(rng.random() * seconds, stranger, lambda port=port: dial(port))  # type: ignore[misc]
    return opened


def seconds_to_join(seed: int, seconds: float | None) -> float:
    """How long a new actor takes until it serves, with strangers coming for so many seconds from when it starts."""
    machine = Machine(seed)
    job = Job(machine, Shape(actor_seconds=(0.2, 0.2), relay_fanout=1))
    machine.run(0.2)
    job.train(1)
    machine.run(2.0)
    ports = [REGISTRY, *(port for port in machine.listeners if port != REGISTRY)]
    # A registry, two shard servers, and two actors that pass versions on.
    assert len(ports) == 5
    opened = [] if seconds is None else flood(job, ports, seconds)
    started_at = machine.now
    actor = Actor(job, "late", 0.2, job.shape.epoch)
    job.actors.append(actor)
    while not actor.versions and machine.now < started_at + 30.0:
        machine.run(machine.now + 0.01)
    assert actor.versions, f"it did not join within {machine.now - started_at:.0f} s"
    machine.run(max(machine.now, started_at + (seconds or 0.0)) + 0.5)
    # Those who had their say are not let go for strangers; of these some are waited for, and no more.
    assert job.registry.actors["late"].state == "ready"
    held = sum(not channel.closed for channel in opened)
    assert held <= len(ports) * handshake.MAX_HANDSHAKES
    return actor.versions[0][0] - started_at


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_flood_at_every_port_delays_a_join_by_a_second_at_most(seed: int, seconds: float) -> None:
    assert seconds_to_join(seed, seconds) - seconds_to_join(seed, None) <= 1.0
