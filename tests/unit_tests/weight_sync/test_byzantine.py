"""Real sockets and processes: a hostile actor with a valid key, and strangers, at the registry and a shard server.

WEIGHT_SYNC_FUZZ_SECONDS=600 WEIGHT_SYNC_FUZZ_SEED=7 python -m pytest tests/unit_tests/weight_sync/test_byzantine.py
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
import struct
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.hostile import enter, message
from tests.patience import PATIENCE_S, until
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.report.sync_metrics import SyncMetrics
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.handshake import ACTOR, Identity, role_key

SECONDS = float(os.environ.get("WEIGHT_SYNC_FUZZ_SECONDS", "3"))
SEED = int(os.environ.get("WEIGHT_SYNC_FUZZ_SEED", "0"))
EPOCH = "e1-fuzz"
MAX_GROWTH_MB = 64


def fuzzed(rng: random.Random, version: int) -> bytes:
    """A framed message of any type, sometimes with a wrong length or a flipped bit."""
    body = bytearray(json.dumps(message(rng, version, "d", [version + 1])).encode())
    if rng.random() < 0.05:
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    length = rng.choice((0, 2**31, len(body) + 1)) if rng.random() < 0.03 else len(body)
    return (wire.LENGTH.pack(length) + bytes(body)) * rng.choice((1, 1, 1, 1, 200))


def attack(rng: random.Random, address: str, token: str, rank: int | None, version: int) -> None:
    """One connection, of an actor or of a stranger."""
    with (
        contextlib.suppress(OSError, ValueError, KeyError, struct.error),
        socket.create_connection(wire.parse_address(address), timeout=2.0) as client,
    ):
        if rng.random() < 0.7:
            name = f"evil-{rng.randrange(3)}"
            fields: dict[str, Any] = {"epoch": EPOCH, "instance": f"i{rng.randrange(3)}"}
            about = fields if rank is None else fields | {"rank": rank}
            enter(client, Identity.of(token, ACTOR, name), about)
        for _ in range(rng.randrange(1, 30)):
            client.sendall(fuzzed(rng, version))


@pytest.mark.exhaustive
@pytest.mark.timeout(max(300, 3 * SECONDS))
def test_neither_the_trainer_nor_an_honest_actor_notices(tmp_path: Path) -> None:
    rng, token = random.Random(SEED), secrets.token_urlsafe(16)
    weights = {"w": torch.zeros(1 << 16)}
    config = WeightSyncConfig()
    config.bucket_bytes = 1 << 16
    sync = WeightSync(config, weights, epoch=EPOCH, token=token, run_dir=tmp_path)
    assert sync.watcher is not None and sync.registry is not None
    actor = SyncActor(sync.registry_address, "good", EPOCH, role_key(token, ACTOR, "good"), lambda _staged: None)
    actor.start()
    try:
        until(lambda: "good" in sync.actors())
        servers = [psutil.Process(server.process.pid) for server in (sync.registry, sync.shard_server)]  # type: ignore[union-attr]
        before = [server.memory_info().rss for server in servers]
        metrics, version, end = SyncMetrics(tmp_path), -1, time.monotonic() + SECONDS
        while time.monotonic() < end:
            shard = rng.random() < 0.4
            address = sync.shard_server.address if shard else sync.registry_address
            attack(rng, address, token, 0 if shard else None, version)
            version += 1
            no_vote = not sync.reserve()
            sync.fence()
            published = sync.commit(version, int(no_vote)) == "published"
            if published:
                until(lambda: actor.served is not None and actor.served.version >= version, PATIENCE_S)  # noqa: B023
            metrics.step({"policy_version": version})
            sync.statistics()
        until(lambda: sync.actors()["good"].state == "ready")
        assert version > 3 and sync.actors()["good"].evictions == 0
        assert (sync.registry.restarts, sync.shard_server.restarts, sync.failure) == (0, 0, "")
        growth = [server.memory_info().rss - was for server, was in zip(servers, before, strict=True)]
        assert max(growth) < MAX_GROWTH_MB << 20
        assert metrics._journal.left_out == 0
        metrics.close()
        SyncMetrics(tmp_path).close()
        for log in (tmp_path / "weight_sync").glob("*.log"):
            assert "Traceback" not in log.read_text(), log
    finally:
        actor.close()
        sync.close()
