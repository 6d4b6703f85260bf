"""What docs/weight_sync.md promises under "Trust", tried by somebody who wants it broken."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.deterministic.machine import Machine, Process
from tests.deterministic.parts import REGISTRY, TOKEN, whole_layout
from tests.patience import eventually
from tests.tiny_models import SHAPE
from tests.unit_tests.inference.test_parity import Liar
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.inference.pool.actor_process import ActorProcess
from torchtitan.utils.child_process import ChildProcess
from torchtitan.utils.json_lines import EventLog
from torchtitan.weight_sync.memory.manifest import ChecksumTable, Manifest
from torchtitan.weight_sync.memory.transfer import Transfer
from torchtitan.weight_sync.registry.registry import Registry
from torchtitan.weight_sync.registry.state import RegistrySettings
from torchtitan.weight_sync.wire.handshake import ACTOR, HTTP, PEER, RANK, TRAINER, WORKER, Dialer, Identity, role_key

# xxh3's secret begins like this, in 64-bit words.
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b532ea371644897a20df94e3819ef46a9deacd8a8"
    "fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
)
WORD, LOW = (1 << 64) - 1, (1 << 32) - 1
ROLES = (TRAINER, RANK, ACTOR, PEER, WORKER, HTTP)
NAMES = ("0", "1", "actor-0", "actor-1")


class Told(Liar):
    """An actor that keeps what it is told for its connection to the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    async def connect_weights(self, *given: Any) -> None:
        self.given += given


def told_to_actors(backend: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Every string that a run gives to each of the two actors that it starts: arguments, environment, and messages."""
    found: dict[str, set[str]] = {"actor-0": set(), "actor-1": set()}
    actors: dict[str, Told] = {}

    async def launch(self: ActorProcess, command: Sequence[str], environment: Mapping[str, str], **_: Any) -> None:
        found[self._name] |= {*command, *environment.values()}
        await ChildProcess.launch(self, ["sleep", "600"], environment)

    async def read_port(self: ActorProcess, *_: Any) -> int:
        return 1 + int(self._name[-1])

    def make_client(url: str, key: str) -> Told:
        name = f"actor-{int(url[-1]) - 1}"
        found[name].add(key)
        actors[name] = Told()
        return actors[name]

    monkeypatch.setattr(ActorProcess, "launch", launch)
    monkeypatch.setattr(ActorProcess, "read_port", read_port)
    config = JobConfig()
    config.model.hf_assets_path = str(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    inference = config.inference
    inference.backend, inference.engine.python, inference.num_actors = backend, sys.executable, 2  # type: ignore[assignment]

    async def work() -> None:
        pool = InferencePool(config, "e1", TOKEN, folder, EventLog(folder / "events.jsonl"), make_client)  # type: ignore[arg-type]
        await pool.start()
        await pool.connect_weights("127.0.0.1:9")
        await eventually(lambda: len(actors) == 2 and all(actor.given for actor in actors.values()))
        await pool.close()

    asyncio.run(work())
    return {name: strings | set(map(str, actors[name].given)) for name, strings in found.items()}


def other_bytes(data: bytes, evil: bytes) -> bytes:
    """Bytes with the same xxh3 that begin with `evil` (8 bytes): five words of the first lane make up for it."""
    word = lambda stripe: struct.unpack_from("<Q", data, 64 * stripe)[0]  # noqa: E731
    key = lambda stripe: struct.unpack_from("<Q", SECRET, 8 * stripe)[0]  # noqa: E731
    mixed = lambda stripe, value: ((value ^ key(stripe)) & LOW) * ((value ^ key(stripe)) >> 32)  # noqa: E731
    first, fourth = struct.unpack("<Q", evil)[0], word(4)
    # A lane adds up its words, and the products of the halves of its mixed words; it does not see their order.
    total = (sum(map(word, range(6))) - first - fourth) & WORD
    product = (sum(mixed(n, word(n)) for n in range(6)) - mixed(0, first) - mixed(4, fourth)) & WORD
    half = min(product // LOW, LOW)
    word_one, five = key(1) ^ (LOW << 32 | half), key(5) ^ (1 << 32 | product - LOW * half)
    rest = (total - word_one - five) & WORD
    two = key(2) & ~LOW | (rest - key(3)) & LOW
    three = ((rest - two) & WORD) >> 32 << 32 | key(3) & LOW
    forged = bytearray(data)
    for stripe, value in ((0, first), (1, word_one), (2, two), (3, three), (5, five)):
        struct.pack_into("<Q", forged, 64 * stripe, value)
    return bytes(forged)


def test_relayed_bytes_are_checked_by_more_than_a_checksum() -> None:
    data = random.Random(1).randbytes(4096)
    forged = other_bytes(data, struct.pack("<2f", 1e6, 1e6))
    assert forged[:8] != data[:8] and xxhash.xxh3_128_hexdigest(forged) == xxhash.xxh3_128_hexdigest(data)
    table = ChecksumTable.of([xxhash.xxh3_128_hexdigest(data)], [hashlib.sha256(data).hexdigest()])
    manifest = Manifest("e1", 1, "layout", (table.digest(),), "digest", {0: table})

    def accepted(source: str, arrived: bytes) -> bool:
        transfer = Transfer(1, 1, manifest, whole_layout(1, 1), {0: {0}}, 0.0, 0.0, source)
        hasher = transfer.hasher(0)
        hasher.update(arrived)
        return bool(hasher.hexdigest() == transfer.expected((0, 0)))

    assert accepted("", data) and accepted("actor-1", data) and not accepted("actor-1", forged)


@pytest.mark.parametrize("backend", ["embedded", "vllm", "sglang"])
def test_no_actor_that_the_run_starts_can_speak_as_another_part(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strings_by_actor = told_to_actors(backend, tmp_path, monkeypatch)
    machine = Machine(0)
    runtime = Process(machine, REGISTRY).runtime
    registry = Registry(runtime, RegistrySettings(2), "e1", 1, TOKEN, lambda *_: None, lambda: None)
    registry.start(REGISTRY)

    def opens(role: str, name: str, key: str) -> bool:
        answers: list[str] = []
        caller, fields = Process(machine, "actor").runtime, {"epoch": "e1", "address": "127.0.0.1:9"}
        ready = lambda _channel, _fields: answers.append("")  # noqa: E731
        Dialer(caller, REGISTRY, Identity(role, name, key), fields, ready, answers.append)
        machine.run(machine.now + 0.05)
        assert answers and (not answers[0] or "refused" in answers[0])
        return not answers[0]

    for name, strings in strings_by_actor.items():
        derived = {role_key(string, role, other) for string in strings for role in ROLES for other in NAMES}
        known = strings | derived
        opened = {
            (role, other) for role in (TRAINER, RANK, ACTOR) for other in NAMES if role_key(TOKEN, role, other) in known
        }
        assert TOKEN not in known and opened == {(ACTOR, name)}
        # The registry's door agrees, also with what the actor has not derived but is given.
        secrets = {string for string in strings if len(string) == len(role_key("", "", ""))}
        tried = {
            (role, other)
            for role in (TRAINER, RANK, ACTOR)
            for other in NAMES
            for key in secrets
            if opens(role, other, key)
        }
        assert tried == {(ACTOR, name)}
        # Nor does it know the key to another actor's HTTP server.
        (other,) = strings_by_actor.keys() - {name}
        assert role_key(TOKEN, HTTP, name) in known and role_key(TOKEN, HTTP, other) not in known
