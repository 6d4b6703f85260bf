"""The guard against actors that serve something else than they say, with actors that lie in known ways."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.patience import eventually
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import ActorError, ActorHealth, AnswerRefused, VerifiedVersions
from torchtitan.inference.answer_checks import MixtureShape
from torchtitan.inference.engines.registry import engine_of
from torchtitan.inference.pool import weight_probe as parity
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.inference.types import (
    Capabilities,
    Completion,
    GenerateRequest,
    Routes,
    SamplingParameters,
    ScoredTokens,
    Tag,
    VersionSpan,
)
from torchtitan.models.decoder import Decoder
from torchtitan.models.layers import mixture
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.shape.mixture_args import ExpertArgs
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.trainer import mismatch
from torchtitan.utils.json_lines import EventLog, read_json_lines
from torchtitan.weight_sync.actor_state import ActorState

IDS = [2, 3, 4, 5]


def truth(version: int) -> list[float]:
    return [-1.0 - 0.1 * version, -0.5 - 0.05 * version, -2.0 + 0.02 * version]


class Liar:
    """The handler of an actor that says it serves the newest version and computes with `holds`."""

    def __init__(self, says: int = 0):
        self.says = says
        self.holds: int | None = None
        """None: what it says"""
        self.noise = 0.0
        self.able = Capabilities("vllm", "0.32.0", score=True)
        self.fails = False
        self.breaks: Exception | None = None
        self.hangs = False
        self.scored: list[int] = []
        self.connections = 0

    async def health(self, timeout_s: float) -> ActorHealth:
        return ActorHealth(ActorState.READY, True, "e", self.says)

    async def offers(self, timeout_s: float, weights: bool) -> None:
        """It does not say what it is."""

    async def capabilities(self, timeout_s: float) -> Capabilities:
        return self.able

    async def connect_weights(self, *_: object) -> None:
        self.connections += 1

    async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
        return [Completion([1], [-0.1], "stop", [VersionSpan("e", self.says, 0, 1)])] * request.sampling.n

    async def score(self, token_ids: list[int], timeout_s: float) -> ScoredTokens:
        assert token_ids == IDS
        if self.fails:
            raise ActorError("score", "busy")
        if self.breaks is not None:
            raise self.breaks
        if self.hangs:
            await asyncio.Event().wait()
        self.scored.append(self.says)
        values = truth(self.says if self.holds is None else self.holds)
        return ScoredTokens([value + self.noise for value in values], "e", self.says)

    async def sleep(self, level: int, timeout_s: float) -> bool:
        return False

    async def wake(self, tags: Sequence[Tag], timeout_s: float) -> None: ...

    async def close(self) -> None: ...


def make_config(**sync: Any) -> JobConfig:
    config = JobConfig()
    config.inference.backend = "vllm"
    config.inference.servers = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    config.inference.health_timeout_s = 2.0
    vars(config.weight_sync).update(sync)
    return config


def run(
    tmp_path: Path, config: JobConfig, scenario: Callable[..., Awaitable[None]], make: Callable[[], Any] = Liar
) -> list[dict[str, Any]]:
    """Two actors behind a pool; returns its events."""
    events = EventLog(tmp_path / "events.jsonl")

    async def work() -> None:
        actors = {url: make() for url in config.inference.servers}
        pool = InferencePool(config, "e", "secret", tmp_path, events, lambda url, *_: actors[url])
        await pool.start()
        try:
            await pool.connect_weights("127.0.0.1:9")
            await asyncio.wait_for(scenario(pool, *actors.values()), 60)
        finally:
            await pool.close()

    asyncio.run(work())
    return read_json_lines(events.path)


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def test_a_stale_actor_is_evicted_with_the_reason_and_back_with_a_later_version(tmp_path: Path) -> None:
    async def scenario(pool: InferencePool, honest: Liar, stale: Liar) -> None:
        pool.answers.expect(0, IDS, truth(0))
        await eventually(lambda: honest.scored and stale.scored)
        for version in (1, 2):
            pool.answers.expect(version, IDS, truth(version))
        stale.holds = 1  # it says 2, and never took it
        honest.says = stale.says = 2
        await eventually(lambda: pool.actors == {"actor-0": "ready", "actor-1": "joining"})
        # It says the same for ever, and gets no request for as long.
        for number in range(20):
            request = GenerateRequest(f"r{number}", IDS, SamplingParameters(4))
            await pool.generate(request, min_version=2)
            await asyncio.sleep(0.01)
        assert pool.actors["actor-1"] == "joining" and pool.statistics["evictions"] == 1
        assert stale.connections == 2  # a fresh connection is what it gets
        pool.answers.expect(3, IDS, truth(3))
        stale.holds, stale.says = None, 3
        await eventually(lambda: pool.actors == {"actor-0": "ready", "actor-1": "ready"} and 3 in stale.scored)

    events = run(tmp_path, make_config(), scenario)
    (evicted,) = of(events, "actor_evicted")
    assert evicted["actor"] == "actor-1" and evicted["noticed_by"] == "parity"
    assert "serves version 2" in evicted["reason"] and "stale or torn" in evicted["reason"]
    (differs,) = of(events, "weights_differ")
    expected = sum(abs(a - b) for a, b in zip(truth(2), truth(1), strict=True)) / 3
    assert differs["difference"] == pytest.approx(expected) and differs["tolerance"] == 0.001
    assert [event["actor"] for event in of(events, "weights_probed")] == ["actor-0", "actor-1"]


def test_an_actor_that_never_answers_hides_nobody_else(tmp_path: Path) -> None:
    async def scenario(pool: InferencePool, frozen: Liar, stale: Liar) -> None:
        frozen.hangs, stale.holds = True, 3
        pool.answers.expect(0, IDS, truth(0))
        await eventually(lambda: pool.actors["actor-1"] == "joining")
        # What waits for it ends with the eviction, and the next process is looked at.
        frozen.hangs = False
        await pool.redo_elsewhere("actor-0", "frozen")
        await eventually(lambda: frozen.scored)

    events = run(tmp_path, make_config(), scenario)
    assert [event["actor"] for event in of(events, "weights_differ")] == ["actor-1"]


def test_an_actor_that_cannot_be_looked_at_is_given_up(tmp_path: Path) -> None:
    async def scenario(pool: InferencePool, honest: Liar, odd: Liar) -> None:
        odd.breaks = ZeroDivisionError("nobody thought of this")
        pool.answers.expect(0, IDS, truth(0))
        await eventually(lambda: pool.actors["actor-1"] == "given_up")
        pool.answers.expect(1, IDS, truth(1))
        honest.says = 1
        await eventually(lambda: 1 in honest.scored)

    events = run(tmp_path, make_config(), scenario)
    failed = of(events, "parity_guard_failed")
    assert len(failed) == 3 and {event["actor"] for event in failed} == {"actor-1"}


def test_a_failed_parity_guard_stops_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(pool: InferencePool, honest: Liar, other: Liar) -> None:
        await eventually(lambda: pool._guard is not None and pool._guard.done())
        with pytest.raises(UserError, match="the actors. weights are no longer compared"):
            await pool.generate(GenerateRequest("r", IDS, SamplingParameters(4)))

    monkeypatch.setattr("torchtitan.inference.pool.weight_probe.POLL_S", "soon")
    assert of(run(tmp_path, make_config(), scenario), "parity_guard_failed")


def test_one_wrong_answer_may_be_two_versions_and_two_are_not(tmp_path: Path) -> None:
    async def scenario(pool: InferencePool, honest: Liar, torn: Liar) -> None:
        pool.answers.expect(0, IDS, truth(0))
        torn.noise = math.nan
        while not torn.scored:  # noqa: ASYNC110
            await asyncio.sleep(0)
        torn.noise = 0.0  # the next answer is right
        await eventually(lambda: len(torn.scored) == 2)
        await asyncio.sleep(0.3)
        assert pool.actors["actor-1"] == "ready" and pool.statistics["evictions"] == 0

    assert of(run(tmp_path, make_config(), scenario), "weights_differ") == []


def test_rounding_passes_and_more_does_not(tmp_path: Path) -> None:
    async def scenario(pool: InferencePool, coarse: Liar, wrong: Liar) -> None:
        # Two servers that others started, of 28 layers: 0.01 · sqrt(28) of the layers, and 0.03 of the logits.
        coarse.noise, wrong.noise = 0.07, 0.1
        pool.answers.expect(0, IDS, truth(0))
        await eventually(lambda: pool.actors == {"actor-0": "ready", "actor-1": "joining"})
        assert len(coarse.scored) == 1  # once per version

    config = make_config()
    config.inference.dtype = "bfloat16"
    config.model.name, config.model.flavor = "qwen3", "0.6B"
    assert [event["actor"] for event in of(run(tmp_path, config, scenario), "weights_differ")] == ["actor-1"]


def test_an_actor_that_is_wrong_every_time_is_given_up_and_the_last_one_ends_the_run(tmp_path: Path) -> None:
    async def scenario(pool: InferencePool, actor: Liar, other: Liar) -> None:
        actor.noise = other.noise = 1.0
        for version in range(3):
            pool.answers.expect(version, IDS, truth(version))
            actor.says = other.says = version
            await eventually(lambda version=version: pool.statistics["evictions"] == 2 * (version + 1))
        await eventually(lambda: set(pool.actors.values()) == {"given_up"})
        with pytest.raises(UserError, match="no inference actor is left .*stale or torn"):
            await pool.generate(GenerateRequest("r", IDS, SamplingParameters(4)))

    events = run(tmp_path, make_config(), scenario)
    assert sorted(event["failures"] for event in of(events, "weights_differ")) == [1, 1, 2, 2, 3, 3]


def test_actors_whose_weights_cannot_be_compared_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "SILENT_S", 0.3)

    async def scenario(pool: InferencePool, unable: Liar, busy: Liar) -> None:
        unable.able = Capabilities("vllm", "0.9.0")
        busy.fails = True
        pool.answers.expect(0, IDS, truth(0))
        log = tmp_path / "events.jsonl"
        await eventually(lambda: len(of(read_json_lines(log), "weights_not_verified")) == 2)
        assert pool.actors == {"actor-0": "ready", "actor-1": "ready"}

    events = run(tmp_path, make_config(), scenario)
    reasons = {event["actor"]: event["reason"] for event in of(events, "weights_not_verified")}
    assert reasons["actor-0"] == "vllm 0.9.0 cannot score tokens here" and "busy" in reasons["actor-1"]


def test_digests_are_the_actors_own_affair_and_off_is_off(tmp_path: Path) -> None:
    async def scenario(pool: InferencePool, looks: Liar, does_not: Liar) -> None:
        looks.able = Capabilities("embedded", score=True, digest=True)
        pool.answers.expect(0, IDS, truth(1))
        await eventually(lambda: set(pool.actors.values()) == {"ready"})
        await asyncio.sleep(0.3)
        assert looks.scored == does_not.scored == []

    for verify, expected in (("digest", ["actor-1"]), ("off", [])):
        folder = tmp_path / verify
        folder.mkdir()
        events = run(folder, make_config(verify=verify), scenario)
        assert [event["actor"] for event in of(events, "weights_not_verified")] == expected


def test_differences() -> None:
    assert parity.mean_difference([-1.0, -2.0, -3.0], [-1.0, -2.5, -3.1])[0] == pytest.approx(0.2)
    assert parity.mean_difference([-1.0, -2.0, -3.0], [-1.0, -2.5, -3.1])[1] == 1
    for expected, found in (([-1.0], []), ([], []), ([-1.0], [math.nan]), ([-1.0], [-math.inf])):
        assert parity.mean_difference(expected, found)[0] == math.inf


def test_a_text_that_is_unlikely_to_the_model_may_differ_by_more_in_bfloat16_alone() -> None:
    """A correct vLLM was 0.046 nats away in a policy of two layers that was trained on sums."""
    config = JobConfig()
    config.model.name, config.model.flavor, config.inference.dtype = "qwen3", "0.6B", "bfloat16"
    usual = parity.probe_tolerance(config)
    assert parity.probe_tolerance_of(config, [-1.0, -3.0]) == usual
    assert parity.probe_tolerance_of(config, [-6.0, -10.0]) == pytest.approx(2 * usual)
    config.inference.dtype = "float32"
    assert parity.probe_tolerance_of(config, [-6.0, -10.0]) == parity.probe_tolerance(config)
    config.inference.dtype, config.weight_sync.probe_tolerance = "bfloat16", 0.2
    assert parity.probe_tolerance_of(config, [-6.0, -10.0]) == 0.2


def log_probs_of(policy: Decoder, token_ids: torch.Tensor, routes: torch.Tensor | None = None) -> list[float]:
    """Of the tokens but the first."""
    layout = PackedLayout([len(token_ids)])
    with torch.no_grad():
        hidden = policy.hidden_states(token_ids, layout.positions, layout, routes)
        logits = hidden.float() @ policy.lm_head.weight.float().T
    found: list[float] = logits.log_softmax(-1)[:-1].gather(-1, token_ids[1:, None])[:, 0].tolist()
    return found


@pytest.mark.parametrize(("count", "per_token"), [(8, 2), (64, 8)])
def test_a_mixture_in_bfloat16_passes_the_probe_also_with_experts_of_its_own_choice(
    count: int, per_token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against itself in float32, whose routes it is given or not; each of both sides of the probe rounds as much."""
    config = JobConfig()
    config.model.name, config.model.flavor, config.inference.dtype = "qwen3_moe", "30B-A3B", "bfloat16"
    layers, torn = 4, 0.0
    args = ModelArgs(
        "qwen3_moe", 256, 64, 128, layers, 4, 2, 16, experts=ExpertArgs(count, per_token, 32, normalize=True)
    )
    monkeypatch.setattr(parity, "read_shape", lambda _config: args)
    monkeypatch.setattr(parity, "has_gpu", lambda: True)
    chosen = list[torch.Tensor]()
    choose = mixture.Router._choose
    monkeypatch.setattr(
        mixture.Router, "_choose", lambda self, scores: chosen.append(choose(self, scores)) or chosen[-1]
    )
    for seed in range(3):
        torch.manual_seed(seed)
        policy = Decoder(args)
        for name, weight in policy.named_parameters():
            size = 1.0 if "embed" in name else (2.0 if "lm_head" in name else 1.0) / math.sqrt(weight.shape[-1])
            weight.data = torch.ones_like(weight) if weight.dim() == 1 else (size * torch.randn_like(weight))
            weight.data = weight.data.bfloat16().float()
        token_ids = torch.randint(256, (64,))

        chosen.clear()
        exact = log_probs_of(policy, token_ids)
        routes = torch.stack(chosen, 1)
        policy.bfloat16()
        rerouted, replayed = (
            parity.mean_difference(exact, log_probs_of(policy, token_ids, given))[0] for given in (None, routes)
        )
        assert replayed * math.sqrt(2) < parity._rounding(config)
        assert rerouted * math.sqrt(2) < parity.probe_tolerance(config)
        policy.get_parameter("model.layers.1.self_attn.o_proj.weight").data.neg_()
        torn = max(torn, parity.mean_difference(exact, log_probs_of(policy, token_ids))[0])
    assert torn > 2 * parity.probe_tolerance(config)


def test_samples_of_the_probe_may_have_other_experts_also_where_those_of_a_batch_are_replayed(tmp_path: Path) -> None:
    """Without replay a correct mixture of eight layers was 0.12 nats away in bfloat16."""
    config = JobConfig()
    config.model.name, config.model.flavor, config.inference.dtype = "qwen3_moe", "30B-A3B", "bfloat16"
    config.grpo.routing_replay = True
    replayed, probed = parity.sampling_tolerance(config), parity.sampling_tolerance(config, replays=False)
    config.grpo.routing_replay = False
    assert probed == parity.sampling_tolerance(config) > replayed
    config.grpo.routing_replay = True
    guard = parity.ParityGuard(config, "e", EventLog(tmp_path / "events.jsonl"), parity.ProbeAnswers())
    assert guard._samples_tolerance == parity.FEW_SAMPLES * probed


def test_samples_are_probed_wherever_an_engine_may_compute_otherwise_with_the_right_weights() -> None:
    config = JobConfig()
    assert not parity.probes_samples(config)  # embedded, started by the run, verified by digest
    config.inference.servers = ["http://10.0.0.7:8000"]
    assert parity.probes_samples(config)
    config.inference.servers, config.inference.discover = [], True
    assert parity.probes_samples(config)
    config.inference.discover, config.inference.backend, config.weight_sync.verify = False, "vllm", "digest"
    assert parity.probes_samples(config)
    config.weight_sync.verify = "off"
    assert not parity.probes_samples(config)


@pytest.mark.parametrize(("name", "flavor", "refused"), [("qwen3", "0.6B", False), ("qwen3_moe", "30B-A3B", True)])
def test_a_digest_that_would_not_see_most_of_the_weights_is_refused(name: str, flavor: str, refused: bool) -> None:
    config = JobConfig()
    config.inference.backend, config.model.name, config.model.flavor = "vllm", name, flavor
    problem = engine_of(config).digest_problem(config)
    assert ("does not look at the experts of a mixture: use probe" in problem) == refused == bool(problem)


@pytest.mark.parametrize("verify", ["probe", "digest"])
@pytest.mark.parametrize("kept", [None, [3, 5]])
def test_what_an_actor_says_of_its_samples_is_probed_at_the_runs_temperature(
    tmp_path: Path, kept: list[int] | None, verify: str
) -> None:
    logits = np.linspace(-2.0, 2.0, 8)
    config = make_config(verify=verify)
    config.rollout.temperature, config.rollout.top_k = 0.5, 2 if kept else 0
    asked: list[GenerateRequest] = []

    class Sampler(Liar):
        """Reports log-probs at this temperature."""

        reports_at = 0.5

        def __init__(self) -> None:
            super().__init__()
            self.able = replace(self.able, digest=True)

        async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
            asked.append(request)
            values = logits / self.reports_at
            log_prob = values[5] - np.logaddexp.reduce(values if kept is None else values[kept])
            sample = Completion([5], [float(log_prob)], "length", [VersionSpan("e", self.says, 0, 1)])
            return [replace(sample, kept_token_ids=None if kept is None else [kept]) for _ in range(request.sampling.n)]

    async def scenario(pool: InferencePool, honest: Sampler, raw: Sampler) -> None:
        raw.reports_at = 1.0
        log_probs = logits / 0.5 - np.logaddexp.reduce(logits / 0.5)
        following = np.tile(log_probs, (len(parity.sampled_behind(IDS)), 1))
        pool.answers.expect(0, IDS, truth(0) if verify == "probe" else [], following)
        # No newer version comes, and none would help.
        await eventually(lambda: pool.actors == {"actor-0": "ready", "actor-1": "given_up"})
        assert bool(honest.scored) == (verify == "probe")

    events = run(tmp_path, config, scenario, Sampler)
    assert [event["actor"] for event in of(events, "samples_probed")] == ["actor-0"]
    assert not of(events, "weights_not_verified")
    differ = of(events, "log_probs_differ")[0]
    assert differ["actor"] == "actor-1" and differ["difference"] > differ["bound"] > 0
    assert "processed_logprobs" in of(events, "actor_evicted")[0]["reason"]
    assert {(len(probe.prompt_ids), probe.sampling.temperature, probe.sampling.max_tokens) for probe in asked} == {
        (length, 0.5, 1) for length in (1, 2, 3, 4)
    }


EXPERTS: dict[str, tuple[list[list[list[int]]] | None, str]] = {
    "none": (None, "does not name the experts"),
    "an expert too high": ([[[0, 4], [1, 2]]] * 4, "expert 4 is named, and this model has 4"),
    "a layer too few": ([[[0, 3]]] * 4, "2 experts are named for each token, and this model has 2 layers x 2"),
    "a token too few": ([[[0, 3], [1, 2]]] * 3, "one row is needed for each but the last"),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_that_the_model_does_not_have_are_refused_with_the_actors_name(tmp_path: Path, case: str) -> None:
    wrong, reason = EXPERTS[case]

    class Mixture(Liar):
        experts: list[list[list[int]]] | None = [[[0, 3], [1, 2]]] * 4

        async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
            routes = None if self.experts is None else Routes(0, np.array(self.experts, np.uint8))
            return [Completion([1], [-0.1], "stop", [VersionSpan("e", self.says, 0, 1)], routes=routes)]

    async def scenario(pool: InferencePool, honest: Mixture, other: Mixture) -> None:
        pool.answers.expect(0, IDS, truth(0))
        await eventually(lambda: pool.statistics["probes"] == 2)
        for actor in pool._actors:
            actor._requests._mixture = MixtureShape(layers=2, per_token=2, experts=4)
        other.experts = wrong
        request = GenerateRequest("r", IDS, SamplingParameters(4, routes=True))
        # Both actors are given one.
        for (completion,) in await asyncio.gather(pool.generate(request), pool.generate(request)):
            assert completion.actor == "actor-0"

    events = run(tmp_path, make_config(), scenario, Mixture)
    assert {event["actor"] for event in of(events, "answer_refused")} == {"actor-1"}
    assert reason in of(events, "answer_refused")[0]["reason"]


def test_versions_that_an_actor_verifies_by_itself_are_counted_and_reported_where_they_are_not(tmp_path: Path) -> None:
    class Looker(Liar):
        found = VerifiedVersions()

        def __init__(self) -> None:
            super().__init__()
            self.able = replace(self.able, digest=True)

        async def health(self, timeout_s: float) -> ActorHealth:
            return replace(await super().health(timeout_s), verified=self.found)

    async def scenario(pool: InferencePool, diligent: Looker, starved: Looker) -> None:
        diligent.found, starved.found = VerifiedVersions(3, 4), VerifiedVersions(None, 0, 2)
        await eventually(lambda: pool._parity._unverified["actor-1"] == 2)
        diligent.found = VerifiedVersions(0, 1)  # connected anew
        await eventually(lambda: pool._parity._verified["actor-0"] == 5)
        diligent.found = VerifiedVersions(2, 3)  # just before the end

    config = make_config(verify="digest")
    events = run(tmp_path, config, scenario, Looker)
    (reported,) = of(events, "weights_not_verified")
    assert reported["actor"] == "actor-1" and "2 more could not be looked at" in reported["reason"]
    counted = {event["actor"]: (event["versions"], event["not_verified"]) for event in of(events, "weights_verified")}
    assert counted == {"actor-0": (7, 0), "actor-1": (0, 2)}


def test_a_malformed_answer_to_the_probe_is_reported_at_once_and_the_second_evicts(tmp_path: Path) -> None:
    async def scenario(pool: InferencePool, honest: Liar, broken: Liar) -> None:
        broken.breaks = AnswerRefused("score", "the log-prob of token 2 is -9999")
        pool.answers.expect(0, IDS, truth(0))
        await eventually(lambda: pool.statistics["probes"] == 1 and pool.actors["actor-1"] != "ready")

    events = run(tmp_path, make_config(), scenario)
    reason = "its answer to the probe cannot be right: the log-prob of token 2 is -9999"
    unverified, differ = of(events, "weights_not_verified")[0], of(events, "weights_differ")[0]
    assert (unverified["actor"], unverified["reason"]) == ("actor-1", reason) == (differ["actor"], differ["reason"])
    assert of(events, "actor_evicted")[0]["reason"] == reason and not of(events, "parity_guard_failed")


def test_refused_answers_are_reported_with_their_actor_and_the_third_in_a_row_evicts_it(tmp_path: Path) -> None:
    config = make_config()
    config.inference.max_retries = 9

    class Broken(Liar):
        async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
            raise AnswerRefused("generate", "token 64 is not of the run's vocabulary")

    actors = iter([Liar, Broken])

    async def scenario(pool: InferencePool, honest: Liar, broken: Liar) -> None:
        await eventually(lambda: set(pool.actors.values()) == {"ready"})
        bad = next(actor for actor in pool._actors if actor.name == "actor-1")
        for _ in range(3):
            await eventually(lambda: pool.actors["actor-1"] == "ready")
            for _ in range(3):
                with pytest.raises(ActorError):
                    await bad.generate(GenerateRequest("r", [1], SamplingParameters(1)))
        assert pool.actors == {"actor-0": "ready", "actor-1": "given_up"}

    events = run(tmp_path, config, scenario, lambda: next(actors)())
    (refused,) = of(events, "answer_refused")
    assert refused["actor"] == "actor-1" and "token 64 is not of the run's vocabulary" in refused["reason"]
    evicted = of(events, "actor_evicted")
    assert [event["noticed_by"] for event in evicted] == ["answers"] * 3
    assert "3 answers in a row cannot be right" in evicted[0]["reason"]
    assert "9 answers in a row" in of(events, "actor_given_up")[0]["reason"]


def test_mismatch_alarm_and_stop() -> None:
    config = JobConfig()
    config.grpo.mismatch_kl_stop = 0.5
    for value, alarms, stops in ((0.05, False, False), (0.2, True, False), (0.6, True, True), (math.nan, True, True)):
        figures = {"mismatch_kl": value, "mismatch_kl/same_version": 0.0}
        assert (mismatch.alarm(config, figures) is not None) is alarms
        reason = mismatch.reason_to_stop(config, figures, {}, 7)
        assert (reason is not None) is stops
        if reason is not None:
            assert "made version 7" in str(reason) and "Look at mismatch_kl/same_version" in str(reason)
    config.grpo.mismatch_kl_stop = 0
    assert mismatch.reason_to_stop(config, {"mismatch_kl": 9.0}, {}, 1) is None


def test_an_engine_in_the_trainers_processes_is_judged_by_what_it_samples() -> None:
    config = JobConfig()
    config.inference.backend, config.inference.dtype = "colocated", "bfloat16"
    config.model.name, config.model.flavor = "qwen3", "0.6B"
    noise, stale = ({"replica-1": mismatch.ActorFigures(value, 500)} for value in (0.03, 0.4))
    assert mismatch.reason_to_stop(config, {}, noise, 5) is None
    assert mismatch.reason_to_stop(config, {}, {}, 5) is None
    few = {"replica-1": mismatch.ActorFigures(0.4, 5)}
    assert mismatch.reason_to_stop(config, {}, few, 5) is None
    for wrong in (stale, {"replica-1": mismatch.ActorFigures(math.nan, 500)}):
        reason = mismatch.reason_to_stop(config, {}, wrong, 5)
        assert reason is not None and "(replica-1) is wrong" in str(reason) and "with version 4" in str(reason)
    config.rollout.top_p = 0.9
    assert mismatch.reason_to_stop(config, {}, stale, 5) is not None
    config.weight_sync.verify = "off"
    assert mismatch.reason_to_stop(config, {}, stale, 5) is None


def test_an_actor_whose_samples_are_wrong_is_out_until_a_newer_version_and_the_third_time_for_good(
    tmp_path: Path,
) -> None:
    config = make_config()
    request = GenerateRequest("r", [1], SamplingParameters(1))

    async def scenario(pool: InferencePool, honest: Liar, wrong: Liar) -> None:
        await eventually(lambda: set(pool.actors.values()) == {"ready"})
        for version in range(4):
            for name, reason in (("actor-0", ""), ("actor-1", f"wrong at {version}" if version != 1 else "")):
                await pool.judge_samples(name, version, reason)
            # What is right in between starts the count again.
            if version == 0:
                assert pool.actors["actor-1"] != "ready"
            honest.says = wrong.says = version + 1
            await eventually(lambda: pool.actors["actor-0"] == "ready" and pool.serving_version() == wrong.says)
            await eventually(lambda: pool.actors["actor-1"] == "ready")
        await pool.judge_samples("actor-1", 4, "wrong at 4")
        assert pool.actors == {"actor-0": "ready", "actor-1": "given_up"}
        for version in (4, 5, 6):
            await pool.judge_samples("actor-0", version, "wrong as well")
        with pytest.raises(UserError, match=r"is left \(actor-0: wrong as well; actor-1: wrong at 4"):
            await pool.generate(request)

    events = run(tmp_path, config, scenario)
    assert [event["reason"] for event in of(events, "actor_given_up")] == ["wrong at 4", "wrong as well"]
