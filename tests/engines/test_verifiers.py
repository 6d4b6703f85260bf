"""A verifiers environment with a tool, unmodified, played through the gateway by verifiers' own environment."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chat_models import END, QUESTION, SAID, TOOLS, make_chat_model, write_chat_tokenizer
from tests.gateways import make_config, playing
from tests.patience import PATIENCE_S, asynchronous
from tests.processes import ROOT
from torchtitan.inference.types import GenerateRequest
from torchtitan.rollout.conversation.tokenizer import ChatRenderer, Tokenizer
from torchtitan.rollout.environments.environment_pool import AgentPool
from torchtitan.rollout.flow.episodes import AgentPlayer
from torchtitan.rollout.types import Prompt, Trajectory
from torchtitan.utils.json_lines import EventLog

EXAMPLES = ROOT / "examples" / "verifiers"
EPISODES = 3


# In place of docker's command line: notes what it is asked for, and does what verifiers needs of it on this machine.
DOCKER = """#!{python}
import json, subprocess, sys

words = sys.argv[1:]
with open({record!r}, "a") as file:
    print(json.dumps(words), file=file)
if words[0] == "run" and "--detach" in words:
    print("0123456789abcdef")
elif words[0] == "run":
    folder = words[words.index("--volume") + 1].partition(":")[0]
    sys.exit(subprocess.call([sys.executable, "-c", words[-1].replace("/run/vf", folder)]))
elif words[0] == "inspect":
    print(json.dumps({{"Env": [], "User": ""}}))
elif words[0] == "port":
    print("127.0.0.1:9")
"""


def test_its_episodes_are_recorded_as_they_were_sampled(
    verifiers_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both runtimes; the options of docker's reach its command line, and its containers do not stay."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{EXAMPLES}")
    docker, record = tmp_path / "bin" / "docker", tmp_path / "docker.jsonl"
    docker.parent.mkdir()
    docker.write_text(DOCKER.format(python=sys.executable, record=str(record)))
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    asynchronous(play)(verifiers_python, make_chat_model(tmp_path / "model", taught=False), tmp_path / "run")
    asked = [json.loads(line) for line in record.read_text().splitlines()]
    began = [words for words in asked if words[0] == "run" and "--detach" in words]
    names = {words[words.index("--name") + 1] for words in began}
    assert len(names) == EPISODES
    for words in began:
        assert words[words.index("--memory") + 1] == "2.0g" and "some/image:1" in words
    assert {words[-1] for words in asked if words[0] == "rm"} == names


async def play(python: Path, model: Path, run_dir: Path) -> None:
    config = make_config(model, startup_timeout_s=PATIENCE_S)
    config.rollout.max_completion_tokens = 16
    environment = config.environment
    environment.verifiers.id, environment.verifiers.python = "weather_env", str(python)
    environment.verifiers.renderer, environment.sandbox.memory_limit_mb = "qwen3", 8192
    async with playing(config, run_dir, END) as behind:
        behind.sampling.n = EPISODES

        async def group(runtime: str, options: dict[str, Any]) -> list[Trajectory]:
            settings = copy.deepcopy(config)
            settings.environment.verifiers.runtime = {"type": runtime, **options}
            settings.environment.sandbox.isolate = "auto" if runtime == "subprocess" else False
            agents = AgentPool(settings, EventLog(run_dir / "events.jsonl"), run_dir / f"{runtime}.log")
            await agents.start()
            try:
                player = AgentPlayer(settings, behind.gateway, agents, Tokenizer(model))
                return await player.play(Prompt(1, "", [1], {}), GenerateRequest(runtime, [], behind.sampling), 0)
            finally:
                await agents.close()

        groups = await asyncio.gather(
            group("subprocess", {}), group("docker", {"image": "some/image:1", "memory": 2.0})
        )
        assert not behind.events("environment_failed")
    tokenizer = Tokenizer(model)
    for played in groups:
        assert len({tuple(trajectory.branches[0].token_ids) for trajectory in played}) == len(played) == EPISODES
    for trajectory in (episode for played in groups for episode in played):
        (branch,) = trajectory.branches
        asked = tokenizer.decode(branch.segments[0].token_ids, skip_special=False)
        # The second of its tasks, and its tool, as verifiers' renderer writes them.
        assert '"name": "weather"' in asked
        assert asked.endswith("<|im_start|>user\nWeather in Oslo?<|im_end|>\n<|im_start|>assistant\n")
        # This policy has learned nothing.
        assert trajectory.reward == 0.0
        assert {(span.epoch, span.version) for turn in branch.sampled for span in turn.spans} == {
            (behind.trainer.epoch, 0)
        }


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
    held = renderer.render_prompt([{"role": "user", "content": QUESTION}], TOOLS)
    reply = [*tokenizer.encode(SAID[0]), END]
    texts = ["sunny", "a\n\n b ", "é🙂", "", '{"x": 1}']
    tools_say = [[{"role": "tool", "content": text, "tool_call_id": "1"}] for text in texts]
    conversations = [*tools_say, [tools_say[0][0], tools_say[1][0]]]
    found = subprocess.run(
        [verifiers_python, "-c", RENDERERS_FOLLOWING, tmp_path / "model"],
        input=json.dumps([held, reply, conversations, TOOLS]), capture_output=True, text=True, timeout=PATIENCE_S,
        check=True,
    )  # fmt: skip
    expected = [json.loads(line) for line in found.stdout.splitlines()]
    assert [renderer.following(held + reply, messages, TOOLS) for messages in conversations] == expected
