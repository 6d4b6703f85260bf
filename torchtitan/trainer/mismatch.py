"""Whether the engine computes what the trainer does: the text to probe it with, and what a batch's log-probs show.

Tokens of the version that is trained are scored by the trainer anyway. What an actor said of them may differ from that
by rounding alone; who differs by more is out, and without an actor the run stops. What may be due to old samples is a
warning (ALARM), and a point to stop at (grpo.mismatch_kl_stop).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.pool.weight_probe import probes_samples, sampling_tolerance
from torchtitan.rollout.conversation.tokenizer import Tokenizer

WHAT_TO_LOOK_AT = (
    "Look at mismatch_kl/same_version in metrics.jsonl, the part that staleness does not explain. If it is large, the "
    "engine does not compute what the trainer computes (inference.dtype, weight_sync.verify, weights_differ in "
    "events.jsonl, sampling options that the trainer does not know). If it is small, samples are too old for the "
    "learning rate (rollout.max_staleness, optimizer.lr, grpo.recompute_old_log_probs)"
)
# Ordinary text, as models are certain of much of it: rounding is small where log-probs are.
TEXT = (
    "12+34=46. A train travels 60 miles in 2 hours, so its average speed is 60/2=30 miles per hour. "
    "What is 7*8-6? First 7*8=56, then 56-6=50."
)
# A divergence in nats: rounding stays far below it, another model or sampling option does not.
ALARM = 0.1
MAX_TOKENS = 64
LEAST_TOKENS = 8
# Fewer tokens say little: rounding has a long tail.
LEAST_JUDGED = 64

Figures = Mapping[str, float | None]


@dataclass(frozen=True)
class ActorFigures:
    """What a batch shows of one actor, from tokens that it sampled with the version that the batch trains."""

    difference: float
    """Mean absolute difference between its log-probs and the trainer's, in nats; NaN where one is no number"""
    tokens: int


def probe_tokens(config: JobConfig, vocabulary: int) -> list[int]:
    """Token ids of the text that the trainer and all actors have to agree on (inference/pool/weight_probe.py), the same
    on every rank; empty where nothing is probed, neither scores nor samples."""
    if not config.has_engines or not probes_samples(config):
        return []
    limit = max(2, min(MAX_TOKENS, config.training.seq_len - 1))
    tokens = Tokenizer(config.model.hf_assets_path).encode(TEXT)[:limit]
    if len(tokens) < min(LEAST_TOKENS, limit):
        tokens = [(7 * place + 3) % vocabulary for place in range(limit)]
    return tokens


def alarm(config: JobConfig, figures: Figures) -> dict[str, float | None] | None:
    """The fields of an event where a batch's mismatch is more than old weights explain, or no number at all.

    figures: those of the batch's rollouts and of its training. Tokens of the trained version may diverge by
    ALARM, all together by so much and what staleness adds.
    """
    grpo = config.grpo
    staleness = figures.get("staleness/mean") or 0.0
    if not grpo.recompute_old_log_probs:
        # A minibatch meets the policy that those before it have moved, by half a version on average.
        staleness += 0.5 * (1 - 1 / grpo.num_minibatches)
    bound = limit_with_staleness(ALARM, staleness, figures.get("mismatch_kl/drift"))
    same_version = _above(figures.get("mismatch_kl/same_version"), ALARM)
    if not (same_version or _above(figures.get("mismatch_kl"), bound)):
        return None
    names = ("mismatch_kl", "mismatch_kl/same_version", "mismatch_kl/drift", "staleness/mean")
    fields = {name: figures.get(name) for name in names}
    fields["limit"] = ALARM if same_version else bound
    return fields


def limit_with_staleness(limit: float, staleness: float, drift: float | None) -> float:
    """The divergence that is allowed after `staleness` versions, each of which moves the policy by a divergence of
    `drift`; where that was not measured, each may move it by the limit itself.

    A divergence is about half the mean square of the log-ratios. It is the ratios that add up, so its roots do.
    """
    step = drift if drift is not None and math.isfinite(drift) else limit
    return (math.sqrt(limit) + staleness * math.sqrt(step)) ** 2


def reason_to_stop(
    config: JobConfig, figures: Figures, actors: Mapping[str, ActorFigures], version: int
) -> UserError | None:
    """Why a run must not go on after this batch. The same on every rank, as the figures are."""
    value, limit = figures.get("mismatch_kl"), config.grpo.mismatch_kl_stop
    if limit > 0 and _above(value, limit):
        text = f"stopped: mismatch_kl of the batch that made version {version} is {value:.4g}"
        return UserError(f"{text}, above grpo.mismatch_kl_stop = {limit:g}. {WHAT_TO_LOOK_AT}")
    if not config.is_colocated:
        return None
    for name, reason in judge_actors(config, actors, version - 1).items():
        if reason:
            # An engine in the trainer's own processes cannot be evicted.
            return UserError(f"stopped: the engine in the trainer's processes ({name}) is wrong: {reason}")
    return None


def judge_actors(config: JobConfig, actors: Mapping[str, ActorFigures], version: int) -> dict[str, str]:
    """Return, for every actor of which a batch of `version` shows enough, why its log-probs are wrong: empty where they
    differ from the trainer's by no more than rounding."""
    if config.verification == "off":
        return {}
    bound = sampling_tolerance(config)
    judged = {name: found for name, found in actors.items() if found.tokens >= LEAST_JUDGED}
    return {name: _reason(config, found, bound, version) for name, found in judged.items()}


def _reason(config: JobConfig, found: ActorFigures, bound: float, version: int) -> str:
    if not _above(found.difference, bound):
        return ""
    return (
        f"its log-probs of {found.tokens} tokens that it sampled with version {version} differ from the trainer's by "
        f"{found.difference:.3g} nats on average, more than the {bound:.3g} that rounding explains. Likely causes: it "
        "reports other log-probs than those that it sampled with (vLLM needs --logprobs-mode processed_logprobs), it "
        f"changes rollout.temperature = {config.rollout.temperature:g} or another sampling option, its rope_theta or "
        "another part of its config.json is not the run's, or its weights are stale or of another type than "
        f"inference.dtype = {config.inference.dtype}. weight_sync.probe_tolerance moves the bound, and "
        "weight_sync.verify = off turns this check off"
    )


def _above(value: float | None, limit: float) -> bool:
    # NaN is above every limit.
    return value is not None and not value <= limit
