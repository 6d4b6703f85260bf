"""Programs with a loop of their own as environments: played through the gateway, judged, and trained on."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chat_models import END, make_chat_model
from tests.gateways import Behind, make_config, playing
from tests.patience import PATIENCE_S, asynchronous, eventually
from tests.processes import Processes
from tests.runs import RUN_SECONDS, Run
from torchtitan.inference.types import GenerateRequest, sampled_segments
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.environments.environment_pool import AgentPool
from torchtitan.rollout.flow.episodes import AgentPlayer
from torchtitan.rollout.flow.journal import ReplaySource
from torchtitan.rollout.types import Failure, Prompt, Trajectory
from torchtitan.utils.json_lines import EventLog

pytest.importorskip("openai")
HERE = "tests.agent_examples"
PROMPT = Prompt(3, "Say something", [1], {"answer": "x"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("models") / "chat", taught=False)


async def play(behind: Behind, agent: str, episodes: int) -> tuple[AgentPlayer, list[Trajectory]]:
    """A group of one agent."""
    config = behind.config
    config.environment.agent = agent
    pool = AgentPool(config, EventLog(behind.run_dir / "events.jsonl"), behind.run_dir / "agents.log")
    await pool.start()
    try:
        player = AgentPlayer(config, behind.gateway, pool, Tokenizer(config.model.hf_assets_path))
        sampling = behind.sampling
        sampling.n = episodes
        return player, await player.play(PROMPT, GenerateRequest(f"g-{agent.split(':')[-1][:9]}", [], sampling), 0)
    finally:
        await pool.close()


@asynchronous
async def test_agents_good_and_bad(model: Path, tmp_path: Path) -> None:
    config = make_config(model)
    config.environment.max_retries = 1
    config.environment.episode_timeout_s = PATIENCE_S
    config.environment.num_workers = 1
    async with playing(config, tmp_path / "run", END) as behind:
        player, played = await play(behind, f"{HERE}:play", 6)
        assert len(played) == 6 and player.statistics["turns"] == 12
        for trajectory in played:
            (branch,) = trajectory.branches
            texts = [Tokenizer(model).decode(turn.token_ids) for turn in branch.sampled]
            assert trajectory.reward == sum(text.count("e") for text in texts) / 10
            assert trajectory.completion == "\n".join(texts)
            assert all(len(turn.token_ids) <= 12 for turn in sampled_segments(trajectory.branches))
        # As a redone group would be, and no two episodes of one are alike.
        again = (await play(behind, f"{HERE}:play", 6))[1]
        assert [sample.branches[0].token_ids for sample in again] == [sample.branches[0].token_ids for sample in played]
        assert len({tuple(trajectory.branches[0].token_ids) for trajectory in played}) == 6

        _, played = await play(behind, f"{sys.executable} -m {HERE}", 2)
        assert [trajectory.reward for trajectory in played] == [0.25, 0.25]
        _, played = await play(behind, f"{HERE}:shouts", 2)
        assert len(played) == 2 and behind.events("environment_output_cut")

        for name, reason, failure in (
            ("raises", "ValueError: no idea", Failure.OWN_TURN),
            ("nonsense", "must be a finite number", Failure.OWN_TURN),
            ("silent", None, Failure.NOT_BEGUN),
        ):
            player, played = await play(behind, f"{HERE}:{name}", 2)
            assert [trajectory.failure for trajectory in played] == [failure] * 2, name
            if reason:
                assert any(reason in event["reason"] for event in behind.events("environment_failed")), name
        # An agent that hangs has asked before, also where its process starts slowly.
        config.environment.episode_timeout_s = 3.0
        for name, failure in (("hangs", Failure.LOST), ("hangs_in_a_loop", Failure.NOT_BEGUN)):
            player, played = await play(behind, f"{HERE}:{name}", 1)
            assert [trajectory.failure for trajectory in played] == [failure] and sum(
                component.statistics["timeouts"] for component in player.counting
            ) == 2, name

        # What goes on after its end is refused and told once.
        config.environment.episode_timeout_s = PATIENCE_S
        config.environment.agent = f"{HERE}:goes_on"
        pool = AgentPool(config, EventLog(tmp_path / "other.jsonl"))
        await pool.start()
        player = AgentPlayer(config, behind.gateway, pool, Tokenizer(model))
        behind.sampling.n = 1
        (trajectory,) = await player.play(PROMPT, GenerateRequest("late", [], behind.sampling), 0)
        await eventually(lambda: behind.events("call_after_end"))
        await asyncio.sleep(0.7)
        await pool.close()
        assert trajectory.reward is not None and len(behind.events("call_after_end")) == 1


@pytest.mark.timeout(RUN_SECONDS)
def test_a_run_trains_on_what_an_agent_played(model: Path, processes: Processes, tmp_path: Path) -> None:
    options: list[Any] = [
        "--environment.agent", f"{HERE}:play", "--environment.num_workers", "1",
        "--rewards.functions", "--training.steps", "3", "--training.global_batch_size", "16",
        "--training.seq_len", "256", "--grpo.group_size", "4", "--grpo.drop_zero_variance", "false",
        "--rollout.max_completion_tokens", "12", "--inference.num_actors", "1",
        "--eval.num_prompts", "2", "--eval.samples_per_prompt", "2",
    ]  # fmt: skip
    run = Run(processes, "debug_cpu", model, tmp_path, *options)
    run.end()
    steps = run.steps()
    assert len(steps) == 3, run.log()[-3000:]
    assert all(step["environment/turns_mean"] == 2.0 and step["environment/episodes_lost"] == 0 for step in steps)
    # The engine's log-probs are the trainer's, turn by turn.
    same = [step["mismatch_kl/same_version"] for step in steps if step["mismatch_kl/same_version"] is not None]
    assert same and max(same) < 1e-6
    recorded = ReplaySource(run.folder)
    for sample in (sample for version in recorded.versions for sample in recorded.next_batch(version).samples):
        (branch,) = sample.branches
        assert len(branch.sampled) == 2 and sample.rewards.keys() == {"agent"}
