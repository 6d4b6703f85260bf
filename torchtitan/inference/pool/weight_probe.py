"""Do actors compute what the trainer computes? The guard against weights that are stale or torn without a sign of it.

An engine may pack, quantise or copy its weights where they cannot be read. So of every published version the
trainer computes the log-probs of one fixed text, and every actor that says it serves that very version has to give the
same. One that does not is evicted, and the reason says so. Actors that look at their own weights (digest) are only
asked whether they do.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.actor_client import ActorError, AnswerRefused, VerifiedVersions
from torchtitan.inference.engines.registry import engine_of
from torchtitan.inference.pool.actor import Actor
from torchtitan.inference.types import GenerateRequest, SamplingParameters, ScoredTokens
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.utils.json_lines import EventLog
from torchtitan.utils.machine import has_gpu

logger = logging.getLogger(__name__)

POLL_S = 0.1
# Versions that actors may still serve; what is older is compared with nothing.
KEPT_VERSIONS = 32
# An actor that cannot be asked for so long is reported.
SILENT_S = 60.0
# Tokens are sampled in so many places of the probe, and so many in each. The mean of so few may be several times the
# mean of a batch.
PLACES, SAMPLES, FEW_SAMPLES = 4, 2, 4.0
# The probe has at most 64 tokens, of which a few with other experts may count for twice what they do in a batch.
FEW_TOKENS = 2.0
# So many wrong answers in a row are no accident any more.
MAX_FAILURES = 3
# The mean difference that other kernels may make in float32, and the error of a log-prob at temperature 1 that grows
# with 1 / temperature.
FLOAT32, FLOAT32_ERROR = 0.001, 5e-5
# Nats by which a token of an ordinary text is unlikely to a model of language, at most on average.
LIKELY_TEXT = 4.0
# Tokens that are sampled are less certain than those of a text, and rounding moves them further: up to 1.45 times in
# random networks of 3 to 16 layers with logits of several units.
SAMPLED = 1.5


def probe_tolerance(config: JobConfig) -> float:
    """weight_sync.probe_tolerance, or the mean difference of log-probs, in nats, that rounding explains in an ordinary
    text at temperature 1."""
    return config.weight_sync.probe_tolerance or _rounding(config) + FEW_TOKENS * _other_experts(config)


def probe_tolerance_of(config: JobConfig, expected: Sequence[float]) -> float:
    """The tolerance for a text whose log-probs the trainer gives as `expected`. In a text that a model finds unlikely,
    such as prose after a training on sums, logits lie further apart, and rounding moves log-probs by more: a tiny
    policy that gave the text -6 nats a token differed by 0.028 in bfloat16, and by 0.046 after seven steps."""
    tolerance = probe_tolerance(config)
    if config.weight_sync.probe_tolerance > 0 or not _rounds_to_bfloat16(config) or not expected:
        return tolerance
    mean = -sum(expected) / len(expected)
    return tolerance * max(1.0, mean / LIKELY_TEXT)


def sampling_tolerance(config: JobConfig, replays: bool = True) -> float:
    """The mean difference of log-probs, in nats, that rounding explains in tokens that were sampled at the run's
    temperature: the same error of a logit counts for more where the temperature is low. weight_sync.probe_tolerance
    takes the place of what is known of types and layers.

    replays: whether the trainer computes these tokens with the engine's experts where grpo.routing_replay has it do so.
    """
    temperature = min(config.rollout.temperature or 1.0, 1.0)
    if config.weight_sync.probe_tolerance > 0:
        return config.weight_sync.probe_tolerance / temperature
    others = 0.0 if replays and config.grpo.routing_replay else _other_experts(config)
    if not _rounds_to_bfloat16(config):
        return max(FLOAT32, FLOAT32_ERROR / temperature) + others
    return (SAMPLED * _rounding(config) + others) / temperature


def probes_samples(config: JobConfig) -> bool:
    """Whether actors sample behind the probe, and the trainer says what their log-probs have to be.

    Digests prove weights, and not what is computed with them. In a run that is a version ahead of its samples, no batch
    but the first shows that. The actors that the run starts itself with the trainer's own layers are spared."""
    how = config.verification
    if how != "digest":
        return how == "probe"
    return _has_actors_of_others(config) or not engine_of(config).features.trainers_layers


def _has_actors_of_others(config: JobConfig) -> bool:
    return bool(config.inference.servers) or config.inference.discover


def _rounds_to_bfloat16(config: JobConfig) -> bool:
    return "bfloat16" in (config.inference.dtype, config.training.mixed_precision_param, config.training.dtype)


def _rounding(config: JobConfig) -> float:
    """In bfloat16 a layer rounds about four times by up to u = 2**-9 of a value, evenly spread: u / sqrt(3) each, and
    sqrt(4 L) of that after L layers, in the trainer and in the engine. Values that move by a share of e move
    log-probs by e times how far logits lie apart where there is probability, some 2 nats. Of the difference of two
    such errors the mean size is 0.8 · sqrt(2) of one: 0.005 · sqrt(L), doubled. An engine that rounds its logits, too,
    adds half a step of bfloat16 between 8 and 16: 0.03.
    """
    if not _rounds_to_bfloat16(config):
        return FLOAT32
    layers = read_shape(config).num_hidden_layers
    # See EXACT_HEAD in the engines' modules; servers that run already were started by others.
    rounds_logits = config.inference.dtype == "bfloat16" and (_has_actors_of_others(config) or not has_gpu())
    return 0.01 * math.sqrt(layers) + (0.03 if rounds_logits else 0.0)


def _other_experts(config: JobConfig) -> float:
    """What tokens add that rounding gives other experts in the engine than in the trainer. Random mixtures of 2 to 16
    layers, whose routers are as uncertain as can be, have shown 0.01 to 0.037 · sqrt(L) nats in bfloat16 on average,
    and up to 0.069 · sqrt(L) in one text of 64 tokens; with replayed experts, nothing. The number of experts matters
    little: of 128 (8 a token), five to ten times as many tokens change one as of 8 (2 a token), and each changes less.
    In float32 such a token is rare."""
    if not config.model.flavor and not config.model.hf_assets_path:
        return 0.0
    args = read_shape(config)
    if args.experts is None:
        return 0.0
    return 0.035 * math.sqrt(args.num_hidden_layers) if _rounds_to_bfloat16(config) else 0.01


def sampled_behind(token_ids: Sequence[int]) -> list[int]:
    """The lengths of the beginnings of the probe behind which actors sample a token."""
    return sorted({max(1, len(token_ids) * part // PLACES) for part in range(1, PLACES + 1)})


class ProbeAnswers:
    """What the trainer says of the probe, by version: the trainer's thread writes, the pool's loop reads."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._log_probs: dict[int, list[float]] = {}
        self._following: tuple[int, np.ndarray] | None = None
        """Of the newest version only: there is a number for every token of the vocabulary"""

    def expect(
        self, version: int, token_ids: list[int], log_probs: list[float], following: np.ndarray | None = None
    ) -> None:
        """The log-probs of these tokens but the first, each given those before it, with the weights of `version`; empty
        where actors are not asked for them.
        following [places, vocabulary]: those of every token behind sampled_behind(token_ids), at the run's
        temperature."""
        self.token_ids = token_ids
        self._log_probs[version] = log_probs
        self._following = None if following is None else (version, following)
        for old in sorted(self._log_probs)[:-KEPT_VERSIONS]:
            del self._log_probs[old]

    def following(self, version: int | None) -> np.ndarray | None:
        """None where the trainer has not said, or something newer since."""
        newest = self._following
        return newest[1] if newest is not None and newest[0] == version else None

    def under(self, version: int) -> list[float] | None:
        """None where the trainer has not said, or not lately."""
        return self._log_probs.get(version)


@dataclass
class _Seen:
    """What is known of one process of an actor."""

    incarnation: int
    version: int = -1
    """Newest that was found equal"""
    settled: bool = False
    """There is nothing to ask it, or nothing any more"""
    is_known: bool = False
    """It has said what it is able to do"""
    asks_score: bool = False
    doubted: bool = False
    """The last answer was wrong"""
    samples_right: bool = False
    """What it says of tokens that it samples was found right: that does not depend on the version"""
    verified: VerifiedVersions = field(default_factory=VerifiedVersions)
    """What it had found of its own weights at the last look"""
    silent_since: float | None = None
    told_silent: bool = False


class ParityGuard:
    """Compares `actors` with `answers`. Belongs to one asyncio loop."""

    def __init__(self, config: JobConfig, epoch: str, events: EventLog, answers: ProbeAnswers):
        self._epoch, self._events, self._answers = epoch, events, answers
        self._how, self._probes_samples = config.verification, probes_samples(config)
        self._config = config
        # The trainer chooses the experts of the probe's tokens by itself.
        self._samples_tolerance = FEW_SAMPLES * sampling_tolerance(config, replays=False)
        rollout = config.rollout
        self._sampling = SamplingParameters(
            1, SAMPLES, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p
        )
        self._seen: dict[str, _Seen] = {}
        self._failures: Counter[str] = Counter()
        self.probes = 0
        self.newest = 0
        """Newest version that an actor was found to hold"""
        self._verified: Counter[str] = Counter()
        """By actor: versions that were found to be what the trainer sent"""
        self._unverified: Counter[str] = Counter()
        """By actor: versions that it could not look at in time"""

    async def run(self, actors: Sequence[Actor]) -> None:
        """Look at all actors, which may change, until cancelled; at each by itself: one that never answers hides no
        other."""
        if self._how == "off":
            return
        watches: dict[Actor, asyncio.Task[None]] = {}
        try:
            while True:
                for actor in set(watches) - set(actors):
                    watches.pop(actor).cancel()
                    self._seen.pop(actor.name, None)
                for actor in actors:
                    if actor not in watches:
                        watches[actor] = asyncio.create_task(self._watch(actor))
                    elif watches[actor].done():
                        watches[actor].result()
                await asyncio.sleep(POLL_S)
        except Exception as error:
            self._events.write("parity_guard_failed", level=logging.ERROR, reason=repr(error))
            raise
        finally:
            for watch in watches.values():
                watch.cancel()
            await asyncio.gather(*watches.values(), return_exceptions=True)

    async def _watch(self, actor: Actor) -> None:
        """Look at one actor again and again; where that fails for an unforeseen reason each time, it is given up."""
        broken = 0
        while broken < MAX_FAILURES:
            try:
                await self._check_actor(actor)
                broken = 0
            except Exception as error:
                broken += 1
                self._events.write("parity_guard_failed", level=logging.ERROR, actor=actor.name, reason=repr(error))
                if broken == MAX_FAILURES:
                    await self._give_up(actor, f"its weights cannot be verified ({error!r}, {broken} times in a row)")
            await asyncio.sleep(POLL_S)

    async def _give_up(self, actor: Actor, reason: str) -> None:
        try:
            await actor.distrust(actor.version or 0, reason, forever=True)
        except Exception as error:  # it is out; what failed is ending its process
            logger.error("%s was given up, but: %r", actor.name, error)

    async def _check_actor(self, actor: Actor) -> None:
        seen = self._seen.get(actor.name)
        if seen is None or seen.incarnation != actor.incarnation:
            seen = self._seen[actor.name] = _Seen(actor.incarnation)
        self._note_digests(actor, seen)
        if seen.settled or not actor.serves(0):
            return
        try:
            if not seen.is_known:
                await self._learn(actor, seen)
            elif (
                seen.asks_score
                and actor.version is not None
                and actor.version > seen.version
                and self._answers.under(actor.version)
            ):
                await self._compare(actor, seen, await actor.score(self._answers.token_ids))
            may_sample = seen.version >= 0 or (self._how == "digest" and not seen.settled)
            if may_sample and not seen.samples_right:
                await self._compare_samples(actor, seen)
            seen.silent_since = None
        except AnswerRefused as error:
            reason = f"its answer to the probe cannot be right: {error}"
            if not seen.doubted:
                self._not_verified(actor, reason)
            await self._doubt(actor, seen, actor.version or 0, reason, {"reason": reason})
        except ActorError as error:
            self._note_silence(actor, seen, str(error))

    async def _learn(self, actor: Actor, seen: _Seen) -> None:
        able = await actor.capabilities()
        seen.is_known = True
        if self._how == "digest":
            seen.settled = not self._probes_samples
            if not able.digest:
                self._not_verified(actor, "it does not verify its own weights, as weight_sync.verify = digest asks")
        elif able.score:
            seen.asks_score = True
        else:
            seen.settled = True
            self._not_verified(actor, f"{able.engine} {able.version} cannot score tokens here")

    def _note_digests(self, actor: Actor, seen: _Seen) -> None:
        """Count what an actor that looks at its own weights has found since the last time. A new connection counts from
        0 again."""
        found, before = actor.verified, seen.verified
        if self._how != "digest" or found is None or found == before:
            return
        seen.verified = replace(found)
        self._verified[actor.name] += found.matched - (before.matched if found.matched >= before.matched else 0)
        unfinished = found.unfinished - (before.unfinished if found.unfinished >= before.unfinished else 0)
        if unfinished > 0:
            self._unverified[actor.name] += unfinished
            last = "none yet" if found.version is None else f"version {found.version}"
            reason = f"{unfinished} more could not be looked at before the next version came; last whole: {last}"
            self._not_verified(actor, reason)

    @property
    def asks_actors(self) -> bool:
        """Whether actors look at their own weights, and say what they have found."""
        return self._how == "digest"

    def summarize(self, actors: Sequence[Actor]) -> None:
        """Say at the end of a run how many versions were verified on which actor."""
        if self._how == "off":
            return
        for actor in actors:
            if (seen := self._seen.get(actor.name)) is not None:
                self._note_digests(actor, seen)
            verified = self._verified[actor.name]
            self._events.write(
                "weights_verified", level=logging.INFO if verified else logging.WARNING, actor=actor.name,
                by=self._how, versions=verified, not_verified=self._unverified[actor.name],
            )  # fmt: skip

    async def _compare(self, actor: Actor, seen: _Seen, scored: ScoredTokens) -> None:
        expected = self._answers.under(scored.version)
        if scored.epoch != self._epoch or expected is None or seen.incarnation != actor.incarnation:
            return
        difference, place = mean_difference(expected, scored.log_probs)
        tolerance = probe_tolerance_of(self._config, expected)
        if difference <= tolerance:
            if seen.version < 0:
                self._events.write("weights_probed", actor=actor.name, version=scored.version, difference=difference)
            seen.version, seen.doubted = max(seen.version, scored.version), False
            self._failures[actor.name] = 0
            self._verified[actor.name] += 1
            self.probes += 1
            self.newest = max(self.newest, scored.version)
            return
        reason = (
            f"it says that it serves version {scored.version}, but its log-probs of the probe differ from the "
            f"trainer's by {difference:.3g} nats on average (weight_sync.probe_tolerance: {tolerance:.3g}), most "
            f"at token {place + 1}: its weights are stale or torn"
        )
        fields = {"difference": difference, "tolerance": tolerance}
        await self._doubt(actor, seen, scored.version, reason, fields)

    async def _compare_samples(self, actor: Actor, seen: _Seen) -> None:
        """Have the actor sample behind parts of the probe as it samples for the run, and compare what it says of these
        tokens: scores of given tokens are at temperature 1 in every engine."""
        version = actor.version
        following = self._answers.following(version)
        if version is None or following is None:
            return
        token_ids, differences = self._answers.token_ids, []
        for length, log_probs in zip(sampled_behind(token_ids), following, strict=True):
            sampling = replace(self._sampling, seed=length)
            request = GenerateRequest(f"probe-{actor.name}-{version}-{length}", token_ids[:length], sampling)
            for completion in await actor.generate(request):
                if [span.version for span in completion.spans] != [version]:
                    return  # a newer version has come meanwhile, and the next look compares that
                kept = (completion.kept_token_ids or [[]])[0]
                # Truncation leaves the probability of the others to those that are kept.
                rest = float(np.logaddexp.reduce(log_probs[kept])) if kept else 0.0
                expected = float(log_probs[completion.token_ids[0]]) - rest
                differences.append(abs(completion.log_probs[0] - expected))
        difference = sum(differences) / len(differences)
        if difference <= self._samples_tolerance:
            seen.samples_right, seen.doubted = True, False
            seen.settled = not seen.asks_score
            self._failures[actor.name] = 0
            self._events.write("samples_probed", actor=actor.name, version=version, difference=difference)
            return
        right, other_cause = "its scores of the probe do not", ""
        if self._how == "digest":
            right = "it proves that its weights are those that were sent"
            other_cause = ", or its rope_theta or another part of its config.json is not the run's"
        reason = (
            f"its log-probs of {len(differences)} tokens that it sampled behind the probe differ from the trainer's by "
            f"{difference:.3g} nats on average, by more than {self._samples_tolerance:.3g}, though {right}: it reports "
            "other log-probs than those that it sampled with (vLLM needs --logprobs-mode processed_logprobs), or it "
            f"changes rollout.temperature = {self._sampling.temperature:g} or another sampling option{other_cause}"
        )
        fields = {"difference": difference, "bound": self._samples_tolerance, "tokens": len(differences)}
        await self._doubt(actor, seen, version, reason, {**fields, "reason": reason}, "log_probs_differ")

    async def _doubt(
        self,
        actor: Actor,
        seen: _Seen,
        version: int,
        reason: str,
        fields: Mapping[str, Any],
        kind: str = "weights_differ",
    ) -> None:
        """The answer to the probe was wrong. A version that came while it was scoring may have had its part in the
        first such answer; the next one tells."""
        if not seen.doubted:
            seen.doubted = True
            return
        self._failures[actor.name] += 1
        failures = self._failures[actor.name]
        self._events.write(kind, level=logging.ERROR, actor=actor.name, version=version, **fields, failures=failures)
        # How it samples does not depend on the version: waiting for a newer one would be in vain.
        distrusted = version if kind == "weights_differ" else -1
        await actor.distrust(distrusted, reason, forever=failures >= MAX_FAILURES)

    def _note_silence(self, actor: Actor, seen: _Seen, reason: str) -> None:
        # Applying, restarting, overloaded: the next look will do. For good it is no proof of anything.
        now = time.monotonic()
        seen.silent_since = seen.silent_since or now
        logger.debug("%s was not probed: %s", actor.name, reason)
        if now - seen.silent_since > SILENT_S and not seen.told_silent:
            seen.told_silent = True
            self._not_verified(actor, f"no answer to the probe for {SILENT_S:g} s: {reason}")

    def _not_verified(self, actor: Actor, reason: str) -> None:
        self._events.write("weights_not_verified", level=logging.WARNING, actor=actor.name, reason=reason)


def mean_difference(expected: Sequence[float], found: Sequence[float]) -> tuple[float, int]:
    """Mean absolute difference, and where the largest is; infinite where lengths differ or a number is none."""
    if len(expected) != len(found) or not expected or not all(map(math.isfinite, found)):
        return math.inf, 0
    differences = [abs(value - other) for value, other in zip(expected, found, strict=True)]
    return sum(differences) / len(differences), max(range(len(differences)), key=differences.__getitem__)
