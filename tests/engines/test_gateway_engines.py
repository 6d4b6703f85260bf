"""OpenAI's client against the gateway with vLLM and with SGLang behind it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chat_models import END, make_chat_model
from tests.engines import vllm_forking
from tests.engines.job import START_SECONDS, differences
from tests.engines.models import FP32_TOLERANCE
from tests.engines.plugins import install
from tests.gateways import make_config, play_both_ways, playing
from tests.patience import PATIENCE_S
from torchtitan.config.job_config import JobConfig

pytest.importorskip("openai")


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_an_openai_client_plays_with_tools_on(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = request.getfixturevalue(f"{backend}_python")
    path = install(tmp_path / "plugins", vllm_forking.GROUP, vllm_forking.FUNCTION)
    monkeypatch.setenv("PYTHONPATH", path)
    model = make_chat_model(tmp_path / "chat")
    config = make_config(model, backend=backend, max_sequences=8, startup_timeout_s=START_SECONDS)
    config.inference.engine.python = str(python)
    # The start of the engine has its own deadline, in `playing`.
    asyncio.run(asyncio.wait_for(play(config, tmp_path / "run"), START_SECONDS + 3 * PATIENCE_S))


async def play(config: JobConfig, run_dir: Path) -> None:
    async with playing(config, run_dir, END) as behind:
        async for branch in play_both_ways(behind):
            expected = behind.trainer.log_probs(branch.token_ids)
            sampled = [value for segment in branch.sampled for value in segment.log_probs]
            # Tolerance of the engines' own tests, for a model whose log-probs are as large.
            assert differences(sampled, [expected[place - 1] for place in branch.sampled_at]) < 10 * FP32_TOLERANCE
