"""What is sent to vLLM and SGLang, held against what their versions know; and answers in the shape of each version.

The tables are the fields of the versions' own classes (vLLM: pydantic, msgspec, and the routes' signatures; SGLang:
msgspec, and since 0.5.23 the decoder that admits a body of /generate). Both servers pass over most names that they do
not know, so what is misspelt, or gone in a version, would not be refused but be without effect.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from msgspec.json import encode as sent

from tests.tiny_models import make_tiny
from tests.unit_tests.inference.json_server import serving
from tests.unit_tests.inference.test_answers import ENGINES
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed.placement import ParallelDims
from torchtitan.inference.actor_client import ActorError, ActorNotReady, AnswerRefused, JsonClient, RequestRefused
from torchtitan.inference.answer_checks import check_completions
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.engines.embedded.forwards import score
from torchtitan.inference.engines.reading import completions_of, scores_of
from torchtitan.inference.engines.replicas.replica_pool import ReplicaAnswer, decode_answers, encode_answers
from torchtitan.inference.engines.sglang import engine as sglang_engine
from torchtitan.inference.engines.sglang.engine import ENGINE as SGLANG
from torchtitan.inference.engines.sglang.engine import SGLangControl
from torchtitan.inference.engines.sidecar.applier import FileLoader
from torchtitan.inference.engines.sidecar.foreign_engine import EngineError, EngineOptions, Malformed
from torchtitan.inference.engines.sidecar.sidecar_process import AgentClient
from torchtitan.inference.engines.vllm import engine as vllm_engine
from torchtitan.inference.engines.vllm import serve
from torchtitan.inference.engines.vllm.direct import DirectLoader
from torchtitan.inference.engines.vllm.engine import ENGINE as VLLM
from torchtitan.inference.engines.vllm.engine import VLLMControl
from torchtitan.inference.pool.weight_probe import sampling_tolerance
from torchtitan.inference.types import (
    Branch,
    Capabilities,
    Completion,
    GenerateRequest,
    Given,
    NoVersion,
    SamplingParameters,
    VersionSpan,
)
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.rollout.types import Batch, Group, Sample
from torchtitan.trainer import mismatch
from torchtitan.trainer.policy_trainer import PolicyTrainer
from torchtitan.weight_sync.memory.staging import StagedVersion

LABEL = "e1/3"
TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}
VERSION = StagedVersion("e1", 3, "d3", TENSORS, apply_on_workers=list)
ACTOR: Any = SimpleNamespace(workers_address="127.0.0.1:7", name="actor-0", epoch="e1", key="key")
REQUESTS = [
    GenerateRequest("r", [5, 6, 7], SamplingParameters(max_tokens=4)),
    GenerateRequest("r", [5, 6, 7], SamplingParameters(4, 3, 0.7, 0.9, 20, 0.1, [1], 5)),
    GenerateRequest("r", [5, 6, 7], SamplingParameters(4, temperature=0)),
]

# vLLM

VLLM_VERSIONS = ("0.32.0", "0.33.0")
# Of both; `parse_context` is new in 0.33.0.
VLLM_GENERATE = {
    "token_ids", "sampling_params", "request_id", "token_offsets", "features", "content_parts", "model",
    "reasoning_ended", "reasoning_parser_kwargs", "return_token_ids", "output_mode", "stream", "stream_options",
    "cache_salt", "priority", "kv_transfer_params", "ec_transfer_params",
}  # fmt: skip
VLLM_GENERATE_NEEDS = {"token_ids", "sampling_params"}
VLLM_LONGEST_SALT = 1024
VLLM_SAMPLING = {
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "watermarking", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs", "detokenize",
    "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
    "stream_interval", "structured_outputs", "logit_bias", "allowed_token_ids", "extra_args", "bad_words",
    "skip_reading_prefix_cache", "thinking_token_budget", "repetition_detection",
}  # fmt: skip
# Path -> (method, query, body: name -> whether it is needed); the same in both. A body where there is none is not read.
VLLM_ROUTES: dict[str, tuple[str, set[str], dict[str, bool]]] = {
    "/version": ("GET", set(), {}),
    "/openapi.json": ("GET", set(), {}),
    "/health": ("GET", set(), {}),
    "/weight_info": ("GET", set(), {}),
    "/get_world_size": ("GET", {"include_dp"}, {}),
    "/pause": ("POST", {"mode", "clear_cache"}, {}),
    "/resume": ("POST", set(), {}),
    "/reset_prefix_cache": ("POST", {"reset_running_requests", "reset_external"}, {}),
    "/init_weight_transfer_engine": ("POST", set(), {"init_info": True}),
    "/start_weight_update": ("POST", set(), {}),
    "/update_weights": ("POST", set(), {"update_info": True}),
    "/finish_weight_update": ("POST", set(), {"weight_version": False}),
    "/update_weight_version": ("POST", set(), {"new_version": True}),
    "/collective_rpc": ("POST", set(), {"method": True, "args": False, "kwargs": False, "timeout": False}),
    "/inference/v1/generate": ("POST", set(), {name: name in VLLM_GENERATE_NEEDS for name in VLLM_GENERATE}),
}  # fmt: skip
VLLM_PAUSE_MODES = {"abort", "wait", "keep"}
# What both versions' own parser of the command line has taken, with and without a GPU, by every route.
VLLM_OPTIONS = {
    "--host", "--port", "--middleware", "--enable-scale-out", "--logprobs-mode", "--worker-extension-cls",
    "--weight-transfer-config", "--model", "--dtype", "--tensor-parallel-size", "--max-model-len", "--max-num-seqs",
    "--generation-config", "--disable-uvicorn-access-log", "--enforce-eager", "--no-enable-chunked-prefill",
    "--kv-cache-memory-bytes", "--return-sampling-mask", "--block-size", "--hf-overrides",
}  # fmt: skip
# GenerateTokensResponse, as both versions' own class gives it: a sample, and a text that was scored.
VLLM_ANSWER = json.loads(
    '{"request_id": "r", "model": "m", "created": 1, "usage": null, "prompt_logprobs": null, '
    '"prompt_token_id_logprobs": null, "prompt_token_ids": null, "mm_placeholders": null, "metrics": null, '
    '"kv_transfer_params": null, "ec_transfer_params": null, "output_mode": "tokens", "choices": [{"index": 0, '
    '"finish_reason": "stop", "stop_reason": 1, "token_ids": [9], "routed_experts": null, "sampling_mask": [[9, 2]], '
    '"weight_versions": [{"version": "e1/3", "start": 0, "end": 1}], "logprobs": {"content": [{"token_id": 9, '
    '"logprob": -1.5, "rank": 1, "top_logprobs": []}]}}]}'
)
VLLM_SCORED = json.loads(
    '{"request_id": "r", "model": "m", "created": 1, "usage": null, "prompt_logprobs": [null, {"6": {"logprob": -2.0, '
    '"rank": 3, "decoded_token": null}}, {"7": {"logprob": -0.5, "rank": 1, "decoded_token": null}}], '
    '"prompt_token_id_logprobs": null, "prompt_token_ids": null, "mm_placeholders": null, "metrics": null, '
    '"kv_transfer_params": null, "ec_transfer_params": null, "output_mode": "tokens", "choices": [{"index": 0, '
    '"finish_reason": "length", "stop_reason": null, "token_ids": [4], "routed_experts": null, "sampling_mask": null, '
    '"weight_versions": [{"version": "e1/4", "start": 0, "end": 1}], "logprobs": null}]}'
)
# 0.33.0, to a request that comes while the server is paused by `wait` or `abort`; before, it would wait.
VLLM_PAUSED = {
    "error": {
        "message": "Generation is paused. Please retry after it resumes.", "type": "ServiceUnavailableError",
        "param": None, "code": 503,
    }
}  # fmt: skip

# SGLang

SGLANG_VERSIONS = ("0.5.20", "0.5.23")
# What both versions' class of the request and 0.5.23's decoder know.
SGLANG_GENERATE: dict[str, str] = {
    "rid": "string", "text": "string", "input_ids": "integers", "stream": "boolean", "sampling_params": "sampling",
    "return_logprob": "boolean", "logprob_start_len": "integer", "top_logprobs_num": "integer",
    "token_ids_logprob": "integers", "return_hidden_states": "boolean", "return_text_in_logprobs": "boolean",
    "routed_dp_rank": "integer", "extra_key": "string", "priority": "integer", "cache_salt": "string",
    "lora_path": "string", "session_id": "string", "return_prompt_token_ids": "boolean",
    "return_sampling_mask": "boolean",
}  # fmt: skip
# 0.5.23 refuses others by "unknown field", 0.5.20 by its constructor.
SGLANG_SAMPLING: dict[str, str] = {
    "max_new_tokens": "integer", "stop": "string", "stop_token_ids": "integers", "stop_regex": "string",
    "temperature": "number", "top_p": "number", "top_k": "integer", "min_p": "number", "frequency_penalty": "number",
    "presence_penalty": "number", "repetition_penalty": "number", "min_new_tokens": "integer", "n": "integer",
    "json_schema": "string", "regex": "string", "ebnf": "string", "structural_tag": "string", "ignore_eos": "boolean",
    "skip_special_tokens": "boolean", "spaces_between_special_tokens": "boolean", "no_stop_trim": "boolean",
    "stream_interval": "integer", "sampling_seed": "integer", "beam_width": "integer",
}  # fmt: skip
SGLANG_BASE = {"rid": False, "http_worker_ipc": False}
# Path -> (method, body: name -> whether it is needed).
SGLANG_ROUTES: dict[str, tuple[str, dict[str, bool]]] = {
    "/server_info": ("GET", {}),
    "/model_info": ("GET", {}),
    "/generate": ("POST", dict.fromkeys(SGLANG_GENERATE, False)),
    "/pause_generation": ("POST", SGLANG_BASE | {"mode": False}),
    "/continue_generation": ("POST", SGLANG_BASE | {"torch_empty_cache": False}),
    "/abort_request": ("POST", SGLANG_BASE | dict.fromkeys(("abort_all", "finished_reason", "abort_message"), False)),
    "/update_weights_from_disk": (
        "POST",
        SGLANG_BASE | {
            "model_path": True, "load_format": False, "abort_all_requests": False, "weight_version": False,
            "is_async": False, "torch_empty_cache": False, "keep_pause": False, "recapture_cuda_graph": False,
            "token_step": False, "flush_cache": False, "manifest": False,
        },
    ),
}  # fmt: skip
SGLANG_PAUSE_MODES = {"abort", "retract", "in_place"}
# What both versions' own parser of the command line has taken, with and without a GPU.
SGLANG_OPTIONS = {
    "--model-path", "--dtype", "--tp-size", "--context-length", "--max-running-requests", "--skip-tokenizer-init",
    "--skip-server-warmup", "--log-level", "--log-level-http", "--disable-radix-cache", "--device",
    "--attention-backend", "--sampling-backend", "--disable-overlap-schedule", "--mem-fraction-static",
    "--max-total-tokens", "--sleep-on-idle", "--enable-fp32-lm-head",
}  # fmt: skip
# 0.5.23's answer, as its own class writes it; 0.5.20's has the same names. The kept tokens are what its server adds.
SGLANG_ANSWER = json.loads(
    '{"text": "", "meta_info": {"id": "r", "prompt_tokens": 3, "completion_tokens": 3, "finish_reason": '
    '{"type": "stop", "matched": 1}, "output_token_logprobs": [[-1.5, 9, null], [-0.25, 8, null], [-3.0, 1, null]], '
    '"input_token_logprobs": [], "e2e_latency": 0.1, "cached_tokens": 0, "reasoning_tokens": 0, "num_retractions": 0, '
    '"weight_version": "e1/4", "weight_versions": [{"version": "e1/3", "start": 0, "end": 2}, {"version": "e1/4", '
    '"start": 2, "end": 3}], "output_token_sampling_mask": [[9, 2], [8], [1, 5, 6]], '
    '"output_token_sampling_logprobs": [-0.5, 0.0, -1.0], "output_token_sampling_mask_length": 3}, '
    '"output_ids": [9, 8, 1]}'
)
# 0.5.23, to a name in sampling_params that it does not know, and to a value of the wrong type.
SGLANG_REFUSALS = (
    {"error": "unknown field `top`, expected one of `max_new_tokens`, `stop`, `stop_token_ids`, `stop_regex`"},
    {"error": "invalid type: floating point `1.5`, expected i64"},
)


# Requests


def check_names(body: dict[str, Any], known: dict[str, bool], where: str) -> None:
    assert body.keys() <= known.keys(), f"{where} does not know {body.keys() - known.keys()}"
    missing = {name for name, needed in known.items() if needed} - body.keys()
    assert not missing, f"{where} needs {missing}"


def is_a(value: Any, kind: str) -> bool:
    """As 0.5.23's decoder judges."""
    if kind == "integers":
        return isinstance(value, list) and all(is_a(item, "integer") for item in value)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return isinstance(value, {"boolean": bool, "string": str}[kind])


@pytest.mark.parametrize("request_", REQUESTS)
def test_vllm_knows_all_that_it_is_asked(request_: GenerateRequest) -> None:
    for call in (VLLM.generate(request_), VLLM.score([5, 6, 7])):
        body = json.loads(json.dumps(call.body))
        check_names(body, VLLM_ROUTES[call.path][2], call.path)
        check_names(body["sampling_params"], dict.fromkeys(VLLM_SAMPLING, False), "sampling_params")
        assert 0 < len(body.get("cache_salt", "-")) <= VLLM_LONGEST_SALT


@pytest.mark.parametrize("request_", REQUESTS)
def test_sglang_admits_all_that_it_is_asked(request_: GenerateRequest) -> None:
    for call in (SGLANG.generate(request_), SGLANG.score([5, 6, 7])):
        body = json.loads(json.dumps(call.body))
        check_names(body, dict.fromkeys(SGLANG_GENERATE, False), call.path)
        many = isinstance(body["input_ids"][0], list)
        assert isinstance(body["sampling_params"], list) is many
        for name, value in body.items():
            if (kind := SGLANG_GENERATE[name]) == "sampling":
                for sampling in value if many else [value]:
                    check_names(sampling, dict.fromkeys(SGLANG_SAMPLING, False), "sampling_params")
                    wrong = {key for key, setting in sampling.items() if not is_a(setting, SGLANG_SAMPLING[key])}
                    assert not wrong, {key: sampling[key] for key in wrong}
            else:
                assert all(is_a(item, kind) for item in (value if name == "input_ids" and many else [value])), name


# Orders


class Recorder:
    """In place of an AdminClient: notes what it is asked, and answers as servers of that version do."""

    def __init__(self, version: str):
        self.version, self.label, self.overlaps = version, "default", False
        self.calls: list[tuple[str, str, dict[str, Any] | None]] = []

    def call(self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> Any:
        self.calls.append((method, path, None if body is None else json.loads(json.dumps(body))))
        return {
            "/version": {"version": self.version},
            "/openapi.json": {"paths": VLLM_ROUTES},
            "/get_world_size": {"world_size": 1},
            "/weight_info": {"weight_version": self.label},
            "/reset_prefix_cache": {"success": True},
            "/server_info": {
                "version": self.version, "tp_size": 1, "disable_radix_cache": True, "frontend": "python",
                "disable_overlap_schedule": not self.overlaps, "enable_deterministic_inference": False,
            },
            "/model_info": {"weight_version": self.label},
        }.get(urlsplit(path).path, {"success": True, "message": ""})  # fmt: skip


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    (tmp_path / "config.json").write_text("{}")
    return EngineOptions(
        "a", str(tmp_path), "p", "agent", Path("f"), "T", 1, update_timeout_s=5.0, disk_path=str(tmp_path / "versions")
    )


def administer(control: Any, loaders: Sequence[Any]) -> None:
    """All orders that an agent has for an engine."""
    control.describe()
    control.check_health(5.0)
    for mode in ("keep", "abort", "wait"):
        if mode != "wait" or isinstance(control, VLLMControl):
            control.pause(mode, 5.0)
    control.resume()
    control.reset_prefix_cache()
    control.weights_label()
    for loader in loaders:
        loader.connected(ACTOR)
        loader.prepare(VERSION, LABEL)
        loader.load(VERSION, LABEL)
        loader.close()


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_vllm_has_every_route_that_it_is_asked_by(version: str, options: EngineOptions) -> None:
    recorder = Recorder(version)
    for kv in ("keep", "recompute"):
        control = VLLMControl("http://127.0.0.1:1", "", replace(options, in_flight_kv=kv))  # type: ignore[arg-type]
        control.client = recorder  # type: ignore[assignment]
        control.describe()
        loaders = [
            DirectLoader(control, replace(options, tensor_parallel_size=2)),
            FileLoader(options, control.read_files),
        ]
        administer(control, loaders)
    for method, path, body in recorder.calls:
        parts = urlsplit(path)
        wanted, query, known = VLLM_ROUTES[parts.path]
        parameters = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
        assert method == wanted and parameters.keys() <= query
        assert set(parameters.get("mode", [])) <= VLLM_PAUSE_MODES
        assert set(parameters.get("clear_cache", [])) <= {"true", "false"}
        check_names(body or {}, known, parts.path)
    sampled = {VLLM.generate(REQUESTS[0]).path}
    assert {urlsplit(path).path for _, path, _ in recorder.calls} | sampled == VLLM_ROUTES.keys()


@pytest.mark.parametrize("version", SGLANG_VERSIONS)
def test_sglang_has_every_route_that_it_is_asked_by(version: str, options: EngineOptions) -> None:
    recorder = Recorder(version)
    for kv in ("keep", "recompute"):
        control = SGLangControl("http://127.0.0.1:1", "", replace(options, in_flight_kv=kv))  # type: ignore[arg-type]
        control.client = recorder  # type: ignore[assignment]
        administer(control, [FileLoader(options, control.read_files)])
    routes = SGLANG_ROUTES
    for method, path, body in recorder.calls:
        assert method == routes[path][0]
        check_names(body or {}, routes[path][1], path)
        if path == "/pause_generation":
            assert (body or {})["mode"] in SGLANG_PAUSE_MODES - {"abort"}
    sampled = {SGLANG.generate(REQUESTS[0]).path}
    assert {path for _, path, _ in recorder.calls} | sampled == routes.keys()


@pytest.mark.parametrize("version", SGLANG_VERSIONS)
def test_an_sglang_that_overlaps_its_steps_may_not_keep_caches_over_a_pause(
    version: str, options: EngineOptions
) -> None:
    recorder = Recorder(version)
    recorder.overlaps = True
    keeps, recomputes = (
        SGLangControl("http://127.0.0.1:1", "", replace(options, in_flight_kv=kv))  # type: ignore[arg-type]
        for kv in ("keep", "recompute")
    )
    keeps.client = recomputes.client = recorder  # type: ignore[assignment]
    with pytest.raises(EngineError, match="--disable-overlap-schedule, or set .*recompute"):
        keeps.describe()
    assert recomputes.describe().capabilities.version == version


def option_names(words: Sequence[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


@pytest.mark.parametrize("gpu", [False, True])
def test_engines_know_the_options_that_they_are_started_with(
    gpu: bool, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "has_gpu", lambda: gpu)
    monkeypatch.setattr(sglang_engine, "has_gpu", lambda: gpu)
    changes = itertools.product(("direct", "agent"), ("keep", "recompute"), ("float32", "bfloat16"))
    for route, kv, dtype in changes:
        engine_options = EngineOptions(
            **{**vars(options), "route": route, "in_flight_kv": kv, "memory_gb": 0.5, "dtype": dtype}
        )
        words, environment = vllm_engine.ENGINE.command(engine_options)
        arguments = [*serve.OWN_OPTIONS, *words[words.index("--") + 1 :]]
        assert option_names(arguments) <= VLLM_OPTIONS
        assert environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"
        # bfloat16 logits would be further from the trainer's than weights that are one version old.
        exact = gpu and engine_options.dtype == "bfloat16"
        assert (json.dumps({"head_dtype": "float32"}) in arguments) is exact
        words, environment = sglang_engine.ENGINE.command(engine_options)
        arguments = words[words.index("--") + 1 :]
        assert option_names(arguments) <= SGLANG_OPTIONS and ("--enable-fp32-lm-head" in arguments) is exact
        # Neither the weights nor the labels of a step that is under way may change.
        assert ("--disable-overlap-schedule" in arguments) is (not gpu or kv == "keep")
        assert environment["SGLANG_RUST_SERVER"] == "0"
        # A CPU is also the trainer's.
        assert ("--sleep-on-idle" in arguments) is (not gpu)


# Answers


@pytest.mark.parametrize(
    ("log_probs", "reason"), [([-1.0, math.nan], "is nan"), ([-math.inf], "is -inf"), ([], "without tokens")]
)
def test_what_could_not_be_trained_on_is_asked_for_again(log_probs: list[float], reason: str) -> None:
    length = len(log_probs)
    spans = [VersionSpan("e", 1, 0, length)] if length else []
    with pytest.raises(ActorError, match=reason):
        check_completions([Completion([1] * length, log_probs, "stop", spans)], SamplingParameters(2))
    with pytest.raises(ActorError, match="finish_reason = 'abort'"):
        check_completions([Completion([], [], "abort", [])], SamplingParameters(1))


VOCABULARY = 64
CUT = Completion([9, 8], [-0.5, -1.0], "length", [VersionSpan("e", 3, 0, 2)])
WHOLE = Completion([9, 8, 1, 63], [-0.5, 3e-5, -700.0, 0.0], "length", [VersionSpan("e", 3, 0, 4)])
IMPOSSIBLE: dict[str, tuple[Completion, str]] = {
    "shorter than its length": (CUT, "after 2 of 4 tokens.*max-model-len.*below training.seq_len"),
    "vLLM's floor": (replace(WHOLE, log_probs=[-0.5, -0.5, -9999.0, -0.5]), "token 3 is -9999, a probability of 0"),
    "the least fp32": (replace(WHOLE, log_probs=[-3.4e38, -0.5, -0.5, -0.5]), r"token 1 is -3.4e\+38"),
    "above 0": (replace(WHOLE, log_probs=[-0.5, -0.5, -0.5, 0.01]), "token 4 is 0.01, above 0"),
    "a probability": (replace(WHOLE, log_probs=[0.5, 0.9, 0.1, 1.0]), "token 1 is 0.5, above 0"),
    "another vocabulary": (replace(WHOLE, token_ids=[9, 8, 1, 64]), r"token 64 is not of .* vocabulary \(0 to 63\)"),
    "none of those kept": (replace(WHOLE, kept_token_ids=[[9], [8, 2], [1], [62]]), "token 63 was sampled, but is not"),
    "kept beyond": (replace(WHOLE, kept_token_ids=[[9], [8, 64], [1], [63]]), "token 64 is not of .* vocabulary"),
}


def read_samples(engine: str, sent_samples: list[Completion], top_k: int | None = None) -> list[Completion]:
    """What the run gets of an engine's answer; `colocated` hands over completions in the process."""
    if top_k is None:
        top_k = 40 if any(sample.kept_token_ids for sample in sent_samples) else 0
    query = GenerateRequest("r", [5, 6, 7], SamplingParameters(4, len(sent_samples), top_k=top_k))
    if engine == "colocated":
        (answer,) = decode_answers(encode_answers([ReplicaAnswer("r", sent_samples)]))
        return check_completions(answer.completions, query.sampling, VOCABULARY)
    return asyncio.run(completions_of(engine, query, [sent(ENGINES[engine](sent_samples, 3))], VOCABULARY))


@pytest.mark.parametrize("case", IMPOSSIBLE)
@pytest.mark.parametrize("engine", [*ENGINES, "colocated"])
def test_an_answer_that_cannot_be_is_refused_whichever_engine_sends_it(engine: str, case: str) -> None:
    completion, reason = IMPOSSIBLE[case]
    whole = WHOLE if completion.kept_token_ids is None else replace(WHOLE, kept_token_ids=[[9], [8], [1], []])
    assert read_samples(engine, [whole])[0].log_probs == WHOLE.log_probs
    with pytest.raises(AnswerRefused, match=reason):
        read_samples(engine, [whole, completion])


@pytest.mark.parametrize("engine", [*ENGINES, "colocated"])
def test_log_probs_of_a_truncated_distribution_without_the_tokens_that_it_kept_are_refused(engine: str) -> None:
    with pytest.raises(ActorError, match="kept"):
        read_samples(engine, [WHOLE], top_k=40)


SCORES: dict[str, Callable[[list[float]], Any]] = {
    "embedded": lambda values: {"log_probs": values, "epoch": "e", "version": 3},
    "vllm": lambda values: {
        "choices": [VLLM_SCORED["choices"][0]],
        "prompt_logprobs": [None, *({str(6 + place): {"logprob": value}} for place, value in enumerate(values))],
    },
    "sglang": lambda values: {
        "output_ids": [1],
        "meta_info": {
            "weight_version": "e/3",
            "input_token_logprobs": [[None, 5], *([value, 6 + place] for place, value in enumerate(values))],
        },
    },
}


@pytest.mark.parametrize(
    ("wrong", "reason"), [(-9999.0, "token 2 is -9999, a probability of 0"), (0.5, "token 2 is 0.5, above 0")]
)
@pytest.mark.parametrize("engine", SCORES)
def test_a_score_that_cannot_be_is_refused_whichever_engine_sends_it(engine: str, wrong: float, reason: str) -> None:
    def read(values: list[float]) -> list[float]:
        return asyncio.run(scores_of(engine, [5, 6, 7], [sent(SCORES[engine](values))])).log_probs

    assert read([-0.5, -30.0]) == [-0.5, -30.0]
    with pytest.raises(AnswerRefused, match=reason):
        read([-0.5, wrong])


# What is said of sampled tokens, held against the trainer


@dataclass
class Deviation:
    """How an engine computes, where the run asks for `temperature` and `top_p`."""

    temperature: float
    top_p: float = 1.0
    samples_at: float | None = None
    """In place of temperature"""
    reports_raw: bool = False
    """At temperature 1"""
    rope_theta: float | None = None
    """In place of the run's"""
    caught: bool = True
    flat: bool = False
    """The model is near uniform, as a policy that explores"""


DEVIATIONS = {
    "honest": Deviation(0.6, caught=False),
    "honest, truncated": Deviation(1.0, top_p=0.8, caught=False),
    "honest, greedy": Deviation(0.0, caught=False),
    "honest, nearly greedy": Deviation(0.005, flat=True, caught=False),
    "raw log-probs": Deviation(0.6, reports_raw=True),
    "another rope_theta": Deviation(1.0, rope_theta=1e6),
    "a clamped temperature": Deviation(0.02, samples_at=0.1, flat=True),
}


@pytest.fixture(scope="module")
def large_logits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with logits of several units, as trained models have them."""
    return make_tiny(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", head_dim=16)


def sampled_with(deviation: Deviation, model: Path, folder: Path) -> list[tuple[GenerateRequest, list[Completion]]]:
    """Four groups of four samples, by an engine that deviates so."""
    shutil.copytree(model, folder)
    if deviation.rope_theta is not None:
        facts = json.loads((folder / "config.json").read_text())
        facts["rope_parameters"]["rope_theta"] = deviation.rope_theta
        (folder / "config.json").write_text(json.dumps(facts))
    policy = load_policy(folder)
    temperature = deviation.temperature if deviation.samples_at is None else deviation.samples_at
    requests = [
        GenerateRequest(
            str(group), [3 + group, *range(20, 26)], SamplingParameters(12, 4, temperature, deviation.top_p, seed=group)
        )
        for group in range(4)
    ]
    engine = Engine(policy, max_sequences=16, max_length=32)
    # No other one reads weights after this.
    samples = list(zip(requests, engine.generate(requests), strict=True))
    for request, completions in samples:
        for completion in completions:
            completion.spans = [VersionSpan("e", 0, 0, len(completion.token_ids))]
            if deviation.reports_raw:
                first = len(request.prompt_ids) - 1
                completion.log_probs = score(policy, request.prompt_ids + completion.token_ids)[first:]
    return samples


def through_wire(engine: str, request: GenerateRequest, completions: list[Completion]) -> list[Completion]:
    """As a run gets them from this engine."""
    if engine == "colocated":
        (answer,) = decode_answers(encode_answers([ReplicaAnswer("r", completions)]))
        return answer.completions
    answer = sent(ENGINES[engine](completions, len(request.prompt_ids)))
    return asyncio.run(completions_of(engine, request, [answer]))


@pytest.mark.parametrize("case", DEVIATIONS)
def test_an_engine_that_computes_another_policy_is_named_with_figure_and_bound_whichever_it_is(
    case: str, large_logits: Path, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    deviation = DEVIATIONS[case]
    model = tiny_checkpoint() if deviation.flat else large_logits
    config = JobConfig()
    config.model.hf_assets_path, config.optimizer.lr = str(model), 0.0
    config.rollout.temperature, config.rollout.top_p = deviation.temperature, deviation.top_p
    trainer = PolicyTrainer(config, ParallelDims.from_config(config.parallelism, 1, 0))
    samples = sampled_with(deviation, model, tmp_path / "model")
    for engine in [*ENGINES, "colocated"]:
        groups = []
        for index, (request, completions) in enumerate(samples):
            received = through_wire(engine, request, completions)
            for completion in received:
                completion.actor, completion.asked_at = f"{engine}-{index % 2}", 0
            branches = [[Branch([Given(request.prompt_ids), completion])] for completion in received]
            groups.append(
                Group(index, [Sample(branch, "stop", reward=0.5 * place) for place, branch in enumerate(branches)])
            )
        figures = trainer.train_batch(Batch(0, groups)).actors
        assert figures.keys() == {f"{engine}-0", f"{engine}-1"} and all(actor.tokens > 64 for actor in figures.values())
        for reason in mismatch.judge_actors(config, figures, 0).values():
            assert bool(reason) is deviation.caught
            if reason:
                assert "tokens that it sampled with version 0" in reason
                assert f"more than the {sampling_tolerance(config):.3g} that rounding explains" in reason
                assert all(cause in reason for cause in ("processed_logprobs", "temperature", "rope_theta"))


def test_vllms_answers_are_understood() -> None:
    (completion,) = VLLM.completions(REQUESTS[1], sent(VLLM_ANSWER))
    assert (completion.token_ids, completion.log_probs, completion.kept_token_ids) == ([9], [-1.5], [[9, 2]])
    assert completion.spans == [VersionSpan("e1", 3, 0, 1)] and completion.finish_reason == "stop"
    scored = VLLM.scored([5, 6, 7], sent(VLLM_SCORED))
    assert (scored.log_probs, scored.version) == ([-2.0, -0.5], 4)
    (choice,) = VLLM_ANSWER["choices"]
    aborted = choice | {"finish_reason": "abort", "token_ids": [], "logprobs": None}
    assert VLLM.completions(REQUESTS[1], sent({"choices": [aborted]}))[0].finish_reason == "abort"
    with pytest.raises(RequestRefused, match="--return-sampling-mask"):
        VLLM.completions(REQUESTS[1], sent({"choices": [choice | {"sampling_mask": None}]}))


def test_sglangs_answers_are_understood() -> None:
    (completion,) = SGLANG.completions(REQUESTS[1], sent([SGLANG_ANSWER]))
    assert completion.token_ids == [9, 8, 1] and completion.log_probs == [-0.5, 0.0, -1.0]
    assert completion.kept_token_ids == [[9, 2], [8], [1, 5, 6]] and completion.finish_reason == "stop"
    assert completion.spans == [VersionSpan("e1", 3, 0, 2), VersionSpan("e1", 4, 2, 3)]
    aborted = {"type": "abort", "message": "Abort", "status_code": None, "err_type": None}
    answer = SGLANG_ANSWER | {"meta_info": SGLANG_ANSWER["meta_info"] | {"finish_reason": aborted}}
    assert SGLANG.completions(REQUESTS[1], sent([answer]))[0].finish_reason == "abort"


def vllm_answer(label: str, token: int) -> Any:
    (choice,) = VLLM_ANSWER["choices"]
    span = {"version": label, "start": 0, "end": 1}
    return {"choices": [choice | {"token_ids": [token], "weight_versions": [span]}]}


def sglang_answer(label: str, token: int) -> Any:
    span = {"version": label, "start": 0, "end": 3}
    about = SGLANG_ANSWER["meta_info"] | {"weight_versions": [span]}
    return [SGLANG_ANSWER | {"output_ids": [token, 8, 1], "meta_info": about}]


@pytest.mark.parametrize(("engine", "answer"), [(VLLM, vllm_answer), (SGLANG, sglang_answer)], ids=["vllm", "sglang"])
def test_an_answer_of_no_version_or_with_log_probs_of_other_tokens_is_not_used(engine: Any, answer: Any) -> None:
    assert engine.completions(REQUESTS[1], sent(answer("e1/3", 9)))[0].token_ids[0] == 9
    with pytest.raises(NoVersion, match="default"):
        engine.completions(REQUESTS[1], sent(answer("default", 9)))
    with pytest.raises(Malformed, match="other tokens"):
        engine.completions(REQUESTS[1], sent(answer("e1/3", 2)))


@pytest.fixture
def answering(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a server that gives the answer of the test's parameter: (status, body)."""
    answer = request.param
    with serving(lambda path, body: answer) as url:
        yield url


def ask(dialect: Any, url: str) -> Any:
    """Have an engine at `url` sample."""

    async def generate() -> Any:
        handler = AgentClient(dialect, "http://127.0.0.1:1", "")
        handler._engine, handler._capabilities = JsonClient(url, ""), Capabilities(dialect.name)
        try:
            return await handler.generate(REQUESTS[0], 5.0)
        finally:
            await handler.close()

    return asyncio.run(generate())


@pytest.mark.parametrize("answering", [(503, VLLM_PAUSED)], indirect=True)
def test_a_request_that_a_paused_vllm_sends_away_is_no_failure_of_the_actor(answering: str) -> None:
    with pytest.raises(ActorNotReady, match="Generation is paused"):
        ask(VLLM, answering)


@pytest.mark.parametrize("answering", [(400, refusal) for refusal in SGLANG_REFUSALS], indirect=True)
def test_what_sglangs_decoder_refuses_is_the_requests_fault(answering: str) -> None:
    with pytest.raises(RequestRefused, match="expected"):
        ask(SGLANG, answering)
