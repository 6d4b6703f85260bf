"""What numbers and names every key takes on its own, as data. Combinations are in validate.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchtitan.config.names import ADVANTAGES, CORRECTIONS, DIVERGENCES, LOSS_TYPES


@dataclass(frozen=True)
class Range:
    """An interval of numbers; `also` names one value outside it that has a meaning of its own (-1, 0)."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    also: float | None = None

    def __contains__(self, value: float) -> bool:
        if self.also is not None and value == self.also:
            return True
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        low = f"greater than {self.low:g}" if self.low_open else f"at least {self.low:g}"
        if self.high == math.inf:
            text = low
        elif self.low_open or self.high_open:
            text = f"{low} and {'less than' if self.high_open else 'at most'} {self.high:g}"
        else:
            text = f"{self.low:g} to {self.high:g}"
        return text if self.also is None else f"{self.also:g}, or {text}"


COUNT = Range(1)
OR_NONE = Range(0)
POSITIVE = Range(0, low_open=True)
# Ranks leave by themselves within the save deadline; the launcher kills what is left a little later.
MAX_SAVE_DEADLINE_S = 600

RANGES: dict[str, Range] = {
    "profiling.profile_freq": COUNT,
    "model.logprob_head_budget_mb": OR_NONE,
    "lora.rank": OR_NONE,
    "lora.alpha": POSITIVE,
    "lora.dropout": Range(0, 1, high_open=True),
    "metrics.log_freq": COUNT,
    "metrics.completions_per_step": Range(-1),
    "optimizer.lr": Range(0, 1),
    "optimizer.beta1": Range(0, 1, high_open=True),
    "optimizer.beta2": Range(0, 1, high_open=True),
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": OR_NONE,
    "lr_scheduler.warmup_steps": OR_NONE,
    "lr_scheduler.min_lr_factor": Range(0, 1),
    "training.steps": COUNT,
    "training.local_batch_size": COUNT,
    "training.global_batch_size": Range(1, also=-1),
    "training.seq_len": Range(2),
    "training.tokens_per_micro_batch": COUNT,
    "training.max_norm": OR_NONE,
    "training.max_skipped_steps": COUNT,
    "training.seed": Range(0, 2**32 - 1),
    "training.threads": OR_NONE,
    "parallelism.data_parallel_replicate_degree": COUNT,
    "parallelism.data_parallel_shard_degree": Range(1, also=-1),
    "parallelism.tensor_parallel_degree": COUNT,
    "activation_checkpoint.selective_ac_option": COUNT,
    "comm.init_timeout_seconds": COUNT,
    "comm.train_timeout_seconds": COUNT,
    "checkpoint.interval": COUNT,
    "checkpoint.keep_latest_k": OR_NONE,
    "checkpoint.load_step": Range(-1),
    "checkpoint.save_deadline_s": Range(0, MAX_SAVE_DEADLINE_S, low_open=True),
    "grpo.group_size": Range(2),
    "grpo.epsilon_low": Range(0, 1),
    "grpo.epsilon_high": OR_NONE,
    "grpo.delta": Range(1, low_open=True, also=0),
    "grpo.importance_cap": POSITIVE,
    "grpo.icepop_low": OR_NONE,
    "grpo.icepop_high": POSITIVE,
    "grpo.cispo_cap": POSITIVE,
    "grpo.sapo_temperature_positive": POSITIVE,
    "grpo.sapo_temperature_negative": POSITIVE,
    "grpo.product_mask_low": Range(0, 1),
    "grpo.product_mask_high": Range(1, also=0),
    "grpo.negative_mask_threshold": OR_NONE,
    "grpo.kl_coefficient": OR_NONE,
    "grpo.reference_ema_decay": Range(0, 1, high_open=True),
    "grpo.reference_sync_interval": COUNT,
    "grpo.entropy_coefficient": OR_NONE,
    "grpo.entropy_top_share": Range(0, 1, low_open=True),
    "grpo.geometric_mask_low": Range(0, 1),
    "grpo.geometric_mask_high": Range(1, also=0),
    "grpo.num_minibatches": COUNT,
    "grpo.num_iterations": COUNT,
    "grpo.mismatch_kl_alarm": OR_NONE,
    "grpo.mismatch_kl_stop": OR_NONE,
    "rollout.held_out_fraction": Range(0, 1, high_open=True),
    "rollout.max_completion_tokens": COUNT,
    "rollout.temperature": POSITIVE,
    "rollout.top_p": Range(0, 1, low_open=True),
    "rollout.top_k": OR_NONE,
    "rollout.min_p": Range(0, 1, high_open=True),
    "rollout.max_staleness": Range(0, 8),
    "rollout.max_groups_in_flight": OR_NONE,
    "rollout.data_timeout_s": POSITIVE,
    "rewards.num_workers": COUNT,
    "rewards.timeout_s": POSITIVE,
    "rewards.memory_limit_mb": Range(16),
    "inference.num_actors": COUNT,
    "inference.tensor_parallel_size": COUNT,
    "inference.engine_memory_gb": OR_NONE,
    "inference.sleep_level": Range(0, 2),
    "inference.sleep_timeout_s": POSITIVE,
    "inference.threads_per_actor": OR_NONE,
    "inference.max_sequences": COUNT,
    "inference.drain_timeout_s": POSITIVE,
    "inference.startup_timeout_s": POSITIVE,
    "inference.request_timeout_s": POSITIVE,
    "inference.health_interval_s": POSITIVE,
    "inference.health_timeout_s": POSITIVE,
    "inference.max_restarts": OR_NONE,
    "inference.max_retries": OR_NONE,
    "weight_sync.verify_every": COUNT,
    "weight_sync.probe_tolerance": OR_NONE,
    "weight_sync.streams": Range(1, 16),
    "weight_sync.chunk_bytes": Range(1024, 2**30),
    "weight_sync.chunk_timeout_s": POSITIVE,
    "weight_sync.full_every": COUNT,
    "weight_sync.relay_fanout": COUNT,
    "weight_sync.num_slots": Range(2),
    "weight_sync.bucket_bytes": Range(1024, 2**30),
    "weight_sync.join_timeout_s": POSITIVE,
    # Also the silence after which a courier is lost: two of its heartbeats.
    "weight_sync.offer_timeout_s": Range(1),
    "weight_sync.progress_timeout_s": POSITIVE,
    "weight_sync.apply_timeout_s": POSITIVE,
    "weight_sync.blocking_timeout_s": POSITIVE,
    "weight_sync.snapshot_timeout_s": POSITIVE,
    "weight_sync.evict_after_versions": COUNT,
    "weight_sync.max_restarts": OR_NONE,
    "fault_injection.seed": OR_NONE,
    "eval.interval": OR_NONE,
    "eval.num_prompts": COUNT,
    "eval.samples_per_prompt": COUNT,
    "eval.temperature": POSITIVE,
    "eval.timeout_s": POSITIVE,
}

# Names that one's own `package.module:function` may take the place of.
OWN_FUNCTIONS = frozenset({"grpo.loss_type"})

# Names that are open for extension elsewhere and therefore plain strings in job_config.py.
NAMES: dict[str, tuple[str, ...]] = {
    "grpo.loss_type": LOSS_TYPES,
    "grpo.advantage": ADVANTAGES,
    "grpo.off_policy_correction": CORRECTIONS,
    "grpo.kl_estimator": DIVERGENCES,
    "inference.backend": ("embedded", "vllm", "sglang"),
    "weight_sync.transport": ("tcp", "disk", "ipc", "nccl"),
}
