"""An embedded engine whose weights are not the version's: found while it generates, said by name, evicted, healed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchtitan.inference.engines.embedded.weights as verification
from tests.integration_tests.test_embedded_server import TOKEN, Client, Trainer, body
from tests.patience import eventually
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.engines.embedded.server import EngineServer
from torchtitan.inference.serving.weight_digest import differing_parameters
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.weight_sync.memory.staging import StagedVersion


def run(checkpoint: Path, run_dir: Path, scenario: Any) -> None:
    async def inside() -> None:
        server = EngineServer(Engine(load_policy(checkpoint), 8, 400, ()), TOKEN, threads=1)
        port = await server.start("127.0.0.1", 0)
        # A bucket is a part of a matrix, so that its parameters are named.
        trainer = await asyncio.to_thread(Trainer, checkpoint, run_dir, bucket_bytes=1 << 12)
        try:
            async with Client(f"http://127.0.0.1:{port}") as client:
                assert (await client.call("POST", "/weights/connect", json=trainer.connect))[0] == 200
                await scenario(server, client, trainer)
        finally:
            await server.close()
            await asyncio.to_thread(trainer.publication.close)

    asyncio.run(inside())


@pytest.mark.parametrize("tied", [True, False])
def test_one_live_element_that_differs_evicts_the_actor_by_name(
    tied: bool, tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil: list[int] = []
    real = verification.Verifier.applied

    def applied(self: verification.Verifier, staged: StagedVersion) -> None:
        if staged.version in spoil:
            spoil.remove(staged.version)
            # In what the product is computed with, not in the parameter: the digest must read the same memory.
            fused = servers[0].engine.policy.model.layers[1].self_attn.fused
            queries = servers[0].engine.policy.model.layers[1].self_attn.q_proj.out_features
            weight = servers[0].engine.weights.live["model.layers.1.self_attn.k_proj.weight"]
            target = weight if fused is None else fused.weight[queries:]
            target[3, 5] += 0.25
        real(self, staged)

    monkeypatch.setattr(verification.Verifier, "applied", applied)
    servers: list[EngineServer] = []

    async def scenario(server: EngineServer, client: Client, trainer: Trainer) -> None:
        servers.append(server)
        await asyncio.to_thread(trainer.publish, 0)
        health = await client.until(lambda health: health["verified"]["version"] == 0)
        assert health["verifies"] and health["verified"]["matched"] == 1
        spoil.append(1)
        running = asyncio.create_task(client.call("POST", "/v1/generate", json=body(390, "long", n=8, top_k=120)))
        await client.until(lambda health: health["running"] == 8)
        await asyncio.to_thread(trainer.publish, 1)
        # What was being sampled with such weights is failed, and can be redone elsewhere.
        status, answer = await running
        assert status == 503 and "version 1 as it was sent: bucket " in answer["error"]
        assert "model.layers.1.self_attn.k_proj.weight" in answer["error"]

        def registry_log() -> str:
            return (tmp_path / "weight_sync" / "registry.jsonl").read_text()

        await eventually(lambda: '"poisoned"' in registry_log())
        (line,) = [line for line in registry_log().splitlines() if '"poisoned"' in line]
        assert "model.layers.1.self_attn.k_proj.weight" in line
        # The same version again, whole this time.
        health = await client.until(
            lambda health: health["verified"]["version"] == 1 and health["weights"]["state"] != "poisoned"
        )
        assert health["serves"] and health["verified"]["mismatched"] == 1
        assert (await client.call("POST", "/v1/generate", json=body()))[0] == 200

    run(tiny_checkpoint(tied=tied), tmp_path, scenario)


def test_generation_goes_on_during_the_look_and_the_next_version_waits_for_it(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that takes 0.6 s: no token is held back by it, and the version after it is not applied into it."""
    looks: list[tuple[int, int]] = []

    def slow(proof: Any, live: Any, staged: Any, stop: Callable[[], bool]) -> str:
        statistics = servers[0].engine.statistics
        before = statistics.versions_applied
        time.sleep(0.6)
        # By now the next version is there. The engine does not stand until this look is over: it samples on.
        tokens, deadline = statistics.generated_tokens, time.monotonic() + 2
        while statistics.generated_tokens == tokens and time.monotonic() < deadline:
            time.sleep(0.01)
        assert statistics.versions_applied == before
        looks.append((tokens, statistics.generated_tokens))
        return differing_parameters(proof, live, staged, stop)

    monkeypatch.setattr(verification, "differing_parameters", slow)
    servers: list[EngineServer] = []

    async def scenario(server: EngineServer, client: Client, trainer: Trainer) -> None:
        servers.append(server)
        running = [
            asyncio.create_task(client.call("POST", "/v1/generate", json=body(390, f"r{number}", n=8, top_k=120)))
            for number in range(12)
        ]
        await client.until(lambda health: health["running"] == 8)
        for version in range(3):
            await asyncio.to_thread(trainer.publish, version)
            # The next one is there, and ordered to be applied, while this one is looked at.
            await client.until(lambda health, version=version: health["version"] == version)
        await client.until(lambda health: health["verified"]["matched"] == 3 and health["verified"]["version"] == 2)
        await eventually(lambda: trainer.actor()["version"] == 2)
        assert trainer.actor()["evictions"] == 0
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert len(looks) == 3 and all(tokens < after for tokens, after in looks), looks
        assert server.verifier.status.mismatched == server.verifier.status.unfinished == 0

    run(tiny_checkpoint(), tmp_path, scenario)


def test_an_engine_that_never_holds_what_was_sent_ends(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "differing_parameters", lambda *_: "lm_head.weight")

    async def scenario(server: EngineServer, client: Client, trainer: Trainer) -> None:
        await asyncio.to_thread(trainer.publish, 0)
        await asyncio.wait_for(server.stopped.wait(), 30)
        assert server.verifier.status.mismatched_in_a_row == 3
        assert "lm_head.weight" in str(server.loop.failure)

    run(tiny_checkpoint(), tmp_path, scenario)
