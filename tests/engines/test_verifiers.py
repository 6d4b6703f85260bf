"""A verifiers environment with a tool, unmodified, played through the gateway by verifiers' own environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat_models import END, make_chat_model
from tests.gateways import make_config, playing
from tests.patience import PATIENCE_S, asynchronous
from tests.processes import ROOT
from torchtitan.inference.types import GenerateRequest
from torchtitan.rollout.agents.player import AgentPlayer
from torchtitan.rollout.agents.pool import AgentPool
from torchtitan.rollout.tokenizer import Tokenizer
from torchtitan.rollout.types import Prompt
from torchtitan.utils.events import EventLog

EXAMPLES = ROOT / "examples" / "verifiers"
EPISODES = 3


def test_its_episodes_are_recorded_as_they_were_sampled(
    verifiers_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{EXAMPLES}")
    asynchronous(play)(verifiers_python, make_chat_model(tmp_path / "model", taught=False), tmp_path / "run")


async def play(python: Path, model: Path, run_dir: Path) -> None:
    config = make_config(model, startup_timeout_s=PATIENCE_S)
    config.rollout.max_completion_tokens = 16
    environment = config.environment
    environment.verifiers, environment.verifiers_python = "weather_env", str(python)
    environment.verifiers_renderer, environment.memory_limit_mb = "qwen3", 8192
    async with playing(config, run_dir, END) as behind:
        agents = AgentPool(config, EventLog(run_dir / "events.jsonl"), run_dir / "agents.log")
        await agents.start()
        try:
            player = AgentPlayer(config, behind.gateway, agents, Tokenizer(model))
            behind.sampling.n = EPISODES
            request = GenerateRequest("verifiers", [], behind.sampling)
            played = await player.play(Prompt(1, "", [1], {}), request, 0)
        finally:
            await agents.close()
        assert len(played) == EPISODES and not behind.events("environment_failed")
    tokenizer = Tokenizer(model)
    for one in played:
        (branch,) = one.branches
        asked = tokenizer.decode(branch.segments[0].token_ids, skip_special=False)
        # The second of its tasks, and its tool, as verifiers' renderer writes them.
        assert '"name": "weather"' in asked
        assert asked.endswith("<|im_start|>user\nWeather in Oslo?<|im_end|>\n<|im_start|>assistant\n")
        # This policy has learned nothing.
        assert one.reward == 0.0
        assert {(span.epoch, span.version) for turn in branch.sampled for span in turn.spans} == {
            (behind.trainer.epoch, 0)
        }
    assert len({tuple(one.branches[0].token_ids) for one in played}) == EPISODES
