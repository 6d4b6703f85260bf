"""What a real vLLM says of the tokens that it samples, held against the trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import Processes
from tests.runs import RUN_SECONDS, Run

pytestmark = [pytest.mark.timeout(2 * RUN_SECONDS), pytest.mark.usefixtures("vllm_python")]
# Every batch is sampled by the version that it trains.
BLOCKING = (
    "--training.global_batch_size", "64", "--eval.num_prompts", "0", "--grpo.async_weight_update", "false",
    "--rollout.max_staleness", "0", "--inference.max_sequences", "64", "--rollout.temperature", "0.6",
    # Random weights earn something by it.
    "--rewards.functions", "tests.unit_tests.rollout.reward_examples:share_of_digits",
)  # fmt: skip


def test_raw_log_probs_at_a_low_temperature_end_the_run_before_its_first_step_with_the_actors_name(
    engine_model: Callable[..., Path], processes: Processes, tmp_path: Path
) -> None:
    """Its weights are right. A server that does not report its mode is caught by what it samples (test_parity.py)."""
    run = Run(
        processes, "debug_cpu_vllm", engine_model(tied=False), tmp_path, *BLOCKING, "--training.steps", "6",
        "--inference.vllm.args.logprobs-mode", "raw_logprobs",
    )  # fmt: skip
    run.end(1)
    assert run.steps() == []
    (ended,) = run.events("run_ended")
    assert "no inference actor is left (actor-0: " in ended["reason"] and "raw_logprobs" in ended["reason"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_correct_server_is_never_blamed(
    dtype: str, engine_model: Callable[..., Path], processes: Processes, tmp_path: Path
) -> None:
    run = Run(
        processes, "debug_cpu_vllm", engine_model(tied=False), tmp_path, *BLOCKING, "--training.steps", "50",
        "--inference.dtype", dtype,
    )  # fmt: skip
    run.end()
    assert len(run.steps()) == 50 and all(row["mismatch_kl/nats"] is not None for row in run.steps())
    assert run.events("samples_probed") and run.events("weights_probed")
    assert not any(run.events(kind) for kind in ("log_probs_differ", "weights_differ", "answer_refused"))
