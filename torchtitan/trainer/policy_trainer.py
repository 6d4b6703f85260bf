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
from torchtitan.config.reward_names import learns_from_rewards
from torchtitan.config.source_configs import longest_completion, source_configs
from torchtitan.config.teachers import compares_vocabulary, held_references, hints_after_scoring, teacher_id
from torchtitan.distributed.collectives import all_reduce_sum, clip_gradients_, gather_values, gradient_norm_and_votes
from torchtitan.distributed.device import device, peak_flops
from torchtitan.distributed.offload import OptimizerOffload
from torchtitan.distributed.placement import ParallelDims
from torchtitan.errors import UserError
from torchtitan.grpo.loss import FixedLogProbs, MicroBatchLoss, WithObservations, stage_figures, stage_settings
from torchtitan.models.decoder import Decoder
from torchtitan.models.head.divergence_head import Comparison
from torchtitan.models.head.fused_head import TokenObjective
from torchtitan.models.head.logprob_head import HeadFunction
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.lora import without_dropout
from torchtitan.models.parallelize import before_micro_batch, build_policy
from torchtitan.models.shape.costs import Passes, model_flops, throughput
from torchtitan.rollout.types import Batch, Group, Sample
from torchtitan.trainer.batch_totals import BatchTotals
from torchtitan.trainer.credit import assign_advantages
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
            assign_advantages(self.config, batch)
        # AdamW would step on its momentum alone. Every rank sees all samples, and so leaves out the same minibatches.
        divided = minibatches(batch, self.config.grpo.num_minibatches)
        divided = [part for part in divided if self._has_trained_tokens(part)]
        actors = self._judged_actors(batch)
        parts = [self._pack(groups, batch.version, actors) for groups in divided or [[]]]
        totals = BatchTotals(self.device, actors)
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
            lacks_slot = last and slots is not None and not slots.reserve()
            of_pass = position < len(parts), position == 0, last
            loss = self._forward_backward(parts[part], fixed[part], totals, *of_pass)
            norm = self._reduce_norm_and_votes(loss, lacks_slot, result)
            if result.last_step_applied and divided:
                self._apply_gradients(norm, slots)
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

    def _reduce_norm_and_votes(self, loss: torch.Tensor, lacks_slot: bool, result: BatchResult) -> torch.Tensor:
        """A collective: the norm of the gradients, and in `result` what all ranks say of this optimizer step, which one
        reduction carries with it."""
        rank_votes = torch.tensor([float(lacks_slot), float(self.is_told_to_stop())], device=self.device)
        votes = torch.cat((rank_votes, (~loss.isfinite()).float().reshape(1)))
        norm, votes = gradient_norm_and_votes(self.parameters, votes)
        votes_against, asked_to_leave, not_finite = votes.tolist()
        result.votes_against, result.asked_to_leave = int(votes_against), int(asked_to_leave)
        result.last_step_applied = bool(torch.isfinite(norm)) and not_finite == 0
        return norm

    def _apply_gradients(self, norm: torch.Tensor, slots: WeightSync | None) -> None:
        """One optimizer step with gradients of this norm, once no copy of the weights is being made."""
        if self.config.training.max_norm > 0:
            clip_gradients_(self.parameters, norm, self.config.training.max_norm)
        if slots is not None:
            slots.fence()
        self.optimizer.step()
        if self.expert_load is not None:
            self.expert_load.step()

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
        own_sum = all_log_probs.double().sum()
        own_count = own_sum.new_tensor(len(all_log_probs))
        total, tokens = all_reduce_sum(torch.stack((own_sum, own_count))).tolist()
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
    def _fixed_log_probs(self, parts: list[list[MicroBatch]], totals: BatchTotals) -> list[list[FixedLogProbs]]:
        """What is computed once, before the batch's first optimizer step: proximal and reference log-probs."""
        grpo = self.config.grpo
        fixed = [[FixedLogProbs() for _ in part] for part in parts]
        entropies, chooses = [], grpo.entropy_top_share < 1
        for part, fixed_of_part in zip(parts, fixed, strict=True):
            for micro_batch, log_probs in zip(part, fixed_of_part, strict=True):
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
            all_log_probs = itertools.chain.from_iterable(fixed)
            for log_probs, entropy in zip(all_log_probs, entropies, strict=True):
                log_probs.trained = (entropy >= threshold).float()
        return fixed

    def _forward_backward(
        self,
        part: list[MicroBatch],
        fixed: list[FixedLogProbs],
        totals: BatchTotals,
        new: bool,
        first: bool,
        last: bool,
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
        self, micro_batch: MicroBatch, loss_of: MicroBatchLoss, compared: Comparison | None, totals: BatchTotals
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(this rank's share of the loss, all log-probs, how many context-parallel ranks compute the same share)."""
        if compared is not None:
            log_probs, entropy, divergence = self._forward(self.policy, micro_batch, function=compared)
            return loss_of(log_probs, entropy, slice(0, len(log_probs)), divergence).sum(), log_probs, 1
        one_pass = self.policy.lm_head.mode == "one_pass" and loss_of.separable
        if count := len(micro_batch.observed):
            active = len(micro_batch.targets)
            with_observations = WithObservations(loss_of, active, micro_batch.observation_weight)
            found = self._forward(self.policy, micro_batch, with_observations if one_pass else None, observed=True)
            log_probs, entropy = found[-2:]
            loss = found[0] if one_pass else with_observations(log_probs, entropy, slice(0, active + count)).sum()
            totals.add_observations(with_observations.sum, count)
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
