"""The flow of rollouts in the background loop: prompts go to the actors, and scored groups wait for the trainer."""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import time
from collections.abc import Sequence

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.rollout.data.prompt_stream import load_streams
from torchtitan.rollout.data.source_scheduler import SourceScheduler, in_turns
from torchtitan.rollout.flow.group_maker import counters, make_sample
from torchtitan.rollout.flow.journal import Journal, ReplaySource, batch_from_json, batch_to_json
from torchtitan.rollout.flow.leftovers import changed_since, sampled_as
from torchtitan.rollout.flow.source_flow import SourceFlow
from torchtitan.rollout.flow.statistics import RolloutStatistics, means_of_sources, of_source
from torchtitan.rollout.types import Batch, Group, Prompt
from torchtitan.utils.json_lines import EventLog

logger = logging.getLogger(__name__)

# A trainer that has waited so long for completions says for which actors, and why.
WAITS_LONG_S = 30.0


class RolloutFlow:
    """Keeps the actors busy and hands out batches. All methods belong to one asyncio loop.

    Each source keeps what is generated for it (source_flow.py), and has its own places in every batch
    (source_scheduler.py): no source waits for another one until the batch is put together. A saved state has what is
    not drawn yet, being generated, or ready, so a resume neither loses nor repeats a prompt.
    """

    def __init__(
        self,
        config: JobConfig,
        sources: Sequence[SourceFlow],
        scheduler: SourceScheduler,
        journal: Journal | None,
        events: EventLog | None = None,
    ):
        self._config, self._scheduler = config, scheduler
        self._all, self._sources = list(sources), list(sources)
        """All sources, and those that have not failed"""
        self._journal, self._events = journal, events
        self._running = False
        self._kept: ReplaySource | None = None
        """Recorded batches to train on again"""
        self._changed_keys: dict[str, str] = {}
        """What restored groups were sampled or judged with, where that was other than now"""
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._version = 0
        self._no_completion_s = 0.0
        self._said_waiting = False
        """An event has said which actors it waits for"""
        self._progress = 0
        self._enough_since: float | None = None
        """When enough groups for the next batch were ready; since then it waits only for earlier ones"""
        self._start_statistics()

    def set_version(self, version: int) -> None:
        """Set the trainer's version and generate for its batch and later ones. The first call starts the generation."""
        # Groups sampled earlier would be too old once the kept batches have been trained on.
        last_kept = self._kept.versions[-1] if self._kept is not None else -1
        self._running = version + self._config.rollout.max_staleness > last_kept
        self._version = version
        for source in self._sources:
            source.budget.version, source.budget.handed_out = version, version <= last_kept
            source.groups.rewards.set_step(version)
            source.resample_stale()
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
            if version != self._version:
                raise ValueError(f"a batch for version {version} was asked for, the trainer's is {self._version}")
            if self._kept is not None and version in self._kept.versions:
                return self._kept.next_batch(version)
            started = time.monotonic()
            if all(source.has_enough for source in self._sources):
                self._enough_since = self._enough_since or started
                parts = [source.next_groups() for source in self._sources]
                complete = [indices for indices in parts if indices is not None]
                if len(complete) == len(parts):
                    return self._make_batch(version, complete, started - self._enough_since)
            if started >= deadline:
                return None
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - started)
            except TimeoutError:
                self._count_wait(time.monotonic() - started)
                return None
            self._count_wait(time.monotonic() - started)

    def export_state(self) -> bytes:
        """Return the prompt positions, the prompts in flight and the finished groups."""
        ready: list[Group] = []
        unfinished: list[int] = []
        for source in self._sources:
            ready += [source.ready[index] for index in sorted(source.ready)]
            unfinished += [*source.in_flight, *source.resample]
        state = {
            "streams": {source.name: source.stream.state_dict() for source in self._all},
            "unfinished": sorted(unfinished),
            "ready": batch_to_json(Batch(self._version, ready)),
            "mix": self._scheduler.state_dict(),
            "sampled_as": {source.name: sampled_as(source.config) for source in self._all},
        }
        return json.dumps(state).encode()

    def restore_state(self, data: bytes) -> None:
        """Continue from an exported state; call it before set_version(). The staleness gate applies to its groups.
        Those that were sampled or judged with other values of the configuration are made again.

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
        load_streams(state, {source.name: source.stream for source in self._all})
        self._scheduler.load_state_dict(state.get("mix", self._scheduler.state_dict()))
        for source in set(self._sources):
            if source.name not in self._scheduler.names:
                self._sources.remove(source)
                logger.warning("source %s had failed before the checkpoint: the run goes on without it", source.name)
        for index in sorted(state["unfinished"]):
            self._owner(index).resample.append(index)
        ready, before = batch_from_json(state["ready"]), state.get("sampled_as", {})
        ready.forget_actors()
        changed = {source.name: changed_since(before.get(source.name), source.config) for source in self._all}
        self._changed_keys = {key: values for changes in changed.values() for key, values in changes.items()}
        again = 0
        for group in ready.groups:
            owner = self._owner(group.prompt_index)
            if changed[owner.name]:
                heapq.heappush(owner.resample, group.prompt_index)
                again += 1
            else:
                owner.add(group)
        logger.info(
            "restored %d finished groups; %d unfinished are redone", len(ready.groups) - again, len(state["unfinished"])
        )
        if again and self._events is not None:
            self._events.write("groups_made_again", level=logging.WARNING, groups=again, **self._changed_keys)

    def train_again(self, recorded: ReplaySource) -> int:
        """Hand out these batches before any new one; call it after restore_state() and before set_version().

        Batches that were sampled or judged with other values of the configuration are not trained on again.

        Returns how many other groups were ready when the last of them was recorded; these are generated again.
        """
        if not recorded.versions:
            return 0
        if self._changed_keys:
            if self._events is not None:
                count = len(recorded.versions)
                self._events.write("batches_made_again", level=logging.WARNING, batches=count, **self._changed_keys)
            return 0
        self._kept = recorded
        batches = [recorded.read_batch(version) for version in recorded.versions]
        for batch in batches:
            self._scheduler.served(count_by_source(batch.groups))
        used = {group.prompt_index for batch in batches for group in batch.groups}
        for source in self._sources:
            source.skip({index for index in used if self._owner(index) is source})
        return int(batches[-1].statistics.get("rollout/groups_ready", 0))

    async def close(self) -> None:
        self._running = False
        tasks = [task for source in self._all for task in source.in_flight.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _owner(self, index: int) -> SourceFlow:
        """The source of a prompt."""
        return self._all[index % len(self._all)]

    def _start_statistics(self) -> None:
        labels = {name: label for source in self._all for name, label in source.fresh_statistics().labels.items()}
        self._statistics = RolloutStatistics(labels)
        for source in self._sources:
            source.start_statistics(self._statistics)

    def _fill(self) -> None:
        """Send out prompts for as many groups as can be used, those that are used first first."""
        while self._running and self._failure is None:
            # (version that trains it, its place in that batch, number of its source, position in that source)
            wanted: list[tuple[int, float, int, float]] = []
            for number, source in enumerate(self._sources):
                position = source.wants()
                if position is not None:
                    budget = source.budget
                    wanted.append(
                        (budget.training_version(position), position / budget.groups_per_batch, number, position)
                    )
            if not wanted:
                return
            _, _, number, position = min(wanted)
            source = self._sources[number]
            min_version = source.budget.oldest_useful_version(position)
            try:
                prompt = source.take_prompt()
            except UserError as error:
                self._fail(error, source)
                continue
            source.in_flight[prompt.index] = asyncio.create_task(self._make_group(source, prompt, min_version))

    async def _make_group(self, source: SourceFlow, prompt: Prompt, min_version: int) -> None:
        started = time.monotonic()
        try:
            groups = source.groups
            sampled = await groups.sample(prompt, groups.request(prompt), min_version)
            trajectories = [trajectory for trajectory in sampled if trajectory.branches]
            scores = await groups.score(prompt, trajectories)
            if groups.hints is not None:
                groups.hints.give(prompt, trajectories, scores)
            await groups.teach(trajectories)
            samples = []
            for trajectory, (reward, rewards) in zip(trajectories, scores, strict=True):
                source.count_sample(trajectory, reward, rewards)
                if reward is not None:
                    answer = prompt.columns.get(source.config.rewards.answer_column)
                    samples.append(make_sample(trajectory, reward, rewards, answer))
            source.look_for_failures(trajectories)
            source.look_for_reward(prompt, trajectories, samples)
            source.look_for_hint(samples)
            group = Group(prompt.index, samples, source.name, prompt.from_pass)
            source.accept(group, prompt.row, time.monotonic() - started)
        except Exception as error:
            heapq.heappush(source.resample, prompt.index)  # a state that is saved now must include it
            self._fail(error, source)
        finally:
            source.in_flight.pop(prompt.index, None)
        self._fill()
        self._changed.set()

    def _make_batch(self, version: int, parts: list[list[int]], straggler_wait_s: float) -> Batch:
        shares = [source.next_batch(indices) for source, indices in zip(self._sources, parts, strict=True)]
        batch = Batch(version, in_turns(shares))
        counts = count_by_source(batch.groups)
        self._scheduler.served({name: counts.get(name, 0) for name in self._scheduler.names})
        batch.statistics = self._statistics.figures(version, batch.samples) | self._gauges()
        by_source: list[tuple[int, dict[str, float]]] = []
        for source, groups in zip(self._sources, shares, strict=True):
            if source.name and groups:
                samples = [sample for group in groups for sample in group.samples]
                figures = source.statistics.figures(version, samples)
                by_source.append((len(groups), figures))
                batch.statistics |= of_source(figures, source.name)
            if source.name:
                batch.statistics[f"groups/{source.name}/trained"] = float(len(groups))
        batch.statistics |= means_of_sources(by_source)
        batch.statistics["rollout/straggler_wait_s"] = straggler_wait_s
        self._start_statistics()
        self._enough_since = None
        if self._journal is not None:
            self._journal.append_batch(batch)
        for source in self._sources:
            source.resample_stale()
        self._no_completion_s = 0.0
        self._fill()
        return batch

    def _gauges(self) -> dict[str, float]:
        ready = sum(len(source.ready) for source in self._sources)
        in_flight = sum(len(source.in_flight) for source in self._sources)
        too_long = sum(source.stream.dropped for source in self._all)
        return {
            "rollout/groups_ready": float(ready),
            "rollout/groups_in_flight": float(in_flight),
            "rollout/prompts_too_long": float(too_long),
            **self._stream_figures(),
            **counters([source.groups for source in self._all]),
            **self._all[0].groups.rewards.take_logged(),
        }

    def _stream_figures(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for source in self._sources:
            stream_figures = source.stream.figures()
            figures |= of_source(stream_figures, source.name) if source.name else stream_figures
        return figures

    def _count_wait(self, seconds: float) -> None:
        """Count time for which the trainer waited. Raises UserError when it has waited for too long."""
        progress = sum(source.groups.progress for source in self._all)
        self._no_completion_s = self._no_completion_s + seconds if progress == self._progress else 0.0
        self._progress = progress
        limit = self._config.rollout.data_timeout_s
        if not self._no_completion_s:
            self._said_waiting = False
        if self._no_completion_s > min(WAITS_LONG_S, limit / 2) and not self._said_waiting:
            self._said_waiting = True
            if self._events is not None:
                self._events.write(
                    "waiting_for_completions", level=logging.WARNING, seconds=round(self._no_completion_s),
                    timeout_s=limit, actors=self._all[0].groups.pool.describe_actors(),
                )  # fmt: skip
        if self._no_completion_s > limit:
            count = sum(len(source.in_flight) for source in self._sources)
            actors = self._all[0].groups.pool.describe_actors()
            raise UserError(
                f"no completion arrived for {limit:g} s (rollout.data_timeout_s) with {count} groups "
                f"under way; actors: {actors} (see events.jsonl and logs/ in the run folder)"
                f"{self._all[0].groups.lost_rewards}"
            )
        for source in list(self._sources):
            source.seconds_without_group += 0.0 if source.has_enough else seconds
            if source.seconds_without_group > limit:
                groups, stale = source.statistics.groups, source.statistics.admitted.count(False)
                self._fail(
                    UserError(
                        f"completions arrive, but for {limit:g} s (rollout.data_timeout_s) no group could be trained "
                        f"on: of {groups['scored']}, {groups['zero_variance']} had equal rewards, or no hint, "
                        f"(grpo.drop_zero_variance), {groups['filtered']} were left out by grpo.group_filter, "
                        f"{groups['unscored']} had too few rewards, {stale} were too old (rollout.max_staleness)"
                        f"{source.groups.lost_rewards}"
                    ),
                    source,
                )
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: Exception, source: SourceFlow) -> None:
        """End the run, or go on without a source that it does not require."""
        if source in self._sources and isinstance(error, UserError) and not source.required and len(self._sources) > 1:
            self._sources.remove(source)
            self._scheduler.remove(source.name)
            for task in source.in_flight.values():
                if task is not asyncio.current_task():
                    task.cancel()
            if self._events is not None:
                self._events.write(
                    "source_left", level=logging.WARNING, source=source.name, version=self._version, reason=str(error)
                )
        elif source in self._sources and self._failure is None:
            named = source.name and isinstance(error, UserError)
            self._failure = UserError(f"source {source.name!r}: {error}") if named else error
        self._changed.set()


def count_by_source(groups: Sequence[Group]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for group in groups:
        counts[group.source] = counts.get(group.source, 0) + 1
    return counts
