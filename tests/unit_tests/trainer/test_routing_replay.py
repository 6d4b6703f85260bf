"""Routing replay: from the experts that an engine names to those that the trainer computes with."""

from __future__ import annotations

import base64
import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.json import encode as sent

from tests.mixtures import make_mixture
from tests.trajectories import single_turn
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed.placement import ParallelDims
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import RequestRefused
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.engines.sglang.engine import ENGINE as SGLANG
from torchtitan.inference.engines.sidecar.foreign_engine import ForeignEngine
from torchtitan.inference.engines.vllm.engine import ENGINE as VLLM
from torchtitan.inference.types import (
    Branch,
    Completion,
    GenerateRequest,
    Given,
    Routes,
    SamplingParameters,
    add_turn,
    branch_routes,
)
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.layers.mixture import MoE
from torchtitan.preflight.check import Check
from torchtitan.preflight.inference import check_inference
from torchtitan.rollout.flow.journal import decode_batch, encode_batch
from torchtitan.rollout.types import Batch, Group
from torchtitan.trainer.checkpoint import collect
from torchtitan.trainer.packing import pack
from torchtitan.trainer.policy_trainer import PolicyTrainer

LAYERS, TOP = 3, 2
PROMPTS = [[3, 4, 5, 6, 7], list(range(2, 40)), [*range(2, 30), 50, 51]]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("mixtures") / "qwen3_moe", "qwen3_moe")


def _request(prompt: list[int], **sampling: Any) -> GenerateRequest:
    values = {"max_tokens": 12, "n": 3, "routes": True, "stop_token_ids": []}
    return GenerateRequest(f"{len(prompt)}-{sampling}", prompt, SamplingParameters(**{**values, **sampling}))


def _recorded(directory: Path, token_ids: list[int]) -> np.ndarray:
    """What the router of a plain forward chooses for all tokens but the last, 0 in dense layers."""
    policy, rows = load_policy(directory), np.zeros((len(token_ids) - 1, LAYERS, TOP), np.uint8)
    for layer in policy.model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.record = lambda index, experts: rows.__setitem__(
                (slice(None), index), experts[: len(rows)].numpy()
            )
    with torch.no_grad():
        policy(torch.tensor(token_ids[:-1]), PackedLayout([len(token_ids) - 1]))
    return rows


def test_the_embedded_engine_tells_all_routes(mixture: Path) -> None:
    """Of prompts that are computed whole, taken from a sibling, from a running and from an ended sequence."""
    engine = Engine(load_policy(mixture), max_sequences=4, max_length=128)
    answers = engine.generate([_request(prompt) for prompt in PROMPTS])
    again = PROMPTS[1] + answers[1][0].token_ids + [60, 61]
    answers += engine.generate([_request(again, max_tokens=5)])
    assert engine.statistics.reused_tokens > len(PROMPTS[1])
    for prompt, completions in zip([*PROMPTS, again], answers, strict=True):
        for completion in completions:
            assert completion.routes is not None and completion.routes.first == 0
            decoded = Completion.from_json(json.loads(json.dumps(completion.to_json())))
            assert decoded.routes is not None and decoded.routes.experts.dtype == np.uint8
            assert np.array_equal(decoded.routes.experts, _recorded(mixture, prompt + completion.token_ids))
    (silent,) = engine.generate([_request([9, 8], routes=False)])
    assert silent[0].routes is None


def _npy(experts: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


def _vllm_answer(routed_experts: str | None) -> dict[str, Any]:
    content = [{"token_id": 9, "logprob": -1.5}, {"token_id": 8, "logprob": -0.25}]
    choice = {"index": 0, "finish_reason": "length", "token_ids": [9, 8], "logprobs": {"content": content}}
    spans = [{"version": "epoch-1/3", "start": 0, "end": 2}]
    return {"choices": [{**choice, "weight_versions": spans, "routed_experts": routed_experts}]}


def _sglang_answer(routed_experts: str | None) -> list[dict[str, Any]]:
    about = {
        "finish_reason": {"type": "length", "length": 2},
        "weight_version": "epoch-1/3",
        "output_token_logprobs": [[-1.5, 9, None], [-0.25, 8, None]],
    }
    return [{"output_ids": [9, 8], "meta_info": about | ({"routed_experts": routed_experts} if routed_experts else {})}]


@pytest.mark.parametrize(
    ("dialect", "answer", "encode"),
    [
        (VLLM, _vllm_answer, _npy),
        (SGLANG, _sglang_answer, lambda rows: base64.b64encode(rows.astype("<i4").tobytes()).decode()),
    ],
    ids=["vllm", "sglang"],
)
@pytest.mark.parametrize("highest", [7, 300])
def test_foreign_engines_are_understood(
    dialect: ForeignEngine, answer: Callable[..., Any], encode: Callable[[np.ndarray], str], highest: int
) -> None:
    """vLLM: an .npy of (tokens - 1, layers, k); SGLang: flat int32. Both without the last token."""
    prompt = [5, 6, 7]
    experts = np.random.default_rng(0).integers(0, highest + 1, (4, LAYERS, TOP)).astype(np.uint16)
    experts[0, 0, 0] = highest
    request = _request(prompt, n=1, max_tokens=2)
    (completion,) = dialect.completions(request, sent(answer(encode(experts))))
    assert completion.routes is not None and completion.routes.first == 0
    assert completion.routes.experts.dtype == (np.uint8 if highest < 256 else np.uint16)
    assert np.array_equal(completion.routes.experts.reshape(4, LAYERS, TOP), experts)
    with pytest.raises(RequestRefused, match="--enable-return-routed-experts"):
        dialect.completions(request, sent(answer(None)))
    with pytest.raises(ValueError, match="5 tokens|reshape"):
        dialect.completions(request, sent(answer(encode(experts[:3, :1, :1]))))
    (plain,) = dialect.completions(_request(prompt, n=1, routes=False), sent(answer(encode(experts))))
    assert plain.routes is None
    body = dialect.generate(request).body
    assert body.get("return_routed_experts", dialect is VLLM)


def _completion(tokens: list[int], first: int, rows: np.ndarray) -> Completion:
    return Completion(tokens, [-1.0] * len(tokens), "stop", [], routes=Routes(first, rows))


def test_a_conversation_keeps_the_experts_that_its_tokens_were_sampled_with() -> None:
    """What a later call says of earlier tokens fills only what nobody has said before."""
    rows = {turn: np.full((size, 1, 2), turn, np.uint8) for turn, size in ((1, 3), (2, 7))}
    branches: list[Branch] = []
    add_turn(branches, [5, 6, 7], _completion([8, 9], 1, rows[1]))  # tokens 1 to 3; a cached one before, the last after
    branch = add_turn(branches, [5, 6, 7, 8, 9, 10], _completion([11, 12], 0, rows[2]))
    known = branch_routes(branch)
    assert known is not None and known[:, 0, 0].tolist() == [2, 1, 1, 1, 2, 2, 2]
    assert branch_routes(Branch([Given([1, 2]), Completion([3], [-1.0], "stop", [])])) is None


def _batch(directory: Path, dtype: torch.dtype, routes: bool, seed: int = 0) -> Batch:
    engine = Engine(load_policy(directory, dtype), max_sequences=16, max_length=128)
    requests = [_request(prompt, n=4, max_tokens=24, seed=seed, routes=routes) for prompt in PROMPTS]
    groups = []
    for number, (request, answers) in enumerate(zip(requests, engine.generate(requests), strict=True)):
        samples = []
        for place, out in enumerate(answers):
            sample = single_turn(request.prompt_ids, out.token_ids, out.log_probs, out.spans, reward=float(place % 2))
            sample.branches[0].segments[1] = out
            samples.append(sample)
        groups.append(Group(number, samples))
    return Batch(0, groups)


def _train(directory: Path, batch: Batch, replay: bool) -> dict[str, Any]:
    config = JobConfig()
    config.model.hf_assets_path, config.grpo.routing_replay = str(directory), replay
    config.training.tokens_per_micro_batch, config.optimizer.lr = 100, 1e-4
    trainer = PolicyTrainer(config, ParallelDims(1, 1, 1, 1))
    policy = trainer.policy
    gate = policy.model.layers[0].mlp.gate.weight.detach().clone()
    metrics = trainer.train_batch(batch).metrics
    assert not torch.equal(policy.model.layers[0].mlp.gate.weight, gate)
    return metrics


@pytest.mark.slow
def test_replay_makes_a_trainer_agree_with_a_coarser_engine(tmp_path: Path) -> None:
    """A bf16 engine and an fp32 trainer: through the journal, packed; and tokens that nobody speaks of are counted."""
    shape = {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 6, "mlp_only_layers": []}
    mixture = make_mixture(tmp_path / "fine", "qwen3_moe", **shape)
    batch = decode_batch(encode_batch(_batch(mixture, torch.bfloat16, routes=True)))
    without, replayed = (_train(mixture, copy.deepcopy(batch), replay) for replay in (False, True))
    assert replayed["routing/replayed_share"] == 1 and "routing/replayed_share" not in without
    assert without["mismatch_kl"] > 5 * replayed["mismatch_kl"] > 0
    forgotten = 0
    for sample in batch.samples[::2]:
        completion = sample.branches[0].sampled[0]
        prompt = len(sample.prompt_ids)
        completion.routes = Routes(prompt, completion.routes.experts[prompt:])
        forgotten += prompt
    share = 1 - forgotten / sum(sample.num_tokens - 1 for sample in batch.samples)
    without_prompts = _train(mixture, copy.deepcopy(batch), True)
    assert without_prompts["routing/replayed_share"] == pytest.approx(share)
    unheard = decode_batch(encode_batch(_batch(mixture, torch.bfloat16, routes=False)))
    assert _train(mixture, unheard, True)["routing/replayed_share"] == 0


def test_biases_move_towards_experts_with_less_to_do(tmp_path: Path) -> None:
    """And are in checkpoints, as nothing else remembers them."""
    mixture = make_mixture(tmp_path / "glm", "glm4_moe")
    batch, rate = _batch(mixture, torch.float32, routes=True), 0.01
    before, load = load_policy(mixture), torch.zeros(LAYERS, 8)
    routes = [sample.branches[0].sampled[0].routes for sample in batch.samples]
    for route in routes:
        assert route is not None
        for layer in range(LAYERS):
            load[layer] += torch.from_numpy(route.experts[:, layer].astype(np.int64)).flatten().bincount(minlength=8)
    config = JobConfig()
    config.model.hf_assets_path, config.training.expert_bias_rate = str(mixture), rate
    trainer = PolicyTrainer(config, ParallelDims(1, 1, 1, 1))
    policy = trainer.policy
    trainer.train_batch(batch)
    saved = collect(policy, trainer.optimizer, 0)
    for index, layer in enumerate(policy.model.layers):
        if not isinstance(layer.mlp, MoE):  # type: ignore[attr-defined]
            continue
        name = f"model.layers.{index}.mlp.gate.e_score_correction_bias"
        moved = saved[f"model.{name}"] - before.get_buffer(name)
        wanted = rate * (load[index].mean() - load[index]).sign()
        torch.testing.assert_close(moved, wanted, rtol=0, atol=1e-6)


def test_experts_of_another_model_are_refused(mixture: Path) -> None:
    args = load_policy(mixture).args
    for experts in (np.full((4, LAYERS, TOP), 8, np.uint8), np.zeros((4, LAYERS + 1, TOP), np.uint8)):
        sample = single_turn([5, 6, 7], [8, 9], [-1.0, -1.0], [])
        sample.branches[0].segments[1].routes = Routes(0, experts)  # type: ignore[union-attr]
        rows = [(sample, sample.branches[0])]
        with pytest.raises(UserError, match="this model has 8 experts, 3 layers × 2 for each token"):
            pack(rows, [1.0], 0, False, torch.device("cpu"), args)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"backend": "sglang", "in_flight_kv": "recompute"}, "experts of the new weights but the log-probs of the old"),
        ({"backend": "colocated"}, "does not report the experts of its tokens"),
        ({"backend": "sglang"}, ""),
        ({}, ""),
    ],
)
def test_engines_that_would_pair_them_wrongly_are_refused(changes: dict[str, str], problem: str) -> None:
    config = JobConfig()
    config.grpo.routing_replay = True
    vars(config.inference).update(changes)
    check = Check(config, 1, planning=True)
    check_inference(check)
    problems = [entry.text for entry in check.problems if entry.key == "grpo.routing_replay"]
    assert (problem in "".join(problems)) if problem else not problems
