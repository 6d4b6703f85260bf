"""Whole training runs with a vLLM server: pool, agent, engine."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.make_debug_checkpoint import write_tokenizer
from tests.engines.job import ONE_PROCESS, TOKEN, Actor, holding_weights
from tests.engines.models import VOCABULARY
from tests.processes import Processes
from tests.runs import RUN_SECONDS, Run
from tests.unit_tests.models.test_transformers_policy import make_foreign
from torchtitan.inference.actor_client import TOKEN_VARIABLE

pytestmark = pytest.mark.timeout(2 * RUN_SECONDS)
STEPS, KILL_AT = 5, 1


def check_same_weights(steps: list[dict[str, Any]]) -> None:
    """What the engine sampled of the policy's own version is what the trainer computes. A step may hold none of it."""
    mismatches = [row["mismatch_kl/same_version"] for row in steps if row.get("mismatch_kl/same_version") is not None]
    assert mismatches
    assert max(mismatches) < 1e-6


def test_a_trainer_that_waits_for_a_running_server(
    untied_actor: Actor, engine_model: Callable[..., Path], processes: Processes, tmp_path: Path
) -> None:
    """After every step the server has its version, and samples what the trainer itself would sample."""
    run = Run(
        processes, "debug_cpu_vllm", engine_model(tied=False), tmp_path,
        "--training.steps", "6", "--training.global_batch_size", "64", "--eval.num_prompts", "0",
        "--grpo.async_weight_update", "false", "--inference.servers", untied_actor.url,
        # Random weights earn something by it.
        "--rewards.functions", "tests.unit_tests.rollout.reward_examples:share_of_digits",
        **{TOKEN_VARIABLE: TOKEN},
    )  # fmt: skip
    run.end()
    assert [row["step"] for row in run.steps()] == [1, 2, 3, 4, 5, 6]
    for row in run.steps():
        assert row["weight_sync/actor-0/version"] == row["step"]
        assert row["grad_norm"] > 0, "no version would differ from the one before"
    check_same_weights(run.steps())
    assert untied_actor.health()["serves"]


@pytest.mark.usefixtures("vllm_python")
def test_gpt_oss_of_transformers_trains_with_vllm_though_the_engine_is_killed(
    processes: Processes, tmp_path: Path
) -> None:
    """With layers of transformers. vLLM's own reload would leave its stacks of experts and its sinks what they were."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 128, "head_dim": 32, "intermediate_size": 64}
    model = make_foreign("gpt_oss", tmp_path / "model", bos_token_id=None, **shape)
    write_tokenizer(model)
    run = Run(
        processes, "debug_cpu_vllm", model, tmp_path,
        "--model.implementation", "transformers",
        "--training.steps", str(STEPS), "--training.global_batch_size", "64", "--eval.num_prompts", "0",
        "--inference.max_sequences", "64",
        "--rewards.functions", "tests.unit_tests.rollout.reward_examples:share_of_digits",
        f"--inference.vllm.args.{ONE_PROCESS[0].removeprefix('--')}", ONE_PROCESS[1],
    )  # fmt: skip
    run.wait(lambda: len(run.steps()) >= KILL_AT)
    (worker,) = holding_weights(run.process)
    worker.send_signal(signal.SIGKILL)
    run.end()
    steps = run.steps()
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(row["grad_norm"] > 0 for row in steps)
    assert max(row["staleness/max"] for row in steps) <= 1
    # Rounding may give a token another expert now and then.
    steps.remove(max(steps, key=lambda row: row.get("mismatch_kl/same_version") or 0.0))
    check_same_weights(steps)
    assert len(run.events("actor_restarting")) == 1
    assert not run.events("weights_differ") and run.events("weights_probed")
