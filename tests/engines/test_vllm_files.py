"""Real vLLM without our weight-transfer backend: the agent stages, and hands versions over as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.engines.processes import Processes
from tests.engines.test_vllm import check_serves_newest
from tests.engines.vllm_job import start_actor, training


def test_versions_by_files(
    vllm_python: Path, engine_model: Callable[..., Path], processes: Processes, tmp_path: Path
) -> None:
    # Tied: what computes the logits is a packed copy of the embedding here.
    model = engine_model(tied=True)
    actor = start_actor(processes, vllm_python, model, "--route", "agent", name="by-files")
    assert actor.health()["status"] == "not_ready"
    with training(tmp_path, model, apply_timeout_s=30.0) as trainer:
        actor.connect(trainer)
        for _ in range(3):
            trainer.publish()
            trainer.wait_applied()
            check_serves_newest(actor, trainer)
        assert actor.health()["engine"]["capabilities"]["route"] == "agent"
    assert not list(Path("/dev/shm").glob("torchtitan-*/version"))
