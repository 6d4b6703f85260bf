"""The rollouts of one source: its prompts, the groups that are made of them, and its places in the next batches."""

from __future__ import annotations

import asyncio
import bisect
import heapq
import logging
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.config.reward_names import learns_from_rewards, reward_labels, reward_weights
from torchtitan.config.source_configs import source_name
from torchtitan.config.teachers import SUCCESS, hints_after_scoring, teacher_id
from torchtitan.errors import UserError, load_function
from torchtitan.inference.types import sampled_tokens
from torchtitan.rollout.data.prompt_stream import PromptStream
from torchtitan.rollout.data.source_scheduler import SourceScheduler
from torchtitan.rollout.flow.group_maker import GroupMaker
from torchtitan.rollout.flow.staleness_budget import StalenessBudget
from torchtitan.rollout.flow.statistics import RolloutStatistics, sample_version
from torchtitan.rollout.rewards.reward_pool import groups_until_broken
from torchtitan.rollout.types import Group, Prompt, Sample, Trajectory
from torchtitan.utils.json_lines import EventLog

# The fewest samples of a group that give an advantage.
SMALLEST_GROUP = 2
# Rewards that differ by less than this count as equal.
EQUAL_REWARDS = 1e-9
# A source has failed after this many batches' worth of its groups without any reward, one after the other.
BATCHES_WITHOUT_REWARD = 4
# After so many batches' worth of groups an event says that no completion has had a reward but 0 yet, and shows some;
# and another one, that none has had a hint.
BATCHES_OF_ZEROS = 2
SHOWN_COMPLETIONS = 3
SHOWN_CHARACTERS = 200


class SourceFlow:
    """One source of a RolloutFlow. All methods belong to its asyncio loop.

    Every position of the prompt stream is in exactly one state: not drawn yet, being generated, ready, or used up
    (handed out, or dropped because it is not usable).
    """

    def __init__(
        self,
        config: JobConfig,
        groups: GroupMaker,
        stream: PromptStream,
        scheduler: SourceScheduler,
        number: int,
        sources: int,
        events: EventLog | None,
    ):
        """config: the run's as it is for this source (source_configs), which is number `number` of its `sources`."""
        self.name = name = source_name(config)
        self.config, self.groups, self.stream = config, groups, stream
        self._number, self._sources = number, sources
        self.required = config.source[0].required if config.source else True
        self.in_flight: dict[int, asyncio.Task[None]] = {}
        self.ready: dict[int, Group] = {}
        self.resample: list[int] = []
        """Positions that must be generated again, as a heap"""
        # Actors that sleep during training cannot work ahead, and should have nothing unfinished when it begins.
        ahead = 0 if config.sleeps_between_batches else config.rollout.max_staleness
        share = scheduler.share(name)
        self.budget = StalenessBudget(
            scheduler.groups * share, ahead, quotas=lambda batches: scheduler.upcoming(name, batches)
        )
        self.seconds_without_group = 0.0
        """For so long the trainer has waited since a group could be trained on"""
        self._ended_well_at: float | None = None
        """When the latest group came with an episode that has not failed"""
        self._without_reward = self._only_failures = 0
        """Groups without any reward, and groups of failed episodes alone, one after the other"""
        self._events, self._answer = events, config.rewards.answer_column
        needs_rewards = learns_from_rewards(config) or (hints_after_scoring(config) and config.distill.hint == SUCCESS)
        self._zeros: list[tuple[Prompt, Trajectory]] | None = [] if needs_rewards else None
        """One sample of each group so far, while no reward but 0 has been seen"""
        self._without_hint: int | None = 0 if hints_after_scoring(config) else None
        """Groups so far, while no hint has been seen"""
        self.start_statistics(self.fresh_statistics())
        filter_name = config.grpo.group_filter
        self._keeps: Callable[[Group], Any] = load_function(filter_name, "grpo.group_filter") if filter_name else bool

    @property
    def has_enough(self) -> bool:
        """Whether there are as many groups as the next batch needs; earlier ones may still be missing."""
        return len(self.ready) >= self.budget.upcoming(1)[0]

    def fresh_statistics(self) -> RolloutStatistics:
        return RolloutStatistics(reward_labels(self.config))

    def start_statistics(self, of_run: RolloutStatistics) -> None:
        """Count anew, and from now on for all sources in `of_run` as well."""
        self.statistics = self.fresh_statistics()
        self._counted = [self.statistics, of_run]

    def wants(self) -> float | None:
        """Return the position in its order of the group that must be generated next; None if there are enough."""
        position = self.budget.position(self.resample[0] if self.resample else None, self.in_flight)
        return position if position < self.budget.wanted() else None

    def take_prompt(self) -> Prompt:
        """Return the prompt that must be generated next. Raises UserError if no prompt fits."""
        if self.resample:
            return self._named(self.stream.prompt_at(heapq.heappop(self.resample) // self._sources))
        return self._named(self.stream.next())

    def _named(self, prompt: Prompt) -> Prompt:
        """The prompt with an index that is unique in the run."""
        prompt.index = prompt.index * self._sources + self._number
        return prompt

    def count_sample(self, trajectory: Trajectory, reward: float | None, rewards: dict[str, float | None]) -> None:
        for statistics in self._counted:
            statistics.add_sample(trajectory, reward, rewards)

    def accept(self, group: Group, row: int, seconds: float) -> None:
        """Keep a scored group for the trainer, or drop and count it. row: its prompt's.

        Raises UserError for a source without rewards.
        """
        if self.stream.replaced(group.prompt_index // self._sources, row):
            for statistics in self._counted:
                statistics.groups.update(["scored"])
            heapq.heappush(self.resample, group.prompt_index)
            return
        drops = self.config.grpo.drop_zero_variance
        dropped = ""
        if len(group.samples) < SMALLEST_GROUP:
            dropped = "unscored"
        elif drops and has_no_advantage(group, self.config):
            dropped = "zero_variance"
        elif not self._keeps(group):
            dropped = "filtered"
        for statistics in self._counted:
            statistics.groups.update(filter(None, ("scored", dropped)))
            statistics.seconds.append(seconds)
        self._without_reward = 0 if group.samples else self._without_reward + 1
        if self._without_reward >= self._batches(BATCHES_WITHOUT_REWARD):
            raise UserError(
                f"the last {self._without_reward} groups got no reward at all; {self.groups.last_failure}: "
                "fix the reward functions ([rewards] functions, timeout_s, sandbox.memory_limit_mb, answer_column) "
                f"or the environment{self.groups.lost_rewards}"
            )
        self.budget.count(not dropped)
        if not dropped:
            for statistics in self._counted:
                statistics.usable_lengths += [sampled_tokens(sample.branches) for sample in group.samples]
            self.seconds_without_group = 0.0
        if len(group.samples) >= SMALLEST_GROUP:
            self.stream.note(group.prompt_index // self._sources, [sample.reward for sample in group.samples])
            self.add(group, not dropped)
            self.resample_stale(group.prompt_index)

    def add(self, group: Group, usable: bool = True) -> None:
        """Keep a finished group."""
        if usable:
            self.ready[group.prompt_index] = group
        # The staleness gate considers the stalest sample.
        self.budget.add(group.prompt_index, min(sample_version(sample.spans) for sample in group.samples), usable)

    def resample_stale(self, only: int | None = None) -> None:
        """Have finished groups sampled again that will be too stale in their turn; only: look at this one."""
        for index in self.budget.take_stale(self.config.rollout.max_staleness, only):
            heapq.heappush(self.resample, index)
            if index in self.ready:
                self._count_gate(self.ready.pop(index), admitted=False)

    def next_groups(self) -> list[int] | None:
        """Return the prompt indices of its part of the next batch; None if that is not complete."""
        return self.budget.batch([*self.in_flight, *self.resample])

    def next_batch(self, indices: list[int]) -> list[Group]:
        """Return these groups, which are its part of a batch."""
        groups = [self.ready.pop(index) for index in indices]
        for group in groups:
            self._count_gate(group, admitted=True)
        self.budget.consumed(indices)
        if indices:
            self.stream.consumed(indices[-1] // self._sources)
        self.seconds_without_group = 0.0
        return groups

    def skip(self, used: set[int]) -> None:
        """Take the groups of these prompts as used up, and have the earlier ones that are not finished done again."""
        for index in used & self.ready.keys():
            del self.ready[index]
            self.budget.remove([index])
        self.resample = sorted(set(self.resample) - used)
        while used and self.stream.position <= max(used) // self._sources:
            prompt = self._named(self.stream.next())
            if prompt.index not in used:
                bisect.insort(self.resample, prompt.index)

    def look_for_failures(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise UserError if all episodes of the last batches' worth of groups have failed: their environment does not
        work, and nothing is learned from it. What has worked before may only be away, such as a sandbox that restarts:
        it has rollout.data_timeout_s to come back."""
        if not trajectories:
            return
        now, limit_s = time.monotonic(), self.config.rollout.data_timeout_s
        if any(trajectory.failure is None for trajectory in trajectories):
            self._only_failures, self._ended_well_at = 0, now
            return
        self._only_failures += 1
        may_come_back = self._ended_well_at is not None and now - self._ended_well_at < limit_s
        if self._only_failures >= groups_until_broken(self.budget.groups_per_batch) and not may_come_back:
            raise UserError(
                f"every episode of the last {self._only_failures} groups failed; {self.groups.last_failure}: fix the "
                f"environment ([environment], logs/environments.log){self.groups.lost_rewards}"
            )

    def look_for_reward(self, prompt: Prompt, trajectories: Sequence[Trajectory], samples: Sequence[Sample]) -> None:
        """Write an event if the first batches' worth of groups has no reward but 0: nothing is learned from them."""
        if self._events is None or self._zeros is None or not samples:
            return
        if any(sample.reward for sample in samples):
            self._zeros = None
            return
        self._zeros.append((prompt, trajectories[0]))
        if (count := len(self._zeros)) < self._batches(BATCHES_OF_ZEROS):
            return
        shown = [
            {
                "prompt": str(prompt.text)[-SHOWN_CHARACTERS:],
                "completion": str(trajectory.completion)[:SHOWN_CHARACTERS],
                "finish_reason": trajectory.finish_reason,
                "answer": str(prompt.columns.get(self._answer))[-SHOWN_CHARACTERS:],
            }
            for prompt, trajectory in self._zeros[-SHOWN_COMPLETIONS:]
        ]
        self._zeros = None
        self._events.write(
            "no_reward_yet", level=logging.WARNING, **self.named, groups=count, completions=shown,
            look_at="is the answer in the form that the reward functions want, does rollout.max_completion_tokens cut "
            "it off (finish_reason length), are the tools called (environment/tool_calls; environment.tool_parser), is "
            "the task too hard for this model (docs/recipes.md)?",
        )  # fmt: skip

    def look_for_hint(self, samples: Sequence[Sample]) -> None:
        """Write an event if the first batches' worth of groups has no hint: nothing is learned from a teacher then."""
        if self._events is None or self._without_hint is None or not samples:
            return
        self._without_hint += 1
        if any(sample.is_hinted for sample in samples):
            self._without_hint = None
        elif self._without_hint >= self._batches(BATCHES_OF_ZEROS):
            self._events.write(
                "no_hint_yet", level=logging.WARNING, **self.named, groups=self._without_hint,
                hint=self.config.distill.hint,
                look_at="has any sample a reward of at least 1; does a reward function call log_extra('feedback', …), "
                "or has the environment an attribute feedback; do hints fit into training.seq_len (hint/too_long)?",
            )  # fmt: skip
            self._without_hint = None

    @property
    def named(self) -> dict[str, str]:
        """Its name as a field of events, if it has one."""
        return {"source": self.name} if self.name else {}

    def _batches(self, number: int) -> float:
        """So many batches' worth of its groups, at least `number`."""
        return number * max(self.budget.groups_per_batch, 1)

    def _count_gate(self, group: Group, admitted: bool) -> None:
        length = fmean([sampled_tokens(sample.branches) for sample in group.samples])
        for statistics in self._counted:
            statistics.add_gate(admitted, length > self.config.rollout.max_completion_tokens / 2)


def has_no_advantage(group: Group, config: JobConfig) -> bool:
    """Return whether every advantage of this group is zero, whatever else is in its batch, and no teacher has a hint.

    With reinforce_pp they are zero except for the token mean over the batch, so the group alone carries no signal.
    """
    advantage = config.grpo.advantage
    taught = config.job.stage == "distill" and teacher_id(config) is not None
    if hints_after_scoring(config):
        taught = any(sample.is_hinted for sample in group.samples)
        if not learns_from_rewards(config):
            return not taught
    if advantage in ("batch", "reinforce_pp_no_baseline") or ":" in advantage or taught:
        return False  # every sample gets a signal from the batch, the user's function or the teacher
    parts = [[sample.reward for sample in group.samples]]
    if config.grpo.advantage_level == "turn":
        turns = max(len(sample.returns) for sample in group.samples)
        parts = []
        for turn in range(turns):
            parts.append([sample.returns[turn] for sample in group.samples if turn < len(sample.returns)])
    if config.grpo.reward_aggregation == "normalize_each":
        parts = []
        for name, weight in reward_weights(config).items():
            if weight:
                rewards = [sample.rewards.get(name) for sample in group.samples]
                parts.append([reward for reward in rewards if reward is not None])
    return all(max(values) - min(values) < EQUAL_REWARDS for values in parts if values)
