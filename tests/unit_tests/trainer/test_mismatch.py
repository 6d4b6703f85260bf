"""The alarm tells an engine that computes something else from samples that are merely old."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trajectories import completion_of
from tests.unit_tests.trainer.test_gradient_independence import make_batch
from tests.unit_tests.trainer.test_policy_trainer import SpiedTrainer, inner_steps, run_config
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.types import VersionSpan
from torchtitan.models.decoder import Decoder
from torchtitan.models.parallelize import build_policy
from torchtitan.rollout.types import Batch
from torchtitan.trainer import mismatch
from torchtitan.trainer.mismatch import ALARM
from torchtitan.trainer.policy_trainer import PolicyTrainer


def sampled_by(trainer: PolicyTrainer, engine: Decoder, seed: int, version: int, trained_at: int) -> Batch:
    """A batch whose log-probs an engine with these weights has reported."""
    batch = make_batch(seed)
    batch.version = trained_at
    policy, trainer.policy = trainer.policy, engine
    for sample in batch.samples:
        scored = trainer.score(sample.prompt_ids + sample.completion_ids)
        completion = completion_of(sample)
        completion.log_probs = scored[len(sample.prompt_ids) - 1 :]
        completion.spans = [VersionSpan("e", version, 0, len(sample.completion_ids))]
    trainer.policy = policy
    return batch


@pytest.mark.parametrize(("decoupled", "rate"), [(True, 0.01), (False, 0.005)])
def test_old_samples_raise_no_alarm_and_an_engine_with_other_weights_does(
    tiny_checkpoint: Callable[..., Path], decoupled: bool, rate: float
) -> None:
    config = inner_steps(run_config(tiny_checkpoint()), iterations=1)
    config.grpo.recompute_old_log_probs, config.optimizer.lr = decoupled, rate
    trainer = SpiedTrainer(config)
    first_version = copy.deepcopy(trainer.policy)
    metrics = trainer.train_batch(sampled_by(trainer, trainer.policy, 0, 0, trained_at=0)).metrics
    assert metrics["mismatch_kl/same_version"] == pytest.approx(0.0, abs=1e-6)
    # In direct mode the second minibatch meets a policy that the first has moved.
    assert (metrics["mismatch_kl"] < 1e-6) is decoupled
    assert mismatch.alarm(config, metrics | {"staleness/mean": 0.0}) is None
    weights = copy.deepcopy(trainer.policy.state_dict())

    def figures(engine: Decoder, version: int) -> dict[str, float | None]:
        trainer.policy.load_state_dict(weights)
        metrics = trainer.train_batch(sampled_by(trainer, engine, 1, version, trained_at=1)).metrics
        return metrics | {"staleness/mean": 1.0 - version}

    stale = figures(first_version, 0)
    assert stale["mismatch_kl"] > ALARM and stale["mismatch_kl/same_version"] is None
    assert (stale["mismatch_kl/drift"] is not None) is decoupled
    assert mismatch.alarm(config, stale) is None

    other = build_policy(config, trainer.dims)
    for parameter in other.parameters():
        parameter.data = -parameter.data.roll(1, 0)
    for version in (0, 1):
        wrong = figures(other, version)
        fields = mismatch.alarm(config, wrong)
        assert fields is not None, "the engine holds weights of no version at all"
        assert fields["mismatch_kl"] == wrong["mismatch_kl"] > fields["limit"] >= ALARM


def test_the_same_version_has_no_excuse() -> None:
    figures = {"mismatch_kl": 0.12, "mismatch_kl/same_version": 0.11, "mismatch_kl/drift": 1.0, "staleness/mean": 0.5}
    fields = mismatch.alarm(JobConfig(), figures)
    assert fields is not None and fields["limit"] == 0.1
    assert mismatch.alarm(JobConfig(), figures | {"mismatch_kl/same_version": 0.001}) is None


@pytest.mark.parametrize("drift", [None, 0.0, 0.2, float("nan"), float("inf")])
def test_the_limit_grows_with_staleness_from_what_was_set(drift: float | None) -> None:
    limits = [mismatch.limit_with_staleness(0.1, staleness, drift) for staleness in (0.0, 1.0, 2.0)]
    assert limits[0] == pytest.approx(0.1) and limits == sorted(limits)
    assert all(limit < 10.0 for limit in limits)


def test_actors_are_judged_by_requests_that_were_sent_when_they_held_the_trained_version(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """What was sent before may have computed its prompt with the version before."""
    trainer = SpiedTrainer(run_config(tiny_checkpoint()))
    batch = sampled_by(trainer, trainer.policy, 0, 0, trained_at=0)
    for number, completion in enumerate(batch.completions):
        completion.actor, completion.asked_at = f"actor-{number % 3}", (0, -1, None)[number % 3]
    judged = sum(len(completion.token_ids) for completion in batch.completions if completion.actor == "actor-0")
    figures = trainer.train_batch(batch).actors
    assert figures.keys() == {"actor-0"} and figures["actor-0"].tokens == judged
    assert figures["actor-0"].difference == pytest.approx(0.0, abs=1e-5)
    batch.forget_actors()
    assert trainer.train_batch(batch).actors == {}
