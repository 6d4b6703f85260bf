"""What an actor with a valid key may say: all else is refused at the door, and changes nothing for the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit_tests.weight_sync.test_registry import World
from torchtitan.report.sync_metrics import SyncMetrics
from torchtitan.weight_sync.registry import relays
from torchtitan.weight_sync.wire.messages import FIGURES, MAX_NAME, SCHEMA, parse
from torchtitan.weight_sync.wire.runtime import Message, ProtocolError

SERVING: Message = {"type": "serving", "version": 0, "digest": "d", "figures": {}}
HOSTILE: list[tuple[Message, str]] = [
    ({"type": "ended", "version": 0, "outcome": "whatever", "reason": ""}, "outcome"),
    ({"type": "ended", "version": 0, "outcome": ["gone"], "reason": ""}, "outcome"),
    ({"type": "ended", "version": 0, "outcome": "gone", "reason": 7}, "reason"),
    (SERVING | {"figures": {"transfer_s": "x"}}, "figures"),
    (SERVING | {"figures": {"transfer_s": float("nan")}}, "figures"),
    (SERVING | {"figures": {"transfer_s": float("inf")}}, "figures"),
    (SERVING | {"figures": {"bytes_full": 10**400}}, "figures"),
    (SERVING | {"figures": {"pause_s": True}}, "figures"),
    (SERVING | {"figures": {"pause_s": None}}, "figures"),
    (SERVING | {"figures": {"source": "trainer\x1b[2J"}}, "figures"),
    *(
        (SERVING | {"figures": {key: -1}}, f"'figures': {key}: not a number from 0")
        for key in FIGURES
        if key != "source"
    ),
    *((SERVING | {"figures": {key: 1.1e18}}, f"'figures': {key}: not a") for key in FIGURES if key != "source"),
    (SERVING | {"figures": {"transfer_s": 1e8}}, "figures"),
    (SERVING | {"figures": {"bytes_full": 10**16}}, "figures"),
    (SERVING | {"figures": []}, "figures"),
    (SERVING | {"version": True}, "version"),
    (SERVING | {"version": 10**30}, "version"),
    (SERVING | {"version": -2}, "version"),
    (SERVING | {"digest": "d" * 1000}, "digest"),
    ({"type": "pulling", "serial": 1.0, "version": 0}, "serial"),
    ({"type": "ping", "bytes": float("inf")}, "bytes"),
    ({"type": "ping", "bytes": -1}, "bytes"),
    ({"type": "poisoned", "version": "0", "reason": ""}, "version"),
    ({"type": "x" * 9000}, "unknown message type"),
    ({"type": None}, "not an object with a type"),
    ({"type": "layout", "layout": {}}, "does not send"),
    ({"type": "status"} | {field: {} for field in SCHEMA["status"]}, "status"),
    ({"type": "bucket", "pull": 1, "rank": 0, "bucket": 0, "bytes": 0}, "bucket"),
]


@pytest.mark.parametrize(("message", "reason"), HOSTILE)
def test_a_forbidden_message_ends_the_connection_of_its_actor_only(
    message: Message, reason: str, tmp_path: Path
) -> None:
    world = World(relay_fanout=1)
    ranks, good, evil = world.ranks(), world.actor("good", address="10.0.0.2:1"), world.actor("a", address="10.0.0.3:1")
    trainer = world.trainer()
    world.publish(ranks, 1, 0)
    evil.send({"type": "pulling", "serial": 1, "version": 0})
    evil.send(message)
    world.run(0.05)
    assert evil.over and reason in world.machine.protocol_errors[-1] and len(world.machine.protocol_errors[-1]) < 300
    world.publish(ranks, 2, 1)
    assert good.last("newest")["version"] == 1 and not any(client.over for client in (*ranks, good, trainer))
    assert trainer.last("status")["actors"]["a"]["figures"] == {}
    (folder := tmp_path / "weight_sync").mkdir()
    lines = [{"time": 1.0, "event": event, **fields} for event, fields in world.journal]
    (folder / "registry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = SyncMetrics(tmp_path)
    metrics.step({"policy_version": 1})
    metrics.close()


def test_figures_of_an_actor_overwrite_no_field_of_the_registry(tmp_path: Path) -> None:
    """Nothing that is known here is overwritten, in no file; every number is one of JSON, and sums up."""
    world = World()
    ranks, evil, trainer = world.ranks(), world.actor(), world.trainer()
    world.publish(ranks, 1, 0)
    known = {"bytes_full": 10**15, "transfer_s": 1e-300, "pause_s": 1e7, "source": "x" * MAX_NAME}
    forged = dict.fromkeys(("epoch", "version", "actor", "outcome", "offered_at", "attempt", "reason"), 7)
    about = {"version": 0, "digest": world.digest}
    evil.say("serving", **about, figures=known | forged | {f"x{number}": 1e17 for number in range(1000)})
    assert trainer.last("status")["actors"]["a"]["figures"] == known
    (folder := tmp_path / "weight_sync").mkdir()
    lines = [{"time": float(number), "event": event, **fields} for number, (event, fields) in enumerate(world.journal)]
    start = {"time": 0.0, "event": "start", "epoch": "e1"}
    (folder / "registry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [start, *lines]))
    metrics = SyncMetrics(tmp_path)
    sums = metrics.step({"policy_version": 0})
    metrics.close()
    json.dumps(sums, allow_nan=False)
    row = json.loads((folder / "versions.jsonl").read_text(), parse_constant=pytest.fail)
    named = (row["epoch"], row["version"], row["actor"], row["outcome"], row["attempt"], row["reason"])
    assert named == ("e1", 0, "a", "applied", 0, "")
    measured = {key: value for key, value in row["figures"].items() if value is not None}
    assert measured == known and not forged.keys() & row["figures"].keys()


def test_only_the_fields_of_a_message_go_on_and_text_for_people_cannot_forge_a_line() -> None:
    base = {"type": "ended", "version": 3, "outcome": "refused", "reason": "no\n12:00 all is well\x1b[1A" + "x" * 9999}
    found = parse({**base, "more": ["of", "it"]})
    assert set(found) == set(base) and found["reason"].startswith("no\\n12:00 all is well\\x1b[1Ax")
    assert len(found["reason"]) < 600


@pytest.mark.parametrize("kind", sorted(SCHEMA))
def test_each_field_of_each_message_is_needed_and_has_a_type(kind: str) -> None:
    for field in SCHEMA[kind]:
        fields: dict[str, Any] = {field.rstrip("?"): object()}
        with pytest.raises(ProtocolError, match=f"message '{kind}' needs field"):
            parse({"type": kind} | fields)


def test_the_newest_version_is_announced_whatever_goes_wrong_with_relaying(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any) -> Any:
        raise ValueError("no number")

    monkeypatch.setattr(relays, "relay_sources", fail)
    world = World(relay_fanout=1)
    ranks, good = world.ranks(), world.actor("good", address="10.0.0.2:1")
    world.publish(ranks, 1, 0)
    assert good.last("newest")["version"] == 0 and not any(client.over for client in ranks)
