"""The flow of rollouts in the background loop: prompts go to the actors, and scored groups wait for the trainer."""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from torchtitan.config.derived import (
    global_batch_size,
    learns_from_rewards,
    reward_labels,
    reward_weights,
    sleeps_between_batches,
)
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError, load_function
from torchtitan.inference.types import VersionSpan, sampled_segments
from torchtitan.rollout.group_maker import GroupMaker, make_sample
from torchtitan.rollout.journal import Journal, ReplaySource, batch_from_json, batch_to_json
from torchtitan.rollout.prompts import PromptStream
from torchtitan.rollout.staleness_budget import StalenessBudget
from torchtitan.rollout.types import Batch, Group, Prompt, Sample, Trajectory
from torchtitan.utils.json_lines import EventLog

logger = logging.getLogger(__name__)

# The fewest samples of a group that give an advantage.
SMALLEST_GROUP = 2
# Rewards that differ by less than this count as equal.
EQUAL_REWARDS = 1e-9
# The run stops after this many batches' worth of consecutive groups without any reward.
BATCHES_WITHOUT_REWARD = 4
# After so many batches' worth of groups an event says that no completion has had a reward but 0 yet, and shows some.
BATCHES_OF_ZEROS = 2
SHOWN_COMPLETIONS = 3
SHOWN_CHARACTERS = 200


def sample_version(spans: Sequence[VersionSpan]) -> int:
    """Return the version of a sample's oldest token. Raises ValueError for a sample without tokens."""
    return min(span.version for span in spans if span.end > span.start)


@dataclass
class RolloutStatistics:
    """Statistics since the last batch. Rewards and lengths include groups that were dropped for equal rewards, so that
    they describe the policy rather than the selection of groups."""

    max_completion_tokens: int
    labels: dict[str, str]
    """What curves call each reward"""
    rewards: list[float] = field(default_factory=list)
    per_function: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    turns: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    usable_lengths: list[int] = field(default_factory=list)
    truncated: int = 0
    groups_scored: int = 0
    groups_zero_variance: int = 0
    groups_filtered: int = 0
    groups_unscored: int = 0
    samples_unscored: int = 0
    admitted: list[bool] = field(default_factory=list)
    admitted_long: list[bool] = field(default_factory=list)

    def add_sample(self, trajectory: Trajectory, reward: float | None, rewards: dict[str, float | None]) -> None:
        turns = sampled_segments(trajectory.branches)
        self.turns.append(len(turns))
        self.lengths.append(sum(len(turn.token_ids) for turn in turns))
        self.truncated += trajectory.finish_reason == "length"
        if reward is None:
            self.samples_unscored += 1
            return
        self.rewards.append(reward)
        for name, value in rewards.items():
            if value is not None:
                self.per_function[name].append(value)

    def add_gate(self, group: Group, admitted: bool) -> None:
        """Record whether the staleness gate admitted a group."""
        self.admitted.append(admitted)
        if fmean([len(sample.completion_ids) for sample in group.samples]) > self.max_completion_tokens / 2:
            self.admitted_long.append(admitted)

    def figures(self, version: int, samples: Sequence[Sample]) -> dict[str, float]:
        """Return all metrics for a batch of `samples` that is handed out at `version`."""
        trained = [len(sample.completion_ids) for sample in samples]
        rewards = self.rewards or [sample.reward for sample in samples]
        lengths = self.lengths or trained
        truncated = self.truncated if self.lengths else sum(sample.finish_reason == "length" for sample in samples)
        staleness = [version - sample_version(sample.spans) for sample in samples]
        figures = {
            "reward/mean": fmean(rewards),
            "reward/std": pstdev(rewards),
            "completion/length_mean": fmean(lengths),
            "completion/length_max": float(max(lengths)),
            "completion/length_trained_mean": fmean(trained),
            "completion/length_usable_mean": fmean(self.usable_lengths or trained),
            "completion/truncated_fraction": truncated / len(lengths),
            "staleness/mean": fmean(staleness),
            "staleness/max": float(max(staleness)),
            "groups/scored": float(self.groups_scored),
            "groups/zero_variance_fraction": self.groups_zero_variance / max(1, self.groups_scored),
            "groups/filtered_fraction": self.groups_filtered / max(1, self.groups_scored),
            "groups/unscored": float(self.groups_unscored),
            "rollout/samples_unscored": float(self.samples_unscored),
            "rollout/groups_stale": float(self.admitted.count(False)),
            "rollout/admission_rate": fmean(self.admitted) if self.admitted else 1.0,
            "rollout/mixed_version_fraction": fmean([len(sample.spans) > 1 for sample in samples]),
        }
        turns = self.turns or [len(sampled_segments(sample.branches)) for sample in samples]
        if max(turns) > 1:
            figures["environment/turns_mean"] = fmean(turns)
        if self.admitted_long:
            figures["rollout/admission_rate_long"] = fmean(self.admitted_long)
        for name, values in sorted(self.per_function.items()):
            label = self.labels.get(name, name)
            figures[f"reward/{label}/mean"] = fmean(values)
            figures[f"reward/{label}/std"] = pstdev(values)
        return figures


class RolloutFlow:
    """Keeps the actors busy and hands out batches. All methods belong to one asyncio loop.

    Every position of the prompt stream is in exactly one state: not drawn yet, being generated, ready, or used up
    (handed out, or dropped because it is not usable). A saved state has the first three, so a resume neither loses nor
    repeats one.
    """

    def __init__(
        self,
        config: JobConfig,
        groups: GroupMaker,
        stream: PromptStream,
        journal: Journal | None,
        ranks: int,
        events: EventLog | None = None,
    ):
        self._config = config
        self._groups = groups
        self._stream = stream
        self._journal = journal
        self._batch_groups = global_batch_size(config, ranks) // config.grpo.group_size
        # Actors that sleep during training cannot work ahead, and should have nothing unfinished when it begins.
        ahead = 0 if sleeps_between_batches(config) else config.rollout.max_staleness
        self._budget = StalenessBudget(self._batch_groups, ahead, config.rollout.max_groups_in_flight)
        self._running = False
        self._in_flight: dict[int, asyncio.Task[None]] = {}
        self._ready: dict[int, Group] = {}
        self._redo: list[int] = []
        self._without_reward = 0
        self._events, self._answer = events, config.rewards.answer_column
        self._zeros: list[tuple[Prompt, Trajectory]] | None = [] if learns_from_rewards(config) else None
        """One sample of each group so far, while no reward but 0 has been seen"""
        self._kept: ReplaySource | None = None
        """Recorded batches to train on again"""
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._no_completion_s = self._no_group_s = 0.0
        self._progress = 0
        self._enough_since: float | None = None
        """When enough groups for the next batch were ready; since then it waits only for earlier ones"""
        self._statistics = self._fresh_statistics()
        name = config.grpo.group_filter
        self._keeps: Callable[[Group], Any] = load_function(name, "grpo.group_filter") if name else lambda group: True

    def set_version(self, version: int) -> None:
        """Set the trainer's version and generate for its batch and later ones. The first call starts the generation."""
        # Groups sampled earlier would be too old once the kept batches have been trained on.
        last_kept = self._kept.versions[-1] if self._kept is not None else -1
        self._running = version + self._config.rollout.max_staleness > last_kept
        self._budget.version, self._budget.handed_out = version, version <= last_kept
        self._groups.rewards.set_step(version)
        self._redo_stale()
        self._fill()

    async def next_batch(self, version: int, timeout_s: float) -> Batch | None:
        """Return the batch to train on at `version`; None if it is not complete within `timeout_s`.

        Raises:
            UserError: no data arrived for rollout.data_timeout_s, or generation or scoring cannot continue.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if self._failure is not None:
                raise self._failure
            if version != self._budget.version:
                raise ValueError(
                    f"a batch for version {version} was asked for, the trainer's is {self._budget.version}"
                )
            if self._kept is not None and version in self._kept.versions:
                return self._kept.next_batch(version)
            started = time.monotonic()
            if len(self._ready) >= self._batch_groups:
                self._enough_since = self._enough_since or started
                batch = self._budget.batch([*self._in_flight, *self._redo])
                if batch is not None:
                    return self._hand_out(version, batch, started - self._enough_since)
            if started >= deadline:
                return None
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - started)
            except asyncio.TimeoutError:
                self._count_wait(time.monotonic() - started)
                return None
            self._count_wait(time.monotonic() - started)

    def export_state(self) -> bytes:
        """Return the prompt position, the prompts in flight and the finished groups."""
        state = {
            "stream": self._stream.state_dict(),
            "unfinished": sorted([*self._in_flight, *self._redo]),
            "ready": batch_to_json(Batch(self._budget.version, [self._ready[index] for index in sorted(self._ready)])),
        }
        return json.dumps(state).encode()

    def restore_state(self, data: bytes) -> None:
        """Continue from an exported state; call it before set_version(). The staleness gate applies to its groups.

        Raises:
            UserError: the training prompts are not those of the state, or the state is from job.stage = sft.
        """
        if not data:
            return
        state = json.loads(data)
        if "unfinished" not in state:
            raise UserError(
                "the checkpoint is one of job.stage = sft: start a new run with its export as model.hf_assets_path"
            )
        self._stream.load_state_dict(state["stream"])
        self._redo = sorted(state["unfinished"])
        for group in batch_from_json(state["ready"]).groups:
            self._add(group)
        logger.info("restored %d finished groups; %d unfinished are redone", len(self._ready), len(self._redo))

    def train_again(self, kept: ReplaySource) -> int:
        """Hand out these batches before any new one; call it after restore_state() and before set_version().

        Returns how many other groups were ready when the last of them was recorded; these are generated again.
        """
        if not kept.versions:
            return 0
        self._kept = kept
        batches = [kept.read_batch(version) for version in kept.versions]
        used = {group.prompt_index for batch in batches for group in batch.groups}
        for index in used & self._ready.keys():
            del self._ready[index]
            self._budget.remove([index])
        self._redo = sorted(set(self._redo) - used)
        while self._stream.position <= max(used):
            prompt = self._stream.next()
            if prompt.index not in used:
                heapq.heappush(self._redo, prompt.index)
        return int(batches[-1].statistics.get("rollout/groups_ready", 0))

    async def close(self) -> None:
        self._running = False
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fresh_statistics(self) -> RolloutStatistics:
        return RolloutStatistics(self._config.rollout.max_completion_tokens, reward_labels(self._config))

    def _fill(self) -> None:
        """Send out prompts for as many groups as can be used, starting with those that must be done again."""
        while self._running and self._failure is None:
            position = self._budget.position(self._redo[0] if self._redo else None, self._in_flight)
            if position >= self._budget.wanted():
                return
            try:
                prompt = self._take_prompt()
            except UserError as error:
                self._fail(error)
                return
            min_version = self._budget.oldest_useful_version(position)
            self._in_flight[prompt.index] = asyncio.create_task(self._make_group(prompt, min_version))

    def _take_prompt(self) -> Prompt:
        if self._redo:
            return self._stream.prompt_at(heapq.heappop(self._redo))
        return self._stream.next()

    async def _make_group(self, prompt: Prompt, min_version: int) -> None:
        try:
            trajectories = await self._groups.sample(prompt, self._groups.request(prompt), min_version)
            await self._groups.teach(trajectories)
            scores = await self._groups.score(prompt, trajectories)
            samples = []
            for trajectory, (reward, rewards) in zip(trajectories, scores, strict=True):
                self._statistics.add_sample(trajectory, reward, rewards)
                if reward is not None:
                    samples.append(make_sample(trajectory, reward, rewards, prompt.columns.get(self._answer)))
            self._look_for_reward(prompt, trajectories, samples)
            if self._stream.replaced(prompt):
                self._statistics.groups_scored += 1
                heapq.heappush(self._redo, prompt.index)
            else:
                self._take_in(Group(prompt.index, samples))
        except Exception as error:
            heapq.heappush(self._redo, prompt.index)  # a state that is saved now must include it
            self._fail(error)
        finally:
            self._in_flight.pop(prompt.index, None)
        self._fill()
        self._changed.set()

    def _take_in(self, group: Group) -> None:
        """Keep a scored group for the trainer, or drop and count it."""
        self._statistics.groups_scored += 1
        usable = len(group.samples) >= SMALLEST_GROUP
        if not usable:
            self._statistics.groups_unscored += 1
        elif self._config.grpo.drop_zero_variance and has_no_advantage(group, self._config):
            self._statistics.groups_zero_variance += 1
            usable = False
        elif not self._keeps(group):
            self._statistics.groups_filtered += 1
            usable = False
        self._without_reward = 0 if group.samples else self._without_reward + 1
        if self._without_reward >= BATCHES_WITHOUT_REWARD * self._batch_groups:
            raise UserError(
                f"the last {self._without_reward} groups got no reward at all; {self._groups.last_failure}: "
                "fix the reward functions ([rewards] functions, timeout_s, memory_limit_mb, answer_column) or the "
                "environment (environment_failed in events.jsonl)"
            )
        self._budget.count(usable)
        if usable:
            self._statistics.usable_lengths += [len(sample.completion_ids) for sample in group.samples]
            self._no_group_s = 0.0
        if len(group.samples) >= SMALLEST_GROUP:
            self._stream.note(group.prompt_index, [sample.reward for sample in group.samples])
            self._add(group, usable)
            self._redo_stale(group.prompt_index)

    def _look_for_reward(self, prompt: Prompt, trajectories: Sequence[Trajectory], samples: Sequence[Sample]) -> None:
        """Write an event if the first batches' worth of groups has no reward but 0: nothing is learned from them."""
        if self._events is None or self._zeros is None or not samples:
            return
        if any(sample.reward for sample in samples):
            self._zeros = None
            return
        self._zeros.append((prompt, trajectories[0]))
        if (count := len(self._zeros)) < BATCHES_OF_ZEROS * self._batch_groups:
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
            "no_reward_yet", level=logging.WARNING, groups=count, completions=shown,
            look_at="is the answer in the form that the reward functions want, does rollout.max_completion_tokens cut "
            "it off (finish_reason length), is the task too hard for this model (docs/real_models.md)?",
        )  # fmt: skip

    def _redo_stale(self, only: int | None = None) -> None:
        """Have finished groups sampled again that will be too stale in their turn; only: look at this one."""
        for index in self._budget.take_stale(self._config.rollout.max_staleness, only):
            heapq.heappush(self._redo, index)
            if index in self._ready:
                self._statistics.add_gate(self._ready.pop(index), admitted=False)

    def _hand_out(self, version: int, indices: list[int], straggler_wait_s: float) -> Batch:
        groups = [self._ready.pop(index) for index in indices]
        for group in groups:
            self._statistics.add_gate(group, admitted=True)
        batch = Batch(version, groups)
        batch.statistics = self._statistics.figures(version, batch.samples) | self._gauges()
        batch.statistics["rollout/straggler_wait_s"] = straggler_wait_s
        self._statistics, self._enough_since = self._fresh_statistics(), None
        if self._journal is not None:
            self._journal.append_batch(batch)
        self._budget.hand_out(indices)
        self._stream.used_up(indices[-1])
        self._redo_stale()
        self._no_completion_s = self._no_group_s = 0.0
        self._fill()
        return batch

    def _add(self, group: Group, usable: bool = True) -> None:
        if usable:
            self._ready[group.prompt_index] = group
        # The staleness gate considers the stalest sample.
        self._budget.add(group.prompt_index, min(sample_version(sample.spans) for sample in group.samples), usable)

    def _gauges(self) -> dict[str, float]:
        return {
            "rollout/groups_ready": float(len(self._ready)),
            "rollout/groups_in_flight": float(len(self._in_flight)),
            "rollout/prompts_too_long": float(self._stream.dropped),
            **self._stream.figures(),
            **self._groups.counters(),
            **self._groups.rewards.take_logged(),
        }

    def _count_wait(self, seconds: float) -> None:
        """Count time for which the trainer waited. Raises UserError when it has waited for too long."""
        self._no_completion_s = self._no_completion_s + seconds if self._groups.progress == self._progress else 0.0
        self._progress = self._groups.progress
        self._no_group_s += seconds if self._enough_since is None else 0.0
        limit = self._config.rollout.data_timeout_s
        if self._no_completion_s > limit:
            actors = ", ".join(f"{name} {state}" for name, state in self._groups.pool.actors.items()) or "none"
            raise UserError(
                f"no completion arrived for {limit:g} s (rollout.data_timeout_s) with {len(self._in_flight)} groups "
                f"under way; actors: {actors} (see events.jsonl and logs/ in the run folder)"
            )
        if self._no_group_s > limit:
            counts = self._statistics
            raise UserError(
                f"completions arrive, but for {limit:g} s (rollout.data_timeout_s) no group could be trained on: of "
                f"{counts.groups_scored}, {counts.groups_zero_variance} had equal rewards (grpo.drop_zero_variance), "
                f"{counts.groups_filtered} were left out by grpo.group_filter, "
                f"{counts.groups_unscored} had too few rewards, {counts.admitted.count(False)} were too old "
                "(rollout.max_staleness)"
            )

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        self._changed.set()


def has_no_advantage(group: Group, config: JobConfig) -> bool:
    """Return whether every advantage of this group is zero, whatever else is in its batch.

    With reinforce_pp they are zero except for the token mean over the batch, so the group alone carries no signal.
    """
    advantage = config.grpo.advantage
    if advantage in ("batch", "reinforce_pp_no_baseline") or ":" in advantage or config.job.stage == "distill":
        return False  # every sample gets a signal from the batch, the user's function or the teacher
    parts = [[sample.reward for sample in group.samples]]
    if config.grpo.advantage_level == "turn":
        turns = max(len(sample.returns) for sample in group.samples)
        parts = [[one.returns[turn] for one in group.samples if turn < len(one.returns)] for turn in range(turns)]
    if config.grpo.reward_aggregation == "normalize_each":
        names = [name for name, weight in reward_weights(config).items() if weight]
        given = [[sample.rewards.get(name) for sample in group.samples] for name in names]
        parts = [[value for value in values if value is not None] for values in given]
    return all(max(values) - min(values) < EQUAL_REWARDS for values in parts if values)
