"""vLLM beside an agent: how its server is started, its admin routes, how weights get into it, and how it is asked for
tokens and answers."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from torchtitan.inference.actor_client import Facts, RequestRefused, read_routes
from torchtitan.inference.engines.options import merge_objects
from torchtitan.inference.engines.sidecar.foreign_engine import (
    BY_PORT,
    FINISHED,
    IN_A_FILE,
    SEVERAL_ENGINES,
    SPECULATION,
    STAGES,
    EngineControl,
    EngineError,
    EngineFacts,
    EngineOptions,
    EngineUnfit,
    ForeignEngine,
    LabelledSpan,
    Malformed,
    PauseMode,
    WeightLoader,
    aborted,
    make_completion,
    read_spans,
)
from torchtitan.inference.engines.vllm.serve import BACKEND, FIXED_VARIABLES
from torchtitan.inference.serving.joining import PROCESSED, overridden_facts
from torchtitan.inference.types import (
    Capabilities,
    Completion,
    EngineCall,
    GenerateRequest,
    ScoredTokens,
    Tag,
    VersionSpan,
)
from torchtitan.models.shape.composite import is_composite
from torchtitan.utils.machine import has_gpu, host_memory
from torchtitan.utils.typed_json import Natural, decode

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

# An engine that has nothing to finish says so within this time.
LEAST_WAIT_S = 1.0
GENERATE = "/inference/v1/generate"
"""Tokens in, tokens out"""
# What is asked of the server; all of it is there since 0.32.
NEEDED = {
    GENERATE: "--enable-scale-out",
    "/pause": "the environment variable VLLM_SERVER_DEV_MODE=1",
    "/update_weights": "the environment variable VLLM_SERVER_DEV_MODE=1",
    "/weight_info": "a newer version (0.32 has it)",
}
SERVER_INFO = "/server_info"
GIGABYTE = 2**30
# Where its sockets lie, unless the environment says so already.
SOCKETS = "VLLM_RPC_BASE_PATH"
SLEEP_MODE = "--enable-sleep-mode"
# Of a composite checkpoint only the text model is loaded, which is all that new versions hold.
TEXT_ONLY = "--language-model-only"
# Of its Hugging Face configuration: products of the head are summed to fp32 logits, as the trainer's are. Rounding them
# to bfloat16 alone moves a sampled token's log-prob by some 0.03 nats. On a CPU it has packed the head's weight away.
EXACT_HEAD = {"head_dtype": "float32"}
OVERRIDES = "hf-overrides"
CPU_ARGUMENTS = (
    # Nothing is compiled: on a CPU that takes longer than what it saves in a run of minutes.
    "--enforce-eager",
    # A seeded request whose prompt is computed in parts ends vLLM 0.32 on a CPU ("CPU Generator does not use offset").
    "--no-enable-chunked-prefill",
    # Requests share whole blocks of their prompts. A turn of a conversation adds a part of what vLLM would take, 128
    # tokens; it can have no fewer than 32 on a CPU.
    "--block-size", "32",
)  # fmt: skip
REFUSED = (400, 413, 422)
WITHOUT_ROUTES = (
    "this vLLM does not report the experts of its tokens, which grpo.routing_replay needs: start it with "
    "--enable-return-routed-experts, which needs its Model Runner V2 and prefix caching"
)


class _ModelConfig(msgspec.Struct):
    model: str
    dtype: str
    max_model_len: int
    logprobs_mode: str
    hf_overrides: dict[str, Any] = {}


class _SchedulerConfig(msgspec.Struct):
    max_num_seqs: int


class _ParallelConfig(msgspec.Struct):
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1


class _Config(msgspec.Struct):
    model_config: _ModelConfig
    scheduler_config: _SchedulerConfig
    parallel_config: _ParallelConfig
    speculative_config: Any = None
    """Whatever form it has; None without speculation"""


class _ServerInfo(msgspec.Struct):
    """What SERVER_INFO says of how the server was started."""

    vllm_config: _Config


class VLLMControl(EngineControl):
    label_route = "/weight_info"

    def describe(self) -> EngineFacts:
        version = str(self.ask("/version")["version"])
        routes = self.ask("/openapi.json")["paths"]
        for route, how in NEEDED.items():
            if route not in routes:
                raise EngineUnfit(f"vLLM {version} has no route {route}: it needs {how}")
        world_size = int(self.ask("/get_world_size")["world_size"])
        options = self.options
        verifies = options.verify_every > 0 and options.route == "direct"
        # Its routes do not tell whether it frees anything.
        sleeps = (options.sleep_level > 0 or SLEEP_MODE in options.arguments) and "/sleep" in routes
        capabilities = Capabilities("vllm", version, score=True, digest=verifies, sleep=sleeps)
        reported, model = self._reported(routes)
        return EngineFacts(capabilities, world_size, reported={"version": version, **reported}, model=model)

    def _reported(self, routes: Collection[str]) -> tuple[Facts, str | None]:
        """Return what it says of how it was started, and its checkpoint. Raises EngineUnfit."""
        if SERVER_INFO not in routes:
            return {}, None
        try:
            config = msgspec.convert(self.ask(f"{SERVER_INFO}?config_format=json"), _ServerInfo).vllm_config
        except msgspec.ValidationError as error:
            # Another version may say it in another form: the probe still compares what it computes.
            logger.warning("%s is not understood: %s", SERVER_INFO, error)
            return {}, None
        parallel, model = config.parallel_config, config.model_config
        if parallel.data_parallel_size > 1:
            raise EngineUnfit(f"it runs with --data-parallel-size {parallel.data_parallel_size}: {SEVERAL_ENGINES}")
        if parallel.pipeline_parallel_size > 1:
            raise EngineUnfit(f"it runs with --pipeline-parallel-size {parallel.pipeline_parallel_size}: {STAGES}")
        if config.speculative_config is not None:
            raise EngineUnfit(f"it runs with --speculative-config: {SPECULATION}")
        log_probs = model.logprobs_mode
        if log_probs == "processed_logprobs":
            log_probs = PROCESSED
        else:
            log_probs += " (start it with --logprobs-mode processed_logprobs)"
        reported: Facts = {
            "dtype": model.dtype.removeprefix("torch."),
            "log-probs": log_probs,
            "max-length": model.max_model_len,
            "max-sequences": config.scheduler_config.max_num_seqs,
        }
        return reported | overridden_facts(model.hf_overrides), model.model

    def check_health(self, timeout_s: float) -> None:
        self.client.call("GET", "/health", timeout_s)
        # Answered by the engine's own loop, not by the HTTP server in front of it.
        self.ask("/weight_info", timeout_s)

    def pause(self, mode: PauseMode, timeout_s: float) -> bool:
        clears = "false" if mode == "keep" and self.keeps_cache else "true"
        try:
            self.order(f"/pause?mode={mode}&clear_cache={clears}", timeout_s=timeout_s)
        except EngineError:
            if mode != "wait":
                raise
            return False
        return True

    def resume(self) -> None:
        self.order("/resume")

    def sleep(self, level: int, tags: Sequence[Tag], finish_s: float) -> bool:
        # By itself it would wait for what runs without an end, or drop that. What it has given back it passes over.
        if not self.pause("wait", max(finish_s, LEAST_WAIT_S)):
            return False
        self.order(f"/sleep?level={level}&mode=keep")
        return True

    def drops_weights(self, level: int) -> bool:
        return level == 2

    def wake(self, tag: Tag) -> None:
        self.order(f"/wake_up?tags={tag}")

    def reset_prefix_cache(self) -> None:
        done = self.client.call("POST", "/reset_prefix_cache", self.timeout_s)["success"]
        if not done and not self.keeps_cache:
            raise EngineError("the prefix cache could not be reset")
        # Under "keep" running requests hold on to theirs. No later one gets to see it: see PrefixKeyMiddleware.

    def read_files(self, folder: Path, label: str) -> None:
        self._call_workers("reload_weights", {"weights_path": str(folder)})
        if self.options.python:
            # Only the servers that we start have our worker extension. Without it one may go on computing with the old
            # head where that is packed, as on CPUs.
            self._call_workers("torchtitan_repack", {})
        self.order("/update_weight_version", {"new_version": label})

    def _call_workers(self, method: str, arguments: dict[str, str]) -> None:
        self.order("/collective_rpc", {"method": method, "kwargs": arguments, "timeout": self.timeout_s})


class VLLM(ForeignEngine):
    """See foreign_engine.ForeignEngine. Of versions 0.32.0 and 0.33.0.

    The server runs with --enable-scale-out, which has GENERATE, and --logprobs-mode processed_logprobs: those that
    tokens were sampled with.
    """

    name = "vllm"
    routes = ("direct", "agent")
    control = VLLMControl
    refused_options = {
        **dict.fromkeys(("data-parallel-size", "dp", "data-parallel-size-local", "dpl"), SEVERAL_ENGINES),
        **dict.fromkeys(("pipeline-parallel-size", "pp"), STAGES),
        **dict.fromkeys(("nnodes", "n"), "an actor's engine is on one machine: start more actors"),
        **dict.fromkeys(("api-server-count", "asc"), "each of several servers would pause for itself"),
        **dict.fromkeys(("uds", "ssl-keyfile", "ssl-certfile"), BY_PORT),
        "config": IN_A_FILE,
        "headless": BY_PORT,
        "disable-fastapi-docs": "the agent reads in /openapi.json which routes there are",
        "api-key": "it would be a second token beside the actor's",
    }

    speculates = re.compile(r"specul|spec-|sc(\.|$)")
    length_option = "max-model-len"
    least_temperature = 0.01

    def server(self, options: EngineOptions) -> tuple[list[str], dict[str, str]]:
        arguments = [
            "--model", options.model,
            "--dtype", options.dtype,
            "--tensor-parallel-size", str(options.tensor_parallel_size),
            "--max-model-len", str(options.max_length),
            "--max-num-seqs", str(options.max_sequences),
            # Requests say all that matters; the checkpoint's own defaults would come on top.
            "--generation-config", "vllm",
            "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if is_composite(options.model):
            arguments.append(TEXT_ONLY)
        if options.route == "direct":
            arguments += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
        if has_gpu() and options.dtype != "float32":
            arguments += [f"--{OVERRIDES}", json.dumps(EXACT_HEAD)]
        if options.sleep_level:
            arguments.append(SLEEP_MODE)
        if options.device_share:
            arguments += ["--gpu-memory-utilization", f"{options.device_share:.3f}"]
        memory_gb = options.memory_gb
        environment = dict(FIXED_VARIABLES)
        if SOCKETS not in os.environ:
            environment[SOCKETS] = str(options.folder)
        if not has_gpu():
            # vLLM would have every actor on the same cores, and take nearly all of the machine's memory for each.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            memory_gb = options.memory_gb or default_memory_gb()
            arguments += CPU_ARGUMENTS
        if memory_gb:
            arguments += ["--kv-cache-memory-bytes", str(int(memory_gb * GIGABYTE))]
        return arguments, environment

    def passed(self, options: EngineOptions) -> list[str]:
        if has_gpu() and options.dtype != "float32":
            return merge_objects(options.arguments, OVERRIDES, EXACT_HEAD)
        return [*options.arguments]

    def special_loader(self, control: EngineControl, options: EngineOptions) -> WeightLoader:
        from torchtitan.inference.engines.vllm.direct import DirectLoader

        return DirectLoader(control, options)

    def generate(self, request: GenerateRequest) -> EngineCall:
        """One call; vLLM seeds sample i with seed + i."""
        sampling = request.sampling
        body = {
            "request_id": request.request_id,
            "token_ids": request.prompt_ids,
            "sampling_params": {
                "n": sampling.n,
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "seed": sampling.seed,
                "stop_token_ids": sampling.stop_token_ids,
                # Only the stop tokens that are asked for, not also those of the checkpoint.
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            },
            # A request shares a prefix among its own samples alone, unless the server knows a name for the weights
            # that it holds (PrefixKeyMiddleware): one that it does not know could outlive them.
            "cache_salt": request.request_id,
        }
        return EngineCall(GENERATE, body)

    def completions(self, request: GenerateRequest, answer: bytes | memoryview) -> list[Completion]:
        choices = sorted(decode(_Answer, answer, len(answer)).choices, key=lambda choice: choice.index)
        return [_completion(choice, request) for choice in choices]

    def score(self, token_ids: list[int]) -> EngineCall:
        """One token is sampled too: the version of the pass that gave the log-probs stands beside it."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "ignore_eos": True, "detokenize": False}
        return EngineCall(GENERATE, {"token_ids": token_ids, "sampling_params": sampling})

    def scored(self, token_ids: list[int], answer: bytes | memoryview) -> ScoredTokens:
        scores = decode(_Scores, answer, len(answer))
        (choice,) = scores.choices
        span = _spans(choice, 1)[0]
        rows = scores.prompt_logprobs
        if len(rows) != len(token_ids):
            raise Malformed(f"{len(rows)} log-probs were returned for {len(token_ids)} tokens")
        values = [(row or {})[str(token)].logprob for row, token in zip(rows[1:], token_ids[1:], strict=True)]
        return ScoredTokens(values, span.epoch, span.version)

    def refused(self, status: int, reason: str) -> bool:
        return status in REFUSED


def default_memory_gb() -> float:
    """KV cache of an actor on a CPU, where nothing else is said: an eighth of what is free, at most 4 GiB."""
    return min(4.0, host_memory().available / GIGABYTE / 8)


class Row(msgspec.Struct):
    """A token's log-prob; of a sampled one also its number."""

    logprob: float
    token_id: Natural | None = None


class _Rows(msgspec.Struct):
    content: list[Row]


class _Choice(msgspec.Struct):
    """A sample; one that was aborted has no log-probs."""

    index: int
    finish_reason: str | None
    token_ids: list[Natural]
    logprobs: _Rows | None = None
    weight_versions: list[LabelledSpan] | None = None
    sampling_mask: list[list[Natural]] | None = None
    routed_experts: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Scores(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[str, Row] | None]


def _completion(choice: _Choice, request: GenerateRequest) -> Completion:
    finished = FINISHED.get(choice.finish_reason or "")
    if finished is None:
        return aborted()
    truncated, kept = request.sampling.truncated, choice.sampling_mask
    if truncated and kept is None:
        raise RequestRefused(
            "generate",
            "this vLLM does not report which tokens top-p, top-k or min-p kept, without which their log-probs mean "
            "nothing: start it with --return-sampling-mask if it has that option, or sample without truncation",
        )
    if choice.logprobs is None:
        raise Malformed("a sample has no log-probs")
    rows = choice.logprobs.content
    spans = _spans(choice, len(choice.token_ids))
    routes = read_routes(request, len(choice.token_ids), choice.routed_experts, read_npy, WITHOUT_ROUTES)
    scored, log_probs = [row.token_id for row in rows], [row.logprob for row in rows]
    return make_completion(choice.token_ids, scored, log_probs, finished, spans, kept if truncated else None, routes)


def read_npy(data: bytes) -> np.ndarray:
    """Return the array in a file of numpy's format. np.load would read other formats too, and allocate whatever shape
    the header names. Raises ValueError: the shape is not that of the bytes behind the header; or any other error that
    numpy has for a broken header."""
    import numpy as np  # here: who only plans a run has no routes

    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read_header(file)
    numbers: np.ndarray = np.frombuffer(data, dtype, offset=file.tell())
    return numbers.reshape(shape, order="F" if fortran_order else "C")


def _spans(choice: _Choice, tokens: int) -> list[VersionSpan]:
    spans = read_spans(choice.weight_versions or [])
    if sum(span.end - span.start for span in spans) != tokens:
        raise Malformed(f"the versions {choice.weight_versions} are not those of {tokens} tokens")
    return spans


ENGINE = VLLM()
