"""Engines that cannot work as they are started, or as others have started them: it is said at once, and why."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, asynchronous, eventually
from tests.unit_tests.inference.json_server import Answer, serving
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.engines.options import merge_objects, read_options
from torchtitan.inference.engines.sglang.engine import SGLang
from torchtitan.inference.engines.sidecar.foreign_engine import EngineOptions, ForeignEngine
from torchtitan.inference.engines.sidecar.server import UnusableEngine, until_described
from torchtitan.inference.engines.vllm.engine import VLLM, VLLMControl
from torchtitan.inference.pool import actor_process
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.utils.child_process import ChildProcess
from torchtitan.utils.json_lines import EventLog, read_json_lines


def control(url: str) -> VLLMControl:
    options = EngineOptions("actor", "model", "", "agent", Path("port"), "TOKEN", 0)
    return VLLMControl(url, "token", options)


def refusal(url: str) -> str:
    """What is said of this server, long before the deadline."""
    with pytest.raises(UnusableEngine) as caught:
        asyncio.run(until_described(control(url), time.monotonic() + 100 * PATIENCE_S))
    return str(caught.value)


def test_a_server_with_another_token_is_refused_at_once() -> None:
    with serving(lambda path, body: (401, {}), lambda path: (401, {"error": "Unauthorized"})) as url:
        message = refusal(url)
    assert "answered 401" in message and "VLLM_API_KEY" in message and "--engine-token-env" in message


def test_a_server_without_the_routes_for_weights_is_refused_at_once_by_what_it_lacks() -> None:
    def get(path: str) -> Answer:
        answers = {"/version": {"version": "0.32.0"}, "/openapi.json": {"paths": {"/inference/v1/generate": {}}}}
        return (200, answers[path]) if path in answers else (404, {})

    with serving(lambda path, body: (404, {}), get) as url:
        message = refusal(url)
    assert "vLLM 0.32.0 has no route /pause: it needs the environment variable VLLM_SERVER_DEV_MODE=1" in message


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--data-parallel-size", "2"], "--data-parallel-size 2"),
        (["--data_parallel_size=2"], "--data-parallel-size 2"),
        (["--enforce-eager", "-dp", "2"], "--dp 2"),
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size 2"),
        (["--uds", "/tmp/socket"], "--uds /tmp/socket"),
        (["--headless"], "--headless"),
        (["--speculative-config", '{"method": "ngram"}'], '--speculative-config {"method": "ngram"}'),
        (["--speculative_config.num_speculative_tokens", "1"], "--speculative-config.num_speculative_tokens 1"),
        (["-sc", "{}"], "--sc {}"),
        (["--spec-method=ngram"], "--spec-method ngram"),
        (["--speculative-conf", "{}"], "--speculative-conf {}"),
    ],
)
def test_options_that_no_actor_can_have_are_refused_by_name(words: list[str], named: str) -> None:
    (wrong,) = VLLM().wrong_options(words)
    assert wrong.startswith(f"{named} is not allowed with vllm: ")


@pytest.mark.parametrize(
    "option", ["speculative-algorithm", "speculative-num-steps", "speculative-draft-model-path", "speculative-alg"]
)
def test_sglangs_speculative_decoding_is_refused_by_name(option: str) -> None:
    (wrong,) = SGLang().wrong_options([f"--{option}", "1"])
    assert wrong.startswith(f"--{option} 1 is not allowed with sglang: ") and "draft" in wrong


def test_options_in_a_file_are_refused_as_nobody_looks_at_them() -> None:
    for engine in (VLLM(), SGLang()):
        (wrong,) = engine.wrong_options(["--config", "options.yaml"])
        assert wrong.startswith(f"--config options.yaml is not allowed with {engine.name}: ")


def test_an_engine_that_says_nothing_of_its_options_may_have_any() -> None:
    class Plain(ForeignEngine):
        name, routes = "plain", ("agent",)

    config = JobConfig()
    config.inference.engine.args, config.rollout.temperature = {"max-length": 8}, 0.001
    assert not list(Plain().problems(config))


@pytest.mark.parametrize(("engine", "option"), [(VLLM(), "max_model_len"), (SGLang(), "context-length")])
def test_an_engine_is_started_for_no_less_than_the_sequences_of_the_run(engine: ForeignEngine, option: str) -> None:
    config = JobConfig()
    config.training.seq_len = 32
    config.inference.engine.args = {option: 8}
    ((key, text),) = engine.problems(config)
    assert key == config.inference.engine_key("args") and "training.seq_len = 32" in text
    config.inference.engine.args = {option: 32}
    assert not list(engine.problems(config))


def test_a_temperature_that_an_engine_would_change_is_refused() -> None:
    config = JobConfig()
    config.rollout.temperature = 0.005
    ((key, text),) = VLLM().problems(config)
    assert key == "rollout.temperature" and "at least 0.01" in text
    assert not list(SGLang().problems(config))
    config.rollout.temperature = 0.01
    assert not list(VLLM().problems(config))


def test_options_of_one_engine_are_allowed() -> None:
    words = [
        "--data-parallel-size",
        "1",
        "--max-model-len",
        "64",
        "--hf-overrides.rope_theta",
        "-1",
        "--middleware",
        "a",
        "--specialize-active-lora",
        "--scheduling-policy",
        "fcfs",
    ]
    assert not VLLM().wrong_options(words)
    assert [option.name for option in read_options(words)] == [
        "data-parallel-size", "max-model-len", "hf-overrides.rope_theta", "middleware",
        "specialize-active-lora", "scheduling-policy",
    ]  # fmt: skip
    assert not SGLang().wrong_options(["--dp-size", "1"])
    assert "num_actors" in SGLang().wrong_options(["--dp-size", "2"])[0]


def test_an_engine_serves_of_a_composite_only_the_text_model(tmp_path: Path) -> None:
    for name, config in {"text": {}, "composite": {"text_config": {}}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "gemma3", **config}))
        options = EngineOptions("actor", str(tmp_path / name), "", "agent", Path("port"), "TOKEN", 0)
        arguments, _ = VLLM().server(options)
        assert ("--language-model-only" in arguments) == (name == "composite")
        arguments, _ = SGLang().server(options)
        assert ('{"language_model_only": true}' in arguments) == (name == "composite")
        passed = SGLang().passed(replace(options, arguments=("--json-model-override-args", '{"rope_theta": 5}')))
        assert ("language_model_only" in passed[-1]) == (name == "composite") and '"rope_theta": 5' in passed[-1]


@pytest.mark.parametrize(
    ("words", "merged"),
    [
        ([], None),
        (["--seed", "3"], None),
        (["--hf-overrides", '{"rope_theta": 5}'], {"head_dtype": "float32", "rope_theta": 5}),
        (['--hf_overrides={"head_dtype": "model"}'], {"head_dtype": "model"}),
        (["--hf-overrides.text_config.rope_theta", "5"], {"head_dtype": "float32", "text_config": {"rope_theta": 5}}),
    ],
)
def test_overrides_of_a_user_are_merged_with_ours(words: list[str], merged: dict[str, object] | None) -> None:
    found = merge_objects([*words, "--enforce-eager"], "hf-overrides", {"head_dtype": "float32"})
    if merged is None:
        assert found == [*words, "--enforce-eager"]
    else:
        assert found[:-1] == ["--enforce-eager", "--hf-overrides"] and json.loads(found[-1]) == merged


def test_the_environment_of_an_engine_is_what_the_run_relies_on() -> None:
    """In a process of its own, as serve.py does."""
    program = (
        "import os\n"
        "from torchtitan.inference.serving.middleware import take_over_environment\n"
        "from torchtitan.inference.engines.{0}.serve import CLEARED_VARIABLES, FIXED_VARIABLES\n"
        "take_over_environment(FIXED_VARIABLES, CLEARED_VARIABLES)\n"
        "print(sorted(name + '=' + value for name, value in os.environ.items() if name.startswith('{1}')))"
    )
    given = {
        "VLLM_API_KEY": "x", "VLLM_SERVER_DEV_MODE": "0", "VLLM_PLUGINS": "", "VLLM_DP_SIZE": "2",
        "VLLM_LOGGING_LEVEL": "DEBUG", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "SGLANG_RUST_SERVER": "1",
        "VLLM_FLOAT32_MATMUL_PRECISION": "medium", "SGLANG_MAX_BATCH_REQS_PER_HTTP_REQ": "1",
        "SGLANG_SIMULATE_ACC_LEN": "3", "SGLANG_CPU_OMP_THREADS_BIND": "0-1",
    }  # fmt: skip
    left = {}
    for engine, prefix in (("vllm", "VLLM_"), ("sglang", "SGLANG_")):
        done = subprocess.run(
            [sys.executable, "-c", program.format(engine, prefix)],
            env={**os.environ, **given}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        *named, left[engine] = done.stdout.splitlines()
        assert named and all(line.split("=")[0].split()[0] in given for line in named)
    assert left["vllm"] == str(
        ["VLLM_ALLOW_INSECURE_SERIALIZATION=0", "VLLM_LOGGING_LEVEL=DEBUG", "VLLM_SERVER_DEV_MODE=1"]
    )
    assert left["sglang"] == str(["SGLANG_CPU_OMP_THREADS_BIND=0-1", "SGLANG_RUST_SERVER=0"])


# As vLLM 0.32 wrote them, shortened.
LOGS = {
    "error: unrecognized arguments: --no-such-option": (
        "starting python -m vllm\nusage: entry [--uvicorn-log-level {critical,debug,error,info}]\n"
        "   [--jit-monitor-mode {error,warn}]\nentry: error: unrecognized arguments: --no-such-option\n"
    ),
    "ValueError: the backend needs pipeline_parallel_size = 1": (
        "(APIServer pid=1) WARNING 11-29 05:56:02 [system_utils.py:255] fd limit errors like `OSError: [Errno 24]`\n"
        "(EngineCore pid=2) ERROR 11-29 05:58:43 [core.py:9] Traceback (most recent call last):\n"
        '(EngineCore pid=2) ERROR 11-29 05:58:43 [core.py:9]   File "core.py", line 3, in run\n'
        "(EngineCore pid=2) ERROR 11-29 05:58:43 [core.py:9] ValueError: the backend needs pipeline_parallel_size = 1\n"
        'Traceback (most recent call last):\n  File "entry.py", line 9, in main\n'
        "RuntimeError: Engine core initialization failed. See root cause above. Failed: {'EngineCore': 1}\n"
    ),
    "ValidationError: 1 validation error for ModelConfig Value error, fp8 needs bfloat16": (
        "Traceback (most recent call last):\n"
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, fp8 needs bfloat16 [type=value_error]\n"
    ),
    "": "Traceback\nRuntimeError: Engine core initialization failed. See root cause above. {'EngineCore': -9}\n",
}  # fmt: skip


@pytest.mark.parametrize("cause", LOGS)
@asynchronous
async def test_the_cause_of_an_engines_end_is_its_own_line_of_this_start(tmp_path: Path, cause: str) -> None:
    process = ChildProcess("the engine", tmp_path / "log")
    (tmp_path / "log").write_text("ValueError: of an earlier start\n")
    (tmp_path / "said").write_text(LOGS[cause])
    await process.launch(["cat", str(tmp_path / "said")], os.environ)
    await process.wait()
    assert cause in process.find_cause() and bool(process.find_cause()) == bool(cause)


@pytest.mark.parametrize(("code", "starts"), [(2, 1), (1, 3)])
@asynchronous
async def test_an_actor_whose_options_cannot_work_is_started_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, starts: int
) -> None:
    """2: as the agent ends where the engine has said why it cannot run; 1: anything else."""
    program = f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); exit({code})"
    monkeypatch.setattr(actor_process, "actor_command", lambda *_arguments: [sys.executable, "-c", program])
    monkeypatch.setattr("torchtitan.inference.pool.actor_process.BACKOFF_S", 0.01)
    config = JobConfig()
    config.inference.num_actors, config.inference.max_restarts = 1, 2
    pool = InferencePool(config, "e", "secret", tmp_path, EventLog(tmp_path / "events.jsonl"))
    await pool.start()
    try:
        await eventually(lambda: pool.actors == {"actor-0": "given_up"}, why=lambda: pool.actors)
        assert (tmp_path / "starts").read_text() == "x" * starts
        (event,) = (row for row in read_json_lines(tmp_path / "events.jsonl") if row["kind"] == "actor_given_up")
        assert f"ended with exit code {code}" in event["reason"]
    finally:
        await pool.close()
