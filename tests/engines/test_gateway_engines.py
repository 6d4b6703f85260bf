"""OpenAI's client against the gateway with vLLM and with SGLang behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat_models import END, SAID, make_chat_model
from tests.engines.job import START_SECONDS, differences
from tests.engines.models import FP32_TOLERANCE
from tests.gateways import make_config, play_with_tools, playing
from tests.patience import asynchronous
from torchtitan.config.job_config import JobConfig

pytest.importorskip("openai")


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_an_openai_client_plays_with_tools_on(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    python = request.getfixturevalue(f"{backend}_python")
    model = make_chat_model(tmp_path / "chat")
    config = make_config(
        model, backend=backend, engine_python=str(python), max_sequences=8, startup_timeout_s=START_SECONDS
    )
    asynchronous(play)(config, tmp_path / "run")


async def play(config: JobConfig, run_dir: Path) -> None:
    async with playing(config, run_dir, END) as behind:
        for stream in (False, True):
            door = await behind.open(f"tools-{stream}", temperature=0.0)
            messages = await play_with_tools(door, stream)
            assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
            assert messages[-1]["content"] == SAID[1]
            played = await behind.gateway.end(door.session)
            (branch,) = played.branches
            assert (played.calls, played.failed, played.cut) == (2, 0, False)
            expected = behind.trainer.log_probs(branch.token_ids)
            sampled = [value for one in branch.sampled for value in one.log_probs]
            # Tolerance of the engines' own tests, for a model whose log-probs are as large.
            assert differences(sampled, [expected[place - 1] for place in branch.sampled_at]) < 10 * FP32_TOLERANCE
            assert {(span.epoch, span.version) for one in branch.sampled for span in one.spans} == {
                (behind.trainer.epoch, 0)
            }
