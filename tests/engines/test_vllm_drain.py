"""Real vLLM that lets requests finish before new weights: up to 0.32 it has others wait, since 0.33 it answers 503."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.engines.job import APPLIED_SECONDS, PROMPT, Actor, start_actor, training
from tests.processes import Processes
from torchtitan.inference.actor_client import ActorNotReady
from torchtitan.inference.types import Completion

DRAIN_SECONDS = 40.0
ATTEMPTS = 5


def test_what_drains_keeps_its_version_and_says_that_it_takes_nothing(
    untied_actor: Actor,
    vllm_python: Path,
    engine_model: Callable[..., Path],
    processes: Processes,
    tmp_path: Path,
) -> None:
    model = engine_model(tied=False)
    drains = ("--update-mode", "drain", "--drain-timeout", str(DRAIN_SECONDS), "--update-timeout", "20")
    actor = start_actor(processes, "vllm", vllm_python, model, *drains, name="drains", beside=untied_actor)
    with training(tmp_path, model, apply_timeout_s=2 * DRAIN_SECONDS) as trainer:
        actor.connect(trainer)
        trainer.bring()

        def ask(answers: list[Completion], tokens: int = 240) -> None:
            answers += actor.generate(PROMPT, tokens, n=8, temperature=1.0, seed=3, stop_token_ids=[])

        for attempt in range(ATTEMPTS):
            old = actor.health()["version"]
            running: list[Completion] = []
            late: list[Completion] = []
            long = threading.Thread(target=ask, args=[running], daemon=True)
            long.start()
            time.sleep(0.5 * (1 + attempt))
            trainer.publish()
            deadline, reason, sent_away = time.monotonic() + APPLIED_SECONDS, "", 0
            while actor.health()["version"] == old and time.monotonic() < deadline:
                reason = actor.health()["reason"] or reason
                if reason and not late:
                    try:
                        ask(late, 40)
                    except ActorNotReady as error:
                        assert "Generation is paused" in str(error)
                        sent_away += 1
                        time.sleep(0.1)
            long.join(APPLIED_SECONDS)
            trainer.wait_applied()
            versions = [{span.version for span in completion.spans} for completion in running]
            # Nothing is ever of two versions, whenever it came.
            assert len(versions) == 8 and all(held in ({old}, {old + 1}) for held in versions)
            if reason and versions == [{old}] * 8:
                break  # otherwise some were over, or had not begun, when the version came
        print(f"vLLM {actor.health()['engine']['capabilities']['version']} sent {sent_away} requests away")
        assert reason == "running requests finish before new weights come" and actor.health()["serves"]
        assert versions == [{old}] * 8
        ask(late, 40)
    # What ran has one version, what came meanwhile the next; nothing was refused or lost.
    assert late and all({span.version for span in completion.spans} == {old + 1} for completion in late)
