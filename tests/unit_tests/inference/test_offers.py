"""Actors that say what they are, and are not what the run needs: nothing is sampled on them, and it is said why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.patience import asynchronous, eventually
from tests.policies import make_debug_checkpoint
from tests.unit_tests.inference.json_server import Answer, serving
from tests.unit_tests.inference.stand_in_actor import StandInActor
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import TOKEN_VARIABLE, ActorHealth, Facts, Offers
from torchtitan.inference.engines.embedded.__main__ import parse_arguments
from torchtitan.inference.engines.sglang.engine import SGLangControl
from torchtitan.inference.engines.sidecar.foreign_engine import EngineControl, EngineOptions, EngineUnfit
from torchtitan.inference.engines.vllm.engine import NEEDED, VLLMControl
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.inference.serving import joining
from torchtitan.inference.serving.joining import demands, offers, shape_facts
from torchtitan.utils.json_lines import EventLog, read_json_lines
from torchtitan.weight_sync.actor_state import ActorState
from torchtitan.weight_sync.registry.state import differing


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    make_debug_checkpoint(folder)
    return folder


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "token")


def changed_copy(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    """The checkpoint with other values in its config.json."""
    shutil.copytree(checkpoint, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def make_config(checkpoint: Path, *servers: str) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path, config.training.seq_len = str(checkpoint), 32
    config.inference.servers, config.inference.max_sequences = list(servers), 8
    config.inference.health_timeout_s = 5.0
    return config


def offered(checkpoint: Path, *options: str) -> Facts:
    """What an embedded server with this command line says."""
    return offers(parse_arguments(["--model", str(checkpoint), "--max-length", "32", *options]), "embedded")


def test_a_server_with_the_runs_model_and_settings_lacks_nothing(checkpoint: Path) -> None:
    assert not differing(demands(make_config(checkpoint)), offered(checkpoint))


@pytest.mark.parametrize(
    ("changes", "beginning"),
    [
        ({"rope_theta": 5000.0}, "its rope-theta is 5000, and this job needs"),
        ({"vocab_size": 77}, "its vocabulary is 77, and this job needs"),
        ({"num_hidden_layers": 1}, "its layers is 1, and this job needs"),
        ({"eos_token_id": [3, 5]}, "its end-tokens is [3, 5], and this job needs"),
        ({"rms_norm_eps": 0.5}, "its model is"),
    ],
)
def test_another_model_is_told_by_what_differs(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], beginning: str
) -> None:
    other = changed_copy(checkpoint, tmp_path / "other", **changes)
    sentences = differing(demands(make_config(checkpoint)), offered(other))
    assert any(sentence.startswith(beginning) for sentence in sentences), sentences
    # The rest of the model is the same.
    assert len(sentences) <= 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--dtype", "bfloat16"], "its dtype is bfloat16, and this job needs float32"),
        (["--max-length", "8"], "its max-length is 8, and this job needs 32 or more"),
        (["--in-flight-kv", "recompute"], "its in-flight-kv is recompute, and this job needs keep"),
    ],
)
def test_other_settings_are_told_by_name(checkpoint: Path, options: list[str], sentence: str) -> None:
    assert differing(demands(make_config(checkpoint)), offered(checkpoint, *options)) == [sentence]


@asynchronous
async def test_a_server_of_another_kind_ends_the_run_at_its_start(checkpoint: Path, tmp_path: Path) -> None:
    facts = {**offered(checkpoint), "dtype": "bfloat16", "log-probs": "raw_logprobs", "version": "0.32.0"}
    async with StandInActor(facts=facts).running() as url:
        pool = InferencePool(make_config(checkpoint, url), "e", "secret", tmp_path, EventLog(tmp_path / "events"))
        with pytest.raises(UserError) as caught:
            await pool.start()
        await pool.close()
    message = str(caught.value)
    assert message.startswith(f"inference.servers: {url} cannot sample for this run: its dtype is bfloat16, and")
    assert "its log-probs is raw_logprobs, and this job needs processed" in message and "0.32.0" in message


@asynchronous
async def test_a_server_may_read_its_checkpoint_for_as_long_as_a_start_takes_and_started_actors_do_not(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a checkpoint is read where adapters are merged into it: minutes for a large one on a slow disk."""
    read: list[str] = []
    joining._weights_of.cache_clear()
    monkeypatch.setattr(joining, "fingerprint", lambda path: read.append(str(path)) or "digest")
    for _ in range(3):
        assert offered(checkpoint)["weights"] == "digest"
    assert read == [str(checkpoint)]
    asked: list[tuple[float, bool]] = []

    class Client:
        async def health(self, timeout_s: float) -> ActorHealth:
            return ActorHealth(ActorState.READY, True, "e", 0)

        async def offers(self, timeout_s: float, weights: bool) -> Offers:
            asked.append((timeout_s, weights))
            return Offers(offered(checkpoint))

        async def close(self) -> None: ...

    config = make_config(checkpoint, "http://127.0.0.1:1")
    config.lora.rank = 2
    client: Any = Client()
    pool = InferencePool(config, "e", "secret", tmp_path, EventLog(tmp_path / "events"), lambda url, key: client)
    await pool.start()
    await pool.close()
    assert set(asked) == {(config.inference.startup_timeout_s, True)}
    assert "weights" in pool._demands and "weights" not in pool._demands_of("")
    config.inference.servers = []
    assert "weights" not in demands(config)


@asynchronous
async def test_a_server_that_comes_back_as_another_is_out_until_it_is_what_the_run_needs(
    checkpoint: Path, tmp_path: Path
) -> None:
    server = StandInActor(facts=offered(checkpoint))
    async with server.running() as url:
        pool = InferencePool(make_config(checkpoint, url), "e", "secret", tmp_path, EventLog(tmp_path / "events"))
        await pool.start()
        try:
            await pool.connect_weights("127.0.0.1:5", {0})
            await eventually(lambda: pool.actors == {"actor-0": "ready"}, why=lambda: pool.actors)
            server.dead = True
            await eventually(lambda: pool.actors == {"actor-0": "evicted"}, why=lambda: pool.actors)
            server.facts, server.dead, connections = offered(checkpoint, "--max-length", "8"), False, server.connections
            await eventually(lambda: "max-length is 8" in pool._actors[0].last_reason)
            assert pool.actors == {"actor-0": "evicted"} and server.connections == connections
            server.facts = offered(checkpoint)
            await eventually(lambda: pool.actors == {"actor-0": "ready"}, why=lambda: pool.actors)
        finally:
            await pool.close()


@pytest.mark.parametrize("has_answer", [True, False])
@asynchronous
async def test_unverifiable_settings_of_a_server_are_reported(
    checkpoint: Path, tmp_path: Path, has_answer: bool
) -> None:
    server = StandInActor(facts=offered(checkpoint) if has_answer else None)
    server.unverified = ["log-probs"]
    async with server.running() as url:
        pool = InferencePool(make_config(checkpoint, url), "e", "secret", tmp_path, EventLog(tmp_path / "events"))
        await pool.start()
        try:
            await pool.connect_weights("127.0.0.1:5", {0})
            await eventually(lambda: pool.actors == {"actor-0": "ready"}, why=lambda: pool.actors)
        finally:
            await pool.close()
    (event,) = (row for row in read_json_lines(tmp_path / "events") if row["kind"] == "actor_not_checked")
    assert ("log-probs" if has_answer else "does not say what it is") in event["reason"]


def options() -> EngineOptions:
    return EngineOptions("actor", "model", "", "agent", Path("port"), "TOKEN", 0)


def vllm_answers(checkpoint: Path, **changes: Any) -> dict[str, Any]:
    """What vLLM 0.32 answers, shortened; changes: of its model_config, or of its parallel_config."""
    parallel = {key: changes.pop(key) for key in [*changes] if key.endswith("parallel_size")}
    model = {
        "model": str(checkpoint), "dtype": "torch.float32", "max_model_len": 64, "quantization": None,
        "logprobs_mode": "processed_logprobs", "hf_overrides": {}, **changes,
    }  # fmt: skip
    config = {"model_config": model, "scheduler_config": {"max_num_seqs": 16}, "parallel_config": parallel}
    return {
        "/version": {"version": "0.32.0"},
        "/openapi.json": {"paths": {route: {} for route in [*NEEDED, "/server_info"]}},
        "/get_world_size": {"world_size": 1},
        "/server_info": {"vllm_config": config, "vllm_env": {}, "system_env": {}},
    }


def described(control: type[EngineControl], answers: dict[str, Any]) -> Any:
    def get(path: str) -> Answer:
        path = path.partition("?")[0]
        return (200, answers[path]) if path in answers else (404, {})

    with serving(lambda path, body: (404, {}), get) as url:
        return control(url, "token", options()).describe()


def test_vllm_says_how_it_was_started(checkpoint: Path) -> None:
    facts = described(VLLMControl, vllm_answers(checkpoint))
    assert facts.model == str(checkpoint)
    assert facts.reported == {
        "version": "0.32.0", "dtype": "float32", "log-probs": "processed", "max-length": 64, "max-sequences": 16,
    }  # fmt: skip
    changes = {"logprobs_mode": "raw_logprobs", "hf_overrides": {"rope_theta": 5}, "max_model_len": 8}
    reported = described(VLLMControl, vllm_answers(checkpoint, **changes)).reported
    wrong = differing(demands(make_config(checkpoint)), offered(checkpoint) | reported)
    assert [sentence.split(",")[0] for sentence in wrong] == [
        "its rope-theta is 5", "its log-probs is raw_logprobs (start it with --logprobs-mode processed_logprobs)",
        "its max-length is 8",
    ]  # fmt: skip


@pytest.mark.parametrize("size", ["data_parallel_size", "pipeline_parallel_size"])
def test_a_server_of_several_engines_is_refused_by_name(checkpoint: Path, size: str) -> None:
    with pytest.raises(EngineUnfit, match=f"it runs with --{size.replace('_', '-')} 2"):
        described(VLLMControl, vllm_answers(checkpoint, **{size: 2}))


def test_a_server_that_speculates_is_refused_whoever_has_started_it(checkpoint: Path) -> None:
    answers = vllm_answers(checkpoint)
    answers["/server_info"]["vllm_config"]["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(EngineUnfit, match="it runs with --speculative-config: .*draft"):
        described(VLLMControl, answers)
    answers = {"/server_info": {"version": "0.5.20", "disable_radix_cache": True, "disable_overlap_schedule": True}}
    described(SGLangControl, answers)
    answers["/server_info"]["speculative_algorithm"] = "EAGLE"
    with pytest.raises(EngineUnfit, match="it runs with --speculative-algorithm EAGLE: .*draft"):
        described(SGLangControl, answers)


def test_a_version_that_says_it_in_another_form_is_not_refused(checkpoint: Path) -> None:
    answers = vllm_answers(checkpoint) | {"/server_info": {"vllm_config": "model='a', dtype=float32"}}
    assert described(VLLMControl, answers).reported == {"version": "0.32.0"}


def test_sglang_says_how_it_was_started(checkpoint: Path) -> None:
    answers = {
        "/server_info": {
            "model_path": str(checkpoint), "dtype": "float32", "context_length": 64, "max_running_requests": 16,
            "version": "0.5.20", "json_model_override_args": '{"rope_theta": 5}', "tp_size": 1, "dp_size": 1,
            "disable_radix_cache": True, "disable_overlap_schedule": True,
        }
    }  # fmt: skip
    facts = described(SGLangControl, answers)
    assert facts.reported == {
        "version": "0.5.20", "dtype": "float32", "max-length": 64, "max-sequences": 16, "rope-theta": "5",
    }  # fmt: skip
    answers["/server_info"]["dp_size"] = 2
    with pytest.raises(EngineUnfit, match="it runs with --dp-size 2: .*start more actors"):
        described(SGLangControl, answers)


def test_facts_of_a_shape_do_not_depend_on_how_numbers_are_written(checkpoint: Path, tmp_path: Path) -> None:
    theta = json.loads((checkpoint / "config.json").read_text())["rope_theta"]
    other = changed_copy(checkpoint, tmp_path / "other", rope_theta=int(theta))
    assert shape_facts(str(other))["rope-theta"] == shape_facts(str(checkpoint))["rope-theta"]


@asynchronous
async def test_an_actor_that_waits_for_a_newer_version_says_why_it_does(checkpoint: Path, tmp_path: Path) -> None:
    async with StandInActor(facts=offered(checkpoint)).running() as url:
        pool = InferencePool(make_config(checkpoint, url), "e", "secret", tmp_path, EventLog(tmp_path / "events"))
        await pool.start()
        try:
            await pool.connect_weights("127.0.0.1:5", {0})
            await eventually(lambda: pool.describe_actors() == "actor-0 ready", why=lambda: pool.actors)
            await pool._actors[0].distrust(0, "its log-probs are not the trainer's")
            await eventually(lambda: pool.actors == {"actor-0": "joining"}, why=lambda: pool.actors)
            assert pool.describe_actors() == "actor-0 joining (its log-probs are not the trainer's)"
        finally:
            await pool.close()
