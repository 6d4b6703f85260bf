"""SGLang beside an agent: how its server is started, how weights get into it, and how its /generate is asked for tokens
and answers."""

from __future__ import annotations

import getpass
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from torchtitan.inference.actor_client import Facts, read_routes
from torchtitan.inference.engines.options import merge_objects
from torchtitan.inference.engines.sglang.serve import FIXED_VARIABLES
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
    aborted,
    make_completion,
    read_spans,
)
from torchtitan.inference.serving.joining import overridden_facts
from torchtitan.inference.serving.middleware import PREFIX_KEYS
from torchtitan.inference.types import (
    TAGS,
    Capabilities,
    Completion,
    EngineCall,
    GenerateRequest,
    ScoredTokens,
    Tag,
    VersionSpan,
    stream_seed,
)
from torchtitan.models.shape.composite import is_composite
from torchtitan.utils.machine import has_gpu, numa_nodes, usable_cores
from torchtitan.utils.typed_json import Natural, decode

if TYPE_CHECKING:
    import numpy as np

# The cores of each tensor-parallel worker on a CPU, as 0-3|4-7.
CORES_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
NO_OVERLAP = "--disable-overlap-schedule"
# Logits of the head are fp32, as the trainer's are.
EXACT_HEAD = "--enable-fp32-lm-head"
# Arguments with a meaning of their own to us, which the engine's own may still override.
CPU_ARGUMENTS = (
    "--device", "cpu",
    "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch",
    NO_OVERLAP,
    "--mem-fraction-static", "0.2",
    # Its schedulers would spin on the cores that the trainer computes with.
    "--sleep-on-idle",
)  # fmt: skip
# Keys of config.json, for a composite checkpoint: the server wants no processor of images, and several families leave
# the vision tower out.
OVERRIDES = "json-model-override-args"
TEXT_ONLY = {"language_model_only": True}
# SGLang takes no input that comes this near to its context length, and samples up to two tokens less than fit.
UNUSED_TOKENS = 6
# The context length may therefore pass what the model has positions for; no sequence does (preflight looks).
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
# What SGLang takes for "all tokens".
ALL_TOKENS = -1
MAX_SEED = 2**31 - 1
# It tells which tokens were kept only where there are at most so many (--sampling-mask-max-tokens); what top-p or min-p
# would keep beyond is cut off too, and told so.
MAX_KEPT = 4096
# Its own parser answers 422 to a body of the wrong form, 400 to values that it cannot use.
REFUSED = (400, 422)
WITHOUT_ROUTES = (
    "this SGLang does not report the experts of its tokens, which grpo.routing_replay needs: start it with "
    "--enable-return-routed-experts"
)


class SGLangControl(EngineControl):
    """SGLang tells neither whether it is paused nor what sleeps; this is what it was last told."""

    label_route = "/model_info"

    def __init__(self, url: str, token: str, options: EngineOptions):
        super().__init__(url, token, options)
        self._paused = self._loses_weights = False
        self._workers = 1

    def describe(self) -> EngineFacts:
        data = self.ask("/server_info")
        if not (self.keeps_cache or data.get("disable_radix_cache") or self._forgets_prefixes()):
            # It is reset only while no request runs or waits: those in flight would find what they had computed.
            raise EngineUnfit(
                "its prefix cache would outlive a change of weights: start it with --disable-radix-cache, or set "
                "inference.in_flight_kv = keep (--in-flight-kv)"
            )
        if self.keeps_cache and data.get("disable_overlap_schedule") is False:
            # Standing still in place, it leaves a step under way: that reads weights while they change, and its tokens
            # are counted to the new version. Requests that are retracted are waited for.
            raise EngineUnfit(
                "it overlaps steps, and one would outlast a pause: start it with --disable-overlap-schedule, or set "
                "inference.in_flight_kv = recompute (--in-flight-kv)"
            )
        saves = bool(data.get("enable_memory_saver"))
        self._loses_weights = saves and not data.get("enable_weights_cpu_backup")
        capabilities = Capabilities("sglang", str(data.get("version", "")), score=True, sleep=saves)
        self._workers = int(data.get("tp_size", 1))
        for size, reason in (("dp_size", SEVERAL_ENGINES), ("pp_size", STAGES)):
            if (data.get(size) or 1) != 1:
                raise EngineUnfit(f"it runs with --{size.replace('_', '-')} {data[size]}: {reason}")
        if data.get("speculative_algorithm"):
            raise EngineUnfit(f"it runs with --speculative-algorithm {data['speculative_algorithm']}: {SPECULATION}")
        model = data.get("model_path")
        facts = EngineFacts(capabilities, self._workers, can_wait=False, reported=_reported(data))
        return facts if model is None else replace(facts, model=str(model))

    def _forgets_prefixes(self) -> bool:
        """Whether it runs with our hook (serve.py), which drops what retracted requests had computed."""
        return self.client.exchange("GET", PREFIX_KEYS, self.timeout_s)[0] == 200

    def check_health(self, timeout_s: float) -> None:
        # /health samples a token, which a paused engine does not; this question goes to its scheduler too.
        self.ask("/server_info", timeout_s)

    def pause(self, mode: PauseMode, timeout_s: float) -> bool:
        if mode == "abort":
            self._abort(timeout_s)
            return True
        self.order("/pause_generation", {"mode": "in_place" if self.keeps_cache else "retract"}, timeout_s)
        # The order is not acknowledged; the scheduler answers what was asked after it when it has obeyed.
        self.ask("/server_info", timeout_s)
        self._paused = True
        return True

    def _abort(self, timeout_s: float) -> None:
        """End all requests, and let none begin. SGLang's own mode `abort` waits without an end where it stands still
        already, so requests are aborted by themselves."""
        self.order("/pause_generation", {"mode": "retract"}, timeout_s)
        self.order("/abort_request", {"abort_all": True}, timeout_s)
        self.ask("/server_info", timeout_s)
        self._paused = True

    def resume(self) -> None:
        self.order("/continue_generation", {})
        self._paused = False

    def sleep(self, level: int, tags: Sequence[Tag], finish_s: float) -> bool:
        deadline, stood = time.monotonic() + finish_s, self._paused
        while not self._stands_idle(deadline):
            if stood or len(tags) < len(TAGS):
                return False  # it was paused from elsewhere, or it must not go on without all of its memory
            self.resume()
            if time.monotonic() > deadline:
                return False
        self.order("/release_memory_occupation", {"tags": list(tags)})
        return True

    def _stands_idle(self, deadline: float) -> bool:
        """Wait until nothing runs, and have it stand still. SGLang's scheduler ends where it is asked to give memory
        back and has a request; standing still it gets none from the server in front of it."""
        finish_s = max(0.0, deadline - time.monotonic())
        if not self._paused and not self._idle(finish_s):
            return False
        self.order("/pause_generation", {"mode": "retract"})
        self._paused = True
        return self._idle(0.0)

    def _idle(self, finish_s: float) -> bool:
        """Whether it has nothing to do, or has not any more within `finish_s`: else it does not flush its caches."""
        status, text = self.client.exchange("POST", f"/flush_cache?timeout={finish_s:.3f}", self.timeout_s + finish_s)
        if status not in (200, 400):
            raise EngineError(f"/flush_cache answered {status}: {text}")
        return status == 200

    def drops_weights(self, level: int) -> bool:
        return level == 2 or self._loses_weights

    def wake(self, tag: Tag) -> None:
        self.order("/resume_memory_occupation", {"tags": [tag]})

    def reset_prefix_cache(self) -> None:
        """It is not reset: PrefixKeyMiddleware names its parts, and serve.py drops it where running requests are
        retracted."""

    def read_files(self, folder: Path, label: str) -> None:
        # A flush that finds requests running ends SGLang's scheduler: the cache is reset by an order of its own.
        body = {"model_path": str(folder), "load_format": "safetensors", "weight_version": label, "flush_cache": False}
        self.order("/update_weights_from_disk", body)
        # Only the first worker answers. Another that finds the files gone keeps its old weights, and does not say so.
        self._wait_for_workers()

    def _wait_for_workers(self) -> None:
        """Return when all tensor-parallel workers have done what was ordered, not only the first, which answers.

        It hands each order on before it answers, by two broadcasts over gloo, where who sends waits for the receiver.
        They spread as a tree, so a worker may be as many broadcasts behind as there are levels above it.
        """
        for _ in range((self._workers - 1).bit_length()):
            self.ask("/server_info")


def _reported(data: Mapping[str, Any]) -> Facts:
    """Return what /server_info says of how the server was started. SGLANG_RETURN_ORIGINAL_LOGPROB is not among it, so
    it is not known what its log-probs are."""
    reported: Facts = {}
    for key, name in (("version", "version"), ("dtype", "dtype")):
        if isinstance(data.get(key), str) and data[key] != "auto":
            reported[name] = data[key]
    for key, name in (("context_length", "max-length"), ("max_running_requests", "max-sequences")):
        if isinstance(data.get(key), int):
            reported[name] = data[key]
    try:
        overrides = json.loads(data.get("json_model_override_args") or "{}")
    except (TypeError, ValueError):
        overrides = {}
    return reported | (overridden_facts(overrides) if isinstance(overrides, dict) else {})


class SGLang(ForeignEngine):
    """See foreign_engine.ForeignEngine. Of versions 0.5.20 to 0.5.23."""

    name = "sglang"
    routes = ("agent",)
    control = SGLangControl
    refused_options = {
        **dict.fromkeys(("dp-size", "data-parallel-size", "dp", "enable-dp-attention"), SEVERAL_ENGINES),
        **dict.fromkeys(("pp-size", "pipeline-parallel-size"), STAGES),
        "config": IN_A_FILE,
        "nnodes": "an actor's engine is on one machine: start more actors",
        "tokenizer-worker-num": "each of several servers would ask for no token",
        **dict.fromkeys(("ssl-keyfile", "ssl-certfile"), BY_PORT),
        **dict.fromkeys(("api-key", "admin-api-key"), "it would be a second token beside the actor's"),
    }

    speculates = re.compile(r"(decoupled-)?spec")
    length_option = "context-length"
    least_temperature = 1e-6

    def server(self, options: EngineOptions) -> tuple[list[str], dict[str, str]]:
        on_cpu = not has_gpu()
        arguments = [
            "--model-path", options.model,
            "--dtype", options.dtype,
            "--tp-size", str(options.tensor_parallel_size),
            "--context-length", str(options.max_length + UNUSED_TOKENS),
            "--max-running-requests", str(options.max_sequences),
            "--skip-tokenizer-init",
            "--skip-server-warmup",
            "--log-level", "info",
            "--log-level-http", "warning",
        ]  # fmt: skip
        if options.sleep_level:
            # Without the second one weights that sleep are dropped.
            arguments += [
                "--enable-memory-saver",
                *(["--enable-weights-cpu-backup"] if options.sleep_level == 1 else []),
            ]
        if options.device_share:
            arguments += ["--mem-fraction-static", f"{options.device_share:.3f}"]
        if on_cpu:
            arguments += CPU_ARGUMENTS
            # It sizes the cache by what is free on the machine, which others use too.
            arguments += ["--max-total-tokens", str(options.max_sequences * (options.max_length + UNUSED_TOKENS))]
        elif options.in_flight_kv == "keep":
            arguments.append(NO_OVERLAP)  # see SGLangControl
        if not on_cpu and options.dtype != "float32":
            arguments.append(EXACT_HEAD)
        if is_composite(options.model):
            arguments += [f"--{OVERRIDES}", json.dumps(TEXT_ONLY)]
        environment = {"HF_HUB_OFFLINE": "1", LONGER: "1", **FIXED_VARIABLES}
        # Its sockets lie among the temporary files. So does what torch compiles for it, which is worth keeping.
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
        environment["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        environment["TMPDIR"] = str(options.folder)
        if on_cpu:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
            if options.tensor_parallel_size > numa_nodes():
                # Without being told it gives every worker a NUMA node, and ends where there are fewer.
                own_cores = cores_of_workers(options.tensor_parallel_size, usable_cores())
                environment[CORES_VARIABLE] = os.environ.get(CORES_VARIABLE) or own_cores
        return arguments, environment

    def passed(self, options: EngineOptions) -> list[str]:
        if is_composite(options.model):
            return merge_objects(options.arguments, OVERRIDES, TEXT_ONLY)
        return [*options.arguments]

    def generate(self, request: GenerateRequest) -> EngineCall:
        """One call: the same prompt n times, each with a seed of its own."""
        sampling = request.sampling
        most = MAX_KEPT if sampling.truncated else ALL_TOKENS
        common = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": min(sampling.top_k, MAX_KEPT) if sampling.top_k else most,
            "min_p": sampling.min_p,
            "stop_token_ids": sampling.stop_token_ids,
            # Without stop tokens nothing but the length ends a completion, also not those of the checkpoint.
            "ignore_eos": not sampling.stop_token_ids,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        seeds = (stream_seed(sampling.seed, sample) & MAX_SEED for sample in range(sampling.n))
        body = {
            "input_ids": [request.prompt_ids] * sampling.n,
            "sampling_params": [{**common, "sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
            "return_sampling_mask": sampling.truncated,
            **({"return_routed_experts": True} if sampling.routes else {}),
            # See vllm/engine.py.
            "cache_salt": request.request_id,
        }
        return EngineCall("/generate", body)

    def completions(self, request: GenerateRequest, answer: bytes | memoryview) -> list[Completion]:
        return [_completion(sample, request) for sample in decode(list[SampledSequence], answer, len(answer))]

    def score(self, token_ids: list[int]) -> EngineCall:
        """One token is sampled too: the version of the pass that gave the log-probs stands beside it."""
        body = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        return EngineCall("/generate", body)

    def scored(self, token_ids: list[int], answer: bytes | memoryview) -> ScoredTokens:
        about = decode(SampledSequence, answer, len(answer)).meta_info
        given = [row.token_id for row in about.input_token_logprobs]
        # It says 0 in place of the vocabulary's last token, of which it gives the right log-prob.
        if len(given) != len(token_ids) or any(
            token not in (expected, 0) for token, expected in zip(given, token_ids, strict=True)
        ):
            raise Malformed(f"the log-probs are of {given}, not of {token_ids}")
        span = _spans(about, 1)[0]
        return ScoredTokens(_log_probs(about.input_token_logprobs[1:]), span.epoch, span.version)

    def refused(self, status: int, reason: str) -> bool:
        # Requests that were dropped, such as by a pause, may come as 400 too.
        return status in REFUSED and "abort" not in reason.lower()


def _user() -> str:
    """As torch names the folder of what it compiles."""
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a container without an entry for this user
        return str(os.getuid())


def cores_of_workers(workers: int, cores: list[int]) -> str:
    """An equal share of `cores` for each worker, in SGLang's notation; where there are too few, workers share them."""
    shares: list[str] = []
    for worker in range(workers):
        first, end = worker * len(cores) // workers, (worker + 1) * len(cores) // workers
        share = cores[first:end] or [cores[worker % len(cores)]]
        shares.append(",".join(map(str, share)))
    return "|".join(shares)


class TokenLogProb(msgspec.Struct, array_like=True):
    """A token, and its text behind these two. The first one of a prompt has no log-prob."""

    logprob: float | None
    token_id: Natural | None


class _End(msgspec.Struct):
    type: str


class _About(msgspec.Struct):
    finish_reason: _End | None = None
    output_token_logprobs: list[TokenLogProb] = []
    output_token_sampling_logprobs: list[float] | None = None
    output_token_sampling_mask: list[list[Natural]] | None = None
    input_token_logprobs: list[TokenLogProb] = []
    input_top_logprobs: list[list[TokenLogProb] | None] | None = None
    weight_version: str | None = None
    weight_versions: list[LabelledSpan] | None = None
    routed_experts: str | None = None


class SampledSequence(msgspec.Struct):
    """What is said of one sequence."""

    meta_info: _About
    output_ids: list[Natural] = []


def _log_probs(rows: list[TokenLogProb]) -> list[float]:
    found = [row.logprob for row in rows if row.logprob is not None]
    if len(found) < len(rows):
        raise Malformed("a log-prob is missing")
    return found


def _completion(sample: SampledSequence, request: GenerateRequest) -> Completion:
    about, token_ids = sample.meta_info, sample.output_ids
    finished = None if about.finish_reason is None else FINISHED.get(about.finish_reason.type)
    if finished is None:
        return aborted()
    rows = about.output_token_logprobs
    log_probs, kept = _log_probs(rows), None
    if request.sampling.truncated:
        kept = about.output_token_sampling_mask
        if kept is None or about.output_token_sampling_logprobs is None:
            raise Malformed("the tokens that top-p, top-k or min-p kept are missing")
        log_probs = about.output_token_sampling_logprobs
    spans = _spans(about, len(token_ids))
    known = len(request.prompt_ids) + len(token_ids) - 1
    # int32, flat; how many layers there are the model says.
    routes = read_routes(
        request, len(token_ids), about.routed_experts,
        lambda data: _numbers(data).reshape(known, 1, -1), WITHOUT_ROUTES,
    )  # fmt: skip
    return make_completion(token_ids, [row.token_id for row in rows], log_probs, finished, spans, kept, routes)


def _numbers(data: bytes) -> np.ndarray:
    import numpy as np  # here: who only plans a run has no routes

    return np.frombuffer(data, "<i4")


def _spans(about: _About, tokens: int) -> list[VersionSpan]:
    return read_spans(about.weight_versions or [LabelledSpan(about.weight_version, 0, tokens)])


ENGINE = SGLang()
