"""Strangers at every port, without end: those who have a key get in all the same."""

from __future__ import annotations

import random

import pytest

from deterministic.machine import Machine, Process
from tests.unit_tests.weight_sync.job import REGISTRY, Actor, Job, Shape
from torchtitan.weight_sync import handshake
from torchtitan.weight_sync.wire import Channel

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
    begun = machine.now
    actor = Actor(job, "late", 0.2, job.shape.epoch)
    job.actors.append(actor)
    while not actor.versions and machine.now < begun + 30.0:
        machine.run(machine.now + 0.01)
    assert actor.versions, f"it did not join within {machine.now - begun:.0f} s"
    machine.run(max(machine.now, begun + (seconds or 0.0)) + 0.5)
    # Those who had their say are not let go for strangers; of these some are waited for, and no more.
    assert job.registry.actors["late"].state == "READY"
    held = sum(not channel.closed for channel in opened)
    assert held <= len(ports) * handshake.MOST_HANDSHAKES
    return actor.versions[0][0] - begun


@pytest.mark.parametrize("seconds", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_flood_at_every_port_delays_a_join_by_a_second_at_most(seed: int, seconds: float) -> None:
    assert seconds_to_join(seed, seconds) - seconds_to_join(seed, None) <= 1.0
