"""The hints that a teacher reads once the samples of a group are scored (SDPO, Hübotter et al. 2026, section 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.config.teachers import FEEDBACK, SUCCESS, SUCCESS_OR_FEEDBACK
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.rewards import PASSING_REWARD
from torchtitan.rollout.rewards.reward_pool import Score
from torchtitan.rollout.types import Prompt, Trajectory

# What a reward function logs with log_extra, or a public attribute of an environment.
FEEDBACK_NAME = "feedback"
# Where a hint may be one or the other, it says which it is.
HEADINGS = {SUCCESS: "Correct solution:\n\n", FEEDBACK: "Feedback on an earlier attempt:\n\n"}


class Hints:
    """Gives samples their hints: as distill.hint says, a success of the group, what was said of the sample, or both.

    A sample is no hint for itself, nor for one that an environment has opened differently. All others get the group's
    first success: so what the teacher reads of them begins alike, and is computed once. `statistics` counts the
    samples by what became of their hints.
    """

    def __init__(self, config: JobConfig, maker: PromptMaker):
        """config: with a distill.hint that follows from the scores."""
        self._kind, self._maker, self._longest = config.distill.hint, maker, config.training.seq_len
        self.statistics = Counter({"given": 0, "missing": 0, "too_long": 0})

    def give(self, prompt: Prompt, trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> None:
        """Let the teacher read the hint in each branch that begins with the prompt. A sample without one, or with one
        that does not fit into training.seq_len, stays as it is."""
        scored = [(trajectory, reward) for trajectory, (reward, _) in zip(trajectories, scores, strict=True)]
        successes = [trajectory for trajectory, reward in scored if reward is not None and reward >= PASSING_REWARD]
        for trajectory, reward in scored:
            if reward is None:
                continue
            hint = self._hint(trajectory, [success for success in successes if _solves_task_of(success, trajectory)])
            outcome = self._give(prompt, trajectory, hint) if hint else "missing"
            self.statistics[outcome] += 1

    def _hint(self, trajectory: Trajectory, successes: Sequence[Trajectory]) -> str:
        texts: dict[str, str] = {}
        if self._kind != FEEDBACK and successes:
            texts[SUCCESS] = answer_text(successes[0])
        if self._kind != SUCCESS and not texts.get(SUCCESS):
            texts[FEEDBACK] = feedback_text(trajectory)
        for kind, text in texts.items():
            if text:
                return HEADINGS[kind] + text if self._kind == SUCCESS_OR_FEEDBACK else text
        return ""

    def _give(self, prompt: Prompt, trajectory: Trajectory, hint: str) -> str:
        """Return what became of the hint."""
        read = trajectory.branches[0].segments[0].token_ids
        with_hint = self._maker.hinted(prompt, trajectory.opening, hint)
        given = False
        for branch in trajectory.branches:
            first = branch.segments[0].token_ids
            if first[: len(read)] != read or not branch.sampled:
                continue
            if len(with_hint) + len(branch) - len(read) <= self._longest:
                branch.sampled[0].hint_ids = with_hint + first[len(read) :]
                given = True
        return "given" if given else "too_long"


def _solves_task_of(success: Trajectory, other: Trajectory) -> bool:
    """Whether a success is another sample's hint: an environment may have begun it with something else."""
    return success is not other and success.opening == other.opening


def answer_text(trajectory: Trajectory) -> str:
    """The text of a success, without the thoughts of a single turn."""
    if trajectory.turn is not None and len(trajectory.branches) == len(trajectory.branches[0].sampled) == 1:
        return trajectory.turn.final_text.strip()
    completion: Any = trajectory.completion
    if isinstance(completion, str):
        return completion.strip()
    texts = [str(message.get("content") or "").strip() for message in completion]
    return "\n\n".join(filter(None, texts))


def feedback_text(trajectory: Trajectory) -> str:
    """What a reward function logged as feedback, or else the environment's attribute of that name."""
    found = trajectory.extra.get(FEEDBACK_NAME, trajectory.environment.get(FEEDBACK_NAME))
    return "" if found is None else str(found).strip()
