"""A verifiers environment with a tool, unmodified, played through the gateway by verifiers' own environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.chat_models import END, QUESTION, SAID, TOOLS, make_chat_model, write_chat_tokenizer
from tests.gateways import make_config, playing
from tests.patience import PATIENCE_S, asynchronous
from tests.processes import ROOT
from torchtitan.inference.types import GenerateRequest
from torchtitan.rollout.environments.pool import AgentPool
from torchtitan.rollout.episodes import AgentPlayer
from torchtitan.rollout.tokenizer import ChatRenderer, Tokenizer
from torchtitan.rollout.types import Prompt
from torchtitan.utils.json_lines import EventLog

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


RENDERERS_FOLLOWING = """
import json, sys
from renderers import Qwen3RendererConfig, create_renderer
from renderers.base import load_tokenizer

renderer = create_renderer(load_tokenizer(sys.argv[1]), Qwen3RendererConfig())
held, said, conversations, tools = json.load(sys.stdin)
for messages in conversations:
    print(renderer.bridge_to_next_turn(held, said, messages, tools=tools).token_ids[len(held) + len(said) :])
"""


def test_messages_that_follow_are_what_renderers_writes(verifiers_python: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_chat_tokenizer(tmp_path / "model"))
    renderer = ChatRenderer(tokenizer)
    held = renderer.whole([{"role": "user", "content": QUESTION}], TOOLS)
    said = [*tokenizer.encode(SAID[0]), END]
    texts = ["sunny", "a\n\n b ", "é🙂", "", '{"x": 1}']
    tools_say = [[{"role": "tool", "content": text, "tool_call_id": "1"}] for text in texts]
    conversations = [*tools_say, [tools_say[0][0], tools_say[1][0]]]
    found = subprocess.run(
        [verifiers_python, "-c", RENDERERS_FOLLOWING, tmp_path / "model"],
        input=json.dumps([held, said, conversations, TOOLS]), capture_output=True, text=True, timeout=PATIENCE_S,
        check=True,
    )  # fmt: skip
    expected = [json.loads(line) for line in found.stdout.splitlines()]
    assert [renderer.following(held + said, messages, TOOLS) for messages in conversations] == expected
