"""One batch through the policy: packed forward, loss, backward, a few optimizer steps."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from torchtitan.config.job_config import JobConfig
from torchtitan.config.reward_names import learns_from_rewards, reward_weights
from torchtitan.config.source_configs import longest_completion, source_configs
from torchtitan.config.teachers import compares_vocabulary, held_references, hints_after_scoring, teacher_id
from torchtitan.distributed.collectives import all_reduce_sum, clip_gradients_, gather_values, gradient_norm_and_votes
from torchtitan.distributed.device import device, peak_flops
from torchtitan.distributed.offload import OptimizerOffload
from torchtitan.distributed.placement import ParallelDims
from torchtitan.errors import UserError
from torchtitan.grpo.advantages import group_advantages, normalized_each
from torchtitan.grpo.loss import FixedLogProbs, MicroBatchLoss, WithObservations, k3, stage_figures, stage_settings
from torchtitan.inference.types import sampled_segments
from torchtitan.models.decoder import Decoder
from torchtitan.models.head.divergence_head import Comparison
from torchtitan.models.head.fused_head import TokenObjective
from torchtitan.models.head.logprob_head import HeadFunction
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.lora import without_dropout
from torchtitan.models.parallelize import before_micro_batch, build_policy
from torchtitan.models.shape.costs import Passes, model_flops, throughput
from torchtitan.rollout.types import Batch, Group, Sample
from torchtitan.trainer.mismatch import ActorFigures
from torchtitan.trainer.optimizer import BatchLRScheduler, ExpertLoad, build_optimizer
from torchtitan.trainer.packing import MicroBatch, micro_batches, minibatches, trained_tokens
from torchtitan.trainer.reference import build_reference
from torchtitan.trainer.teaching import Teaching

if TYPE_CHECKING:
    from torchtitan.weight_sync.facade import WeightSync

logger = logging.getLogger(__name__)

# The run stops after so many optimizer steps in a row with a loss or gradient that is not finite.
MAX_SKIPPED_STEPS = 5
SUMS = ("loss", "tokens", "entropy", "clip/low", "clip/high", "masked", "ratio", "reference_kl", "compared")
MISMATCH_SUMS = ("mismatch", "mismatch_tokens", "same_version", "same_version_tokens", "drift", "drift_tokens")
OBSERVED_SUMS = ("observation", "observed")
ALL_SUMS = (*SUMS, *MISMATCH_SUMS, *OBSERVED_SUMS, "replayed", "routed", "computed", "inputs", "operations")
LARGEST = ("ratio", "mismatch")
# Figures that only some runs have: name, its sum, and what it is divided by.
MEANS_OF_SOME_RUNS = (
    ("reference_kl", "reference_kl", "compared"),
    ("observation/loss", "observation", "observed"),
    ("routing/replayed_share", "replayed", "routed"),
)


@dataclass
class BatchResult:
    """What one batch did to the policy."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    actors: dict[str, ActorFigures] = field(default_factory=dict)
    """How far the log-probs of each actor are from the trainer's"""
    votes_against: int = 0
    """Ranks that had no free slot for the new version"""
    asked_to_leave: int = 0
    """Ranks that a signal has told to stop"""
    last_step_applied: bool = True
    """False where the batch's last optimizer step was dropped as non-finite"""


class PolicyTrainer:
    """Trains the policy on batches. The same code for any number of ranks; every rank gets the same batches."""

    def __init__(
        self, config: JobConfig, dims: ParallelDims, policy: Decoder | None = None, merges_prefixes: bool = True
    ):
        """A collective. `policy`: instead of the one that the configuration names. merges_prefixes: what completions
        begin with together (their prompt, the turns of an episode) is computed once in a micro-batch, where the layers
        can."""
        self.config = config
        self.policy = policy = build_policy(config, dims) if policy is None else policy
        self.optimizer = build_optimizer(policy, config.optimizer)
        if config.training.enable_cpu_offload == "optimizer":
            OptimizerOffload(self.optimizer).between_steps()
        self.scheduler = BatchLRScheduler(self.optimizer, config.lr_scheduler, config.training.steps)
        self.references = {
            name: build_reference(reference_config, dims, policy)
            for name, reference_config in held_references(config).items()
        }
        self._teachers = {name: teacher_id(source_config) for name, source_config in source_configs(config)}
        self._hints_follow = {name: hints_after_scoring(source) for name, source in source_configs(config)}
        teachers = {name: reference.policy for name, reference in self.references.items()}
        reasons = [decoder.computes_apart() for decoder in (policy, *teachers.values())]
        reason_against_merging = next(filter(None, reasons), None)
        self._merged = merges_prefixes and reason_against_merging is None
        if merges_prefixes and reason_against_merging:
            logger.info("prefixes that completions share are computed for each of them: %s", reason_against_merging)
        self.teaching = Teaching(config, policy, teachers, self._merged) if compares_vocabulary(config) else None
        self.dims = dims
        self.device = device()
        self.parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.skipped_in_a_row = 0
        self.settings = stage_settings(config)
        rate = config.training.expert_bias_rate
        self.expert_load = ExpertLoad(policy, rate) if rate else None
        self.is_told_to_stop: Callable[[], bool] = lambda: False
        """Whether a signal has told this rank; rides on the last reduction, too"""

    def train_batch(self, batch: Batch, slots: WeightSync | None = None) -> BatchResult:
        """Train on `batch`. `slots` holds copies of versions, where there are any: the new version's is reserved, and
        whether every rank has one rides on the last reduction.

        Raises:
            UserError: too many optimizer steps in a row were not finite.
        """
        started = time.perf_counter()
        if learns_from_rewards(self.config):
            self._assign_advantages(batch)
        # AdamW would step on its momentum alone. Every rank sees all samples, and so leaves out the same minibatches.
        divided = minibatches(batch, self.config.grpo.num_minibatches)
        divided = [part for part in divided if self._has_trained_tokens(part)]
        actors = self._judged_actors(batch)
        parts = [self._pack(groups, batch.version, actors) for groups in divided or [[]]]
        totals = _Totals(self.device, actors)
        packs = [micro_batch for part in parts for micro_batch in part]
        totals.add_packs(packs, self._operations(packs))
        fixed = self._fixed_log_probs(parts, totals)
        schedule = [part for _ in range(self.config.grpo.num_iterations) for part in range(len(parts))]
        result = BatchResult()
        norms: list[float] = []
        skipped = 0
        learning_rate = self.scheduler.get_last_lr()[0]
        for position, part in enumerate(schedule):
            last = position == len(schedule) - 1
            against = 1.0 if last and slots is not None and not slots.reserve() else 0.0
            of_pass = position < len(parts), position == 0, last
            loss = self._forward_backward(parts[part], fixed[part], totals, *of_pass)
            rank_votes = torch.tensor([against, float(self.is_told_to_stop())], device=self.device)
            votes = torch.cat((rank_votes, (~loss.isfinite()).float().reshape(1)))
            norm, votes = gradient_norm_and_votes(self.parameters, votes)
            votes_against, asked_to_leave, not_finite = votes.tolist()
            result.votes_against, result.asked_to_leave = int(votes_against), int(asked_to_leave)
            result.last_step_applied = bool(torch.isfinite(norm)) and not_finite == 0
            if result.last_step_applied and divided:
                if self.config.training.max_norm > 0:
                    clip_gradients_(self.parameters, norm, self.config.training.max_norm)
                if slots is not None:
                    slots.fence()
                self.optimizer.step()
                if self.expert_load is not None:
                    self.expert_load.step()
                norms.append(norm.item())
            skipped += not result.last_step_applied
            self._count_skips(result.last_step_applied, batch.version)
            self.optimizer.zero_grad(set_to_none=True)
            if self.expert_load is not None:
                self.expert_load.zero()
        self.scheduler.step()
        for reference in self.references.values():
            reference.follow(self.policy)
        result.metrics = stage_figures(self.config, totals.reduce(self.dims, len(schedule)))
        result.actors = totals.actor_figures
        seconds = time.perf_counter() - started
        operations = result.metrics.pop("operations") or 0.0
        result.metrics |= throughput(operations, seconds, self.dims.world_size, peak_flops())
        result.metrics |= {
            "grad_norm": sum(norms) / len(norms) if norms else None,
            "learning_rate": learning_rate,
            "optimizer_steps": len(schedule) if divided else 0,
            "optimizer_steps_skipped": skipped,
            "time/train_s": seconds,
        }
        return result

    @torch.no_grad()
    def score(self, token_ids: list[int]) -> list[float]:
        """Collective: log-probs at temperature 1 of all tokens but the first, with the weights as they are now."""
        tokens = torch.tensor(token_ids, device=self.device)
        with without_dropout(self.policy):
            layout = PackedLayout([len(token_ids) - 1], self.device)
            log_probs, _ = self.policy(tokens[:-1], layout, tokens[1:], entropy=False)
        return log_probs.float().tolist()

    @torch.no_grad()
    def next_log_probs(self, token_ids: list[int], lengths: Sequence[int]) -> np.ndarray:
        """Collective: float32 [lengths, vocabulary], the log-probs at the run's temperature of every token behind so
        many of these, with the weights as they are now."""
        tokens = torch.tensor(token_ids, device=self.device)
        with without_dropout(self.policy):
            logits = self.policy(tokens, PackedLayout([len(token_ids)], self.device))
        chosen = logits[[length - 1 for length in lengths]].float() / (self.config.rollout.temperature or 1.0)
        values: np.ndarray = chosen.log_softmax(-1).cpu().numpy()
        return values

    @torch.no_grad()
    def cross_entropy(self, batch: Batch) -> dict[str, float]:
        """Collective: `eval/…` figures of the batch's trained tokens, with the weights as they are now."""
        log_probs = []
        for micro_batch in self._pack(batch.groups, batch.version):
            with without_dropout(self.policy):
                log_probs.append(self._forward(self.policy, micro_batch, entropy=False)[0])
        all_log_probs = torch.cat(log_probs)
        # Ranks that hold the same sums count them as often as the tokens.
        total, tokens = all_reduce_sum(
            torch.stack((all_log_probs.double().sum(), all_log_probs.new_tensor(len(all_log_probs)).double()))
        ).tolist()
        loss = -total / max(tokens, 1.0)
        return {"eval/loss": loss, "eval/tokens": tokens / self.config.parallelism.ranks_per_pack}

    def _operations(self, packs: list[MicroBatch]) -> float:
        """What the model needs for these micro-batches."""
        grpo, lora = self.config.grpo, self.config.lora
        total, updated = 0.0, lora.modules_to_save if lora.rank else None
        for pack in packs:
            scored = int(grpo.recompute_old_log_probs) + (pack.teacher in self.references)
            passes = Passes(grpo.num_iterations, scored, updated=updated)
            heads = len(pack.targets) + len(pack.observed)
            total += model_flops(self.policy.args, pack.layout.lengths, heads, passes, pack.layout.starts)
        return total

    def _assign_advantages(self, batch: Batch) -> None:
        grpo = self.config.grpo
        tokens = [[trained_tokens(sample, grpo.mask_truncated) for sample in group.samples] for group in batch.groups]
        if grpo.reward_aggregation == "normalize_each":
            weights = reward_weights(self.config)
            by_function = [[sample.rewards for sample in group.samples] for group in batch.groups]
            advantages = normalized_each(by_function, weights, grpo.scale_rewards, grpo.advantage, tokens)
        else:
            rewards = [[sample.reward for sample in group.samples] for group in batch.groups]
            advantages = group_advantages(rewards, grpo.scale_rewards, grpo.advantage, tokens)
        for group, values in zip(batch.groups, advantages, strict=True):
            for sample, value in zip(group.samples, values, strict=True):
                sample.advantage = value
        if grpo.advantage_level == "turn":
            assign_by_turn(batch, grpo.scale_rewards, grpo.advantage)

    def _judged_actors(self, batch: Batch) -> list[str]:
        """The names of the actors whose log-probs of this batch the trainer can judge, the same on every rank."""
        if self.config.lora.dropout > 0 and not self.config.grpo.recompute_old_log_probs:
            return []  # the only forward is one with dropout
        return sorted({completion.actor for completion in batch.completions if completion.asked_at is not None})

    def _pack(self, groups: list[Group], version: int, actors: Sequence[str] = ()) -> list[MicroBatch]:
        samples: list[Sample] = []
        teachers: list[str | None] = []
        for group in groups:
            for sample in self._trained_samples(group):
                samples.append(sample)
                taught = sample.is_hinted or not self._needs_hints(group)
                teachers.append(self._teacher(group.source) if taught else None)
        return micro_batches(
            samples,
            self.settings.objective,
            version=version,
            budget=self.config.training.tokens_per_micro_batch,
            max_completion_tokens=longest_completion(self.config),
            mask_truncated=self.config.grpo.mask_truncated,
            rank=self.dims.dp_rank,
            ranks=self.dims.dp_size,
            device=self.device,
            replayed=self.policy.args if self.config.grpo.routing_replay else None,
            merged=self._merged,
            observation_coefficient=self.config.grpo.observation_coefficient,
            teachers=teachers,
            actors=actors,
        )

    def _trained_samples(self, group: Group) -> list[Sample]:
        """Those that enter the loss: without rewards to learn from, a sample for which no hint was found teaches
        nothing, and does not count in the mean either (SDPO)."""
        if learns_from_rewards(self.config) or not self._needs_hints(group):
            return group.samples
        return [sample for sample in group.samples if sample.is_hinted]

    def _has_trained_tokens(self, groups: Sequence[Group]) -> bool:
        samples = itertools.chain.from_iterable(map(self._trained_samples, groups))
        return any(trained_tokens(sample, self.config.grpo.mask_truncated) for sample in samples)

    def _needs_hints(self, group: Group) -> bool:
        return self._hints_follow.get(group.source, hints_after_scoring(self.config))

    def _teacher(self, source: str) -> str | None:
        if source in self._teachers:
            return self._teachers[source]
        # A recorded batch may be of sources that this run does not have.
        name = teacher_id(self.config)
        if name and name not in self.references and not self.config.distill.server.url:
            raise UserError(
                f"the recorded batch is of the source {source!r}, which the configuration does not have, and all "
                "sources that it has name a teacher of their own: name the sources as in the recorded run"
            )
        return name

    def _forward(
        self,
        policy: Decoder,
        micro_batch: MicroBatch,
        objective: TokenObjective | None = None,
        function: HeadFunction | None = None,
        observed: bool = False,
        entropy: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """(log-probs, entropy) of the active tokens, behind the loss where the head is given an objective; or what
        another function of the head returns. observed: the observed tokens follow the active ones. entropy: False
        spares it."""
        targets, rows = micro_batch.targets, micro_batch.active
        if observed:
            targets = torch.cat((targets, micro_batch.observed_targets))
            rows = torch.cat((rows, micro_batch.observed))
        # Greedy sampling reports log-probs at temperature 1; so does the trainer.
        outputs: tuple[torch.Tensor, ...] = policy(
            micro_batch.token_ids,
            micro_batch.layout,
            targets,
            self.config.rollout.temperature or 1.0,
            micro_batch.kept,
            rows=rows,
            objective=objective,
            # A reference is another policy: its router chooses by itself.
            routes=micro_batch.routes if policy is self.policy else None,
            function=function,
            entropy=entropy,
        )
        return outputs

    @torch.no_grad()
    def _fixed_log_probs(self, parts: list[list[MicroBatch]], totals: _Totals) -> list[list[FixedLogProbs]]:
        """What is computed once, before the batch's first optimizer step: proximal and reference log-probs."""
        grpo = self.config.grpo
        fixed = [[FixedLogProbs() for _ in part] for part in parts]
        entropies, chooses = [], grpo.entropy_top_share < 1
        for part, ours in zip(parts, fixed, strict=True):
            for micro_batch, log_probs in zip(part, ours, strict=True):
                if self.teaching is None and micro_batch.teacher is not None:
                    log_probs.reference = micro_batch.teacher_log_probs
                if grpo.recompute_old_log_probs:
                    with without_dropout(self.policy):
                        log_probs.old, entropy = self._forward(self.policy, micro_batch, entropy=chooses)
                    entropies.append(entropy)
                    totals.add_mismatch(log_probs.old, micro_batch)
                if micro_batch.teacher in self.references and self.teaching is None:
                    reference = self.references[micro_batch.teacher]
                    with reference.active():
                        log_probs.reference, _ = self._forward(reference.policy, micro_batch, entropy=False)
        if chooses:
            # Beyond the 80/20 rule (Wang et al. 2025): the threshold is that of the whole batch.
            values = gather_values(torch.cat(entropies)).sort().values
            place = int((1 - grpo.entropy_top_share) * len(values))
            # A batch may have no trained token at all.
            threshold = values[place] if place < len(values) else 0.0
            for log_probs, entropy in zip((log_probs for ours in fixed for log_probs in ours), entropies, strict=True):
                log_probs.trained = (entropy >= threshold).float()
        return fixed

    def _forward_backward(
        self, part: list[MicroBatch], fixed: list[FixedLogProbs], totals: _Totals, new: bool, first: bool, last: bool
    ) -> torch.Tensor:
        """Accumulate the gradients of one minibatch; returns this rank's share of its loss. new: in the first pass over
        the batch; first, last: of all optimizer steps."""
        total = torch.zeros((), device=self.device)
        for place, (micro_batch, known) in enumerate(zip(part, fixed, strict=True)):
            before_micro_batch(self.policy, last=place == len(part) - 1)
            loss_of = MicroBatchLoss(micro_batch, known, self.settings)
            with contextlib.nullcontext() if self.teaching is None else self.teaching.compare(micro_batch) as compared:
                with self._counting_experts(micro_batch):
                    loss, log_probs, copies = self._loss(micro_batch, loss_of, compared, totals)
                if known.old is None and new:
                    totals.add_mismatch(log_probs.detach(), micro_batch, moved=not first)
                elif known.old is not None and last and not first:
                    totals.add_drift(known.old, log_probs.detach())
                loss.backward()
            total += loss.detach()
            totals.add(loss.detach(), loss_of, copies)
        return total

    def _counting_experts(self, micro_batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        if self.expert_load is None:
            return contextlib.nullcontext()
        assert micro_batch.occurrences is not None
        return self.expert_load.counting(micro_batch.occurrences)

    def _loss(
        self, micro_batch: MicroBatch, loss_of: MicroBatchLoss, compared: Comparison | None, totals: _Totals
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(this rank's share of the loss, all log-probs, how many context-parallel ranks compute the same share)."""
        if compared is not None:
            log_probs, entropy, divergence = self._forward(self.policy, micro_batch, function=compared)
            return loss_of(log_probs, entropy, slice(0, len(log_probs)), divergence).sum(), log_probs, 1
        one_pass = self.policy.lm_head.mode == "one_pass" and loss_of.separable
        if count := len(micro_batch.observed):
            active = len(micro_batch.targets)
            both = WithObservations(loss_of, active, micro_batch.observation_weight)
            found = self._forward(self.policy, micro_batch, both if one_pass else None, observed=True)
            log_probs, entropy = found[-2:]
            loss = found[0] if one_pass else both(log_probs, entropy, slice(0, active + count)).sum()
            totals.add_observations(both.sum, count)
            return loss, log_probs[:active], 1
        if one_pass:
            loss, log_probs, _ = self._forward(self.policy, micro_batch, loss_of)
            return loss, log_probs, 1
        log_probs, entropy = self._forward(self.policy, micro_batch)
        rows, copies, context = slice(0, len(log_probs)), 1, self.policy.context
        if context is not None and loss_of.separable:
            # What is this rank's of the loss. A loss of whole sequences all ranks of the group compute.
            bounds = context.bounds(micro_batch.active, self.policy.padded_length(micro_batch.layout.total))
            rows = slice(*bounds[context.rank : context.rank + 2])
        elif context is not None:
            copies = context.ranks
        return loss_of(log_probs[rows], entropy[rows], rows).sum(), log_probs, copies

    def _count_skips(self, applied: bool, version: int) -> None:
        if applied:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        logger.warning(
            "optimizer step skipped: non-finite loss or gradient (batch of version %d, %d in a row, limit %d)",
            version,
            self.skipped_in_a_row,
            MAX_SKIPPED_STEPS,
        )
        if self.skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise UserError(
                f"stopped: {self.skipped_in_a_row} optimizer steps in a row had a non-finite loss or gradient. "
                "The weights are those before these steps. Lower optimizer.lr, look at the rewards in "
                'completions.jsonl, or use training.mixed_precision_param = "float32"; resume from the last checkpoint.'
            )


def assign_by_turn(batch: Batch, scale_rewards: str, estimator: str) -> None:
    """Turn t of a trajectory is compared with turns t of its group, by what was still to come of the reward there
    (rewards to go, Sutton & Barto 2018, section 13.4, with the group's mean as the baseline)."""
    places: list[list[tuple[Sample, int]]] = []
    returns: list[list[float]] = []
    lengths: list[list[int]] = []
    for group in batch.groups:
        most_turns = max(len(sample.returns) for sample in group.samples)
        for turn in range(most_turns):
            compared = [sample for sample in group.samples if turn < len(sample.returns)]
            turns = [sampled_segments(sample.branches)[turn] for sample in compared]
            places.append([(sample, turn) for sample in compared])
            returns.append([sample.returns[turn] for sample in compared])
            lengths.append([len(completion.token_ids) for completion in turns])
    for sample in batch.samples:
        sample.turn_advantages = [0.0] * len(sample.returns)
    for members, values in zip(places, group_advantages(returns, scale_rewards, estimator, lengths), strict=True):
        for (sample, turn), value in zip(members, values, strict=True):
            sample.turn_advantages[turn] = value


class _Totals:
    """Sums and largest values over active tokens, reduced over the ranks once per batch."""

    def __init__(self, device: torch.device, actors: Sequence[str] = ()):
        self.actor_figures: dict[str, ActorFigures] = {}
        """Known once the sums are reduced"""
        self._actors = actors
        # One more for tokens that are judged with none.
        self._of_actors = torch.zeros(2, len(actors) + 1, device=device, dtype=torch.float64)
        self.sums = {name: torch.zeros((), device=device, dtype=torch.float64) for name in ALL_SUMS}
        self.largest = {name: torch.zeros((), device=device, dtype=torch.float64) for name in LARGEST}

    def add(self, loss: torch.Tensor, loss_of: MicroBatchLoss, copies: int) -> None:
        """copies: how many context-parallel ranks add the same."""
        self.sums["loss"] += loss / copies
        for name, value in loss_of.sums.items():
            self.sums[name] += value / copies
        self._raise_largest("ratio", loss_of.ratio_max)

    def add_observations(self, cross_entropy: torch.Tensor, count: int) -> None:
        """Sum of -log π over so many tokens that environments wrote."""
        self.sums["observation"] += cross_entropy
        self.sums["observed"] += count

    def add_mismatch(self, log_probs: torch.Tensor, micro_batch: MicroBatch, moved: bool = False) -> None:
        """moved: the policy has taken optimizer steps of this batch, so it is no version that has sampled."""
        # What is logged of the batch shows them beside the engine's; they stay on the device until then.
        lengths = [len(branch.sampled_at) for branch in micro_batch.trained]
        for branch, of_branch in zip(micro_batch.trained, log_probs.split(lengths), strict=True):
            branch.trainer_log_probs = of_branch
        # KL(μ ‖ π), estimated from samples of μ.
        divergence = k3(micro_batch.behaviour_log_probs, log_probs)
        same = micro_batch.same_version & (not moved)
        if len(divergence):
            self._raise_largest("mismatch", divergence.max())
        self.sums["mismatch"] += divergence.sum()
        self.sums["mismatch_tokens"] += len(divergence)
        # Picking them by an index would wait for the device.
        self.sums["same_version"] += torch.where(same, divergence, 0.0).sum()
        self.sums["same_version_tokens"] += same.sum()
        if self._actors and not moved:
            differences = (micro_batch.behaviour_log_probs - log_probs).double().abs()
            self._of_actors.index_add_(1, micro_batch.actors, torch.stack((differences, torch.ones_like(differences))))

    def add_packs(self, packs: list[MicroBatch], operations: float) -> None:
        """What is computed, for how many tokens, and how much of it with the experts of the engine."""
        self.sums["operations"] += operations
        for micro_batch in packs:
            self.sums["computed"] += micro_batch.layout.total
            self.sums["inputs"] += micro_batch.inputs
            self.sums["replayed"] += micro_batch.routed[0]
            self.sums["routed"] += micro_batch.routed[1]

    def add_drift(self, old: torch.Tensor, log_probs: torch.Tensor) -> None:
        """How far all optimizer steps of the batch but the last have moved the policy."""
        divergence = k3(old, log_probs)
        self.sums["drift"] += divergence.sum()
        self.sums["drift_tokens"] += len(divergence)

    def _raise_largest(self, name: str, value: torch.Tensor) -> None:
        self.largest[name] = torch.maximum(self.largest[name], value.double())

    def _judge(self, reduced: torch.Tensor, copies: int) -> None:
        """reduced: the sums over all ranks, of which so many hold the same."""
        differences, tokens = reduced.view(2, -1).tolist()
        for actor, difference, count in zip(self._actors, differences, tokens, strict=False):
            if count:
                self.actor_figures[actor] = ActorFigures(difference / count, round(count / copies))

    def _mean_difference(self) -> float | None:
        """Over the tokens of all actors; None where none can be judged."""
        difference = tokens = 0.0
        for actor in self.actor_figures.values():
            difference += actor.difference * actor.tokens
            tokens += actor.tokens
        return difference / tokens if tokens else None

    def reduce(self, dims: ParallelDims, optimizer_steps: int) -> dict[str, float | None]:
        # Each rank has a place of its own for its largest values, so that one sum carries them, too.
        places = torch.zeros(dims.world_size, len(LARGEST), device=self.largest[LARGEST[0]].device, dtype=torch.float64)
        places[dims.rank] = torch.stack(list(self.largest.values()))
        rank_figures = torch.stack(list(self.sums.values())), places.flatten(), self._of_actors.flatten()
        packed = all_reduce_sum(torch.cat(rank_figures))
        # Tensor-parallel ranks hold the same sums: each counts its share. So do context-parallel ones of what they
        # have gathered.
        copies = {name: dims.tp if name in SUMS else dims.tp * dims.cp for name in self.sums}
        sums = {name: value / copies[name] for name, value in zip(self.sums, packed.tolist(), strict=False)}
        by_rank = packed[len(self.sums) : len(self.sums) + places.numel()].unflatten(0, places.shape)
        self._judge(packed[len(self.sums) + places.numel() :], dims.tp * dims.cp)
        largest = dict(zip(LARGEST, by_rank.amax(0).tolist(), strict=True))
        tokens = max(sums["tokens"], 1.0)
        same, drifted = sums["same_version_tokens"], sums["drift_tokens"]
        # The last forward has seen all steps but one; a divergence grows with the square of the way.
        whole_way = (optimizer_steps / max(optimizer_steps - 1, 1)) ** 2
        figures: dict[str, float | None] = {
            "loss": sums["loss"] / optimizer_steps,
            "entropy": sums["entropy"] / tokens,
            "clip/low_fraction": sums["clip/low"] / tokens,
            "clip/high_fraction": sums["clip/high"] / tokens,
            "masked_fraction": sums["masked"] / tokens,
            "ratio/mean": sums["ratio"] / tokens,
            "ratio/max": largest["ratio"],
            "mismatch_kl": sums["mismatch"] / max(sums["mismatch_tokens"], 1.0),
            "mismatch_kl/max": largest["mismatch"],
            "mismatch_kl/same_version": sums["same_version"] / same if same else None,
            "mismatch_kl/nats": self._mean_difference(),
            "mismatch_kl/drift": whole_way * sums["drift"] / drifted if drifted else None,
            "trained_tokens": sums["tokens"] / optimizer_steps,
            "computed_tokens": sums["computed"],
            "computed_share": sums["computed"] / max(sums["inputs"], 1.0),
            "operations": sums["operations"],
        }
        for name, total, count in MEANS_OF_SOME_RUNS:
            if sums[count]:
                figures[name] = sums[total] / sums[count]
        return figures
