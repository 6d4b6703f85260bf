"""Hints that follow from the scores of a group (SDPO): who gets which, and what the teacher then reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.make_debug_checkpoint import EOS, write_tokenizer
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.types import Branch, Completion, Given, VersionSpan
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.flow.group_maker import make_sample
from torchtitan.rollout.flow.hints import Hints
from torchtitan.rollout.flow.journal import decode_batch, encode_batch
from torchtitan.rollout.flow.source_flow import has_no_advantage
from torchtitan.rollout.types import Batch, Group, Prompt, Trajectory


class World:
    """Prompts and samples of the symbols of arithmetic, each a token."""

    def __init__(self, folder: Path, hint: str, **distill: Any):
        write_tokenizer(folder)
        self.config = config = JobConfig()
        config.job.stage, config.distill.hint, config.training.seq_len = "distill", hint, 40
        config.rollout.max_completion_tokens = 8
        config.distill.hint_template = "{prompt}({hint})"
        vars(config.distill).update(distill)
        self.tokenizer = Tokenizer(str(folder))
        self.maker = PromptMaker(config, self.tokenizer)
        self.prompt = self.maker.make({"prompt": "1+2="}, 0)
        self.hints = Hints(config, self.maker)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def trajectory_of(self, text: str, begins: str = "1+2=", **parts: Any) -> Trajectory:
        """A trajectory of one turn, whose prompt an environment may have gone on with."""
        ids = self.encode(text)
        completion = Completion(ids, [-1.0] * len(ids), "stop", [VersionSpan("e", 0, 0, len(ids))])
        return Trajectory([Branch([Given(self.encode(begins)), completion])], "stop", text, **parts)

    def give(self, *scored: tuple[Trajectory, float | None]) -> list[str | None]:
        """What the teacher reads before each answer, None for the bare prompt."""
        trajectories = [trajectory for trajectory, _ in scored]
        self.hints.give(self.prompt, trajectories, [(reward, {}) for _, reward in scored])
        hints = [trajectory.branches[0].sampled[0].hint_ids for trajectory in trajectories]
        return [None if hint is None else self.tokenizer.decode(hint) for hint in hints]


def test_a_success_is_read_by_all_others_and_by_itself_another_one(tmp_path: Path) -> None:
    world = World(tmp_path, "success")
    found = world.give(
        (world.trajectory_of("4"), 0.9),
        (world.trajectory_of("3"), 1.0),
        (world.trajectory_of("03"), 1.1),
        (world.trajectory_of("5"), None),
    )
    assert found == ["1+2=(3)", "1+2=(03)", "1+2=(3)", None]
    assert dict(world.hints.statistics) == {"given": 3, "missing": 0, "too_long": 0}


def test_a_success_of_an_episode_that_began_otherwise_is_no_hint(tmp_path: Path) -> None:
    world = World(tmp_path, "success")
    begins = [world.trajectory_of("4", f"1+2={opening}", opening=opening) for opening in "789"]
    found = world.give(
        *((trajectory, 1.0) for trajectory in begins), (world.trajectory_of("5", "1+2=8", opening="8"), 0.0)
    )
    assert found == [None, None, None, "1+2=8(4)"]


def test_feedback_is_what_a_reward_logged_or_else_the_environments_attribute(tmp_path: Path) -> None:
    world = World(tmp_path, "feedback")
    found = world.give(
        (world.trajectory_of("4", extra={"feedback": "-1"}, environment={"feedback": "no"}), 0.0),
        (world.trajectory_of("5", environment={"feedback": 2}), 1.0),
        (world.trajectory_of("3", extra={"feedback": ""}), 1.0),
        (world.trajectory_of("6"), 0.0),
    )
    assert found == ["1+2=(-1)", "1+2=(2)", None, None]
    assert dict(world.hints.statistics) == {"given": 2, "missing": 2, "too_long": 0}


def test_both_take_feedback_only_where_no_other_sample_succeeded(tmp_path: Path) -> None:
    world = World(tmp_path, "success_or_feedback")
    world.config.training.seq_len = 100
    world.hints = Hints(world.config, world.maker)
    feedback: dict[str, Any] = {"extra": {"feedback": "7"}}
    failed, succeeded = world.trajectory_of("4", **feedback), world.trajectory_of("3", **feedback)
    world.give((failed, 0.0), (succeeded, 1.0))
    read = [trajectory.branches[0].sampled[0].hint_ids or [] for trajectory in (failed, succeeded)]
    # The tokenizer knows no letters: the headings are unknown tokens, and differ by their lengths.
    assert read == [
        world.encode("1+2=(Correct solution:\n\n3)"), world.encode("1+2=(Feedback on an earlier attempt:\n\n7)")
    ]  # fmt: skip


def test_a_hint_cannot_spell_special_tokens_and_stands_behind_what_the_environment_opened(tmp_path: Path) -> None:
    world = World(tmp_path, "feedback")
    trajectory = world.trajectory_of("4", begins="1+2=9", opening="9", extra={"feedback": "<eos>7"})
    world.give((trajectory, 0.0))
    hint = trajectory.branches[0].sampled[0].hint_ids
    assert hint is not None and EOS not in hint
    assert hint[:6] == world.encode("1+2=9(") and hint[-2:] == world.encode("7)")


def test_every_branch_that_goes_on_from_the_prompt_has_the_hint_and_no_other(tmp_path: Path) -> None:
    world = World(tmp_path, "feedback")
    trajectory = world.trajectory_of("4", extra={"feedback": "7"})
    later, rewritten = world.trajectory_of("5", begins="1+2=4-"), world.trajectory_of("6", begins="2+1=4-")
    trajectory.branches += later.branches + rewritten.branches
    world.give((trajectory, 0.0))
    read = [branch.sampled[0].hint_ids for branch in trajectory.branches]
    assert read == [world.encode("1+2=(7)"), world.encode("1+2=(7)4-"), None]


def test_a_hint_that_does_not_fit_into_the_sequence_is_left_out_and_counted(tmp_path: Path) -> None:
    world = World(tmp_path, "feedback")
    # 6 tokens around the hint, and one answered.
    fits, too_long = (
        world.trajectory_of("4", extra={"feedback": "7" * 33}),
        world.trajectory_of("4", extra={"feedback": "7" * 34}),
    )
    found = world.give((fits, 0.0), (too_long, 0.0))
    assert found == [f"1+2=({'7' * 33})", None]
    assert dict(world.hints.statistics) == {"given": 1, "missing": 0, "too_long": 1}


@pytest.mark.parametrize(
    ("add_rewards", "rewards", "hint", "expected"),
    [
        (False, (0.0, 1.0), "", True),
        (False, (0.0, 0.0), "7", False),
        (True, (0.0, 1.0), "", False),
        (True, (0.0, 0.0), "", True),
        (True, (0.0, 0.0), "7", False),
    ],
)
def test_a_group_teaches_nothing_without_a_hint_unless_rewards_do(
    tmp_path: Path, add_rewards: bool, rewards: tuple[float, float], hint: str, expected: bool
) -> None:
    world = World(tmp_path, "feedback", add_rewards=add_rewards)
    trajectories = [world.trajectory_of("4", extra={"feedback": hint}), world.trajectory_of("3")]
    world.give(*zip(trajectories, rewards, strict=True))
    samples = [make_sample(trajectory, reward, {}) for trajectory, reward in zip(trajectories, rewards, strict=True)]
    group = Group(0, samples)
    assert has_no_advantage(group, world.config) is expected
    # The journal has the hints, so a batch that is replayed is taught as the first time.
    kept = decode_batch(encode_batch(Batch(0, [group]))).samples
    assert [sample.is_hinted for sample in kept] == [sample.is_hinted for sample in samples] == [bool(hint), False]


def test_a_chat_gets_the_answer_without_thoughts_in_its_last_message(tmp_path: Path) -> None:
    from torchtitan.rollout.conversation.thoughts import Part, Turn

    world = World(tmp_path, "success")
    turn = Turn([Part("thought", "1 and 2", ""), Part("answer", "3", "")], True)
    success = world.trajectory_of("4", turn=turn)
    success.completion = [{"role": "assistant", "content": "<think>1 and 2</think>3"}]
    rendered: list[Any] = []
    world.maker._tokenise = lambda content, tools=(): rendered.append(content) or [1]  # type: ignore[method-assign,func-returns-value]
    prompt = Prompt(0, [{"role": "system", "content": "s"}, {"role": "user", "content": "1+2="}], [1], {})
    world.hints.give(prompt, [world.trajectory_of("4"), success], [(0.0, {}), (1.0, {})])
    assert rendered == [[{"role": "system", "content": "s"}, {"role": "user", "content": "1+2=(3)"}]]
