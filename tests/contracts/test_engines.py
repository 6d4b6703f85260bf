"""What every engine promises to the rest of a run (torchtitan/inference/engines/descriptor.py).

An engine with a server is asked through its own client, with a stand-in that writes answers as that server does
(stand_ins.py). An engine in the trainer's ranks has no server: it is asked through its pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from tests.contracts.stand_ins import STAND_INS, StandIn
from tests.patience import PATIENCE_S
from tests.unit_tests.inference.json_server import serving
from torchtitan.config.engine_tables import EngineTable
from torchtitan.config.engines import engine_specs, engine_tables
from torchtitan.config.job_config import Inference, JobConfig
from torchtitan.config.reading import PLACE, Draft
from torchtitan.config.reference import markdown
from torchtitan.config.sources import fields_of
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import (
    ActorClient,
    ActorError,
    ActorNotReady,
    AnswerRefused,
    JsonClient,
    RequestRefused,
    TokenRefused,
)
from torchtitan.inference.engines.descriptor import EngineDescriptor
from torchtitan.inference.engines.documentation import TITLES, engines_table
from torchtitan.inference.engines.embedded.__main__ import parse_arguments as parse_embedded
from torchtitan.inference.engines.registry import engine_of, load_engine
from torchtitan.inference.engines.replicas import replica_pool
from torchtitan.inference.engines.replicas.replica_pool import ReplicaAnswer
from torchtitan.inference.engines.sidecar.__main__ import parse_arguments as parse_agent
from torchtitan.inference.engines.sidecar.descriptor import ServedEngine
from torchtitan.inference.engines.sidecar.foreign_engine import EngineNotListening, EngineOptions
from torchtitan.inference.placement import EngineMemory
from torchtitan.inference.teacher import ask_teacher
from torchtitan.inference.types import (
    Completion,
    GenerateRequest,
    SamplingParameters,
    ScoredTokens,
    VersionSpan,
    make_label,
)
from torchtitan.preflight.check import Check
from torchtitan.preflight.inference import check_inference
from torchtitan.utils.typed_json import WrongForm

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = {stand_in.engine: stand_in for stand_in in STAND_INS}
ENGINES = list(engine_specs())
SERVERS = [name for name, spec in engine_specs().items() if not spec.in_ranks]
SERVED = [name for name in SERVERS if isinstance(load_engine(name), ServedEngine)]
TEACHERS = [name for name, spec in engine_specs().items() if spec.teaches]
IN_RANKS = [name for name, spec in engine_specs().items() if spec.in_ranks]
PROMPT, TOKEN = [5, 6, 7], "a-secret"
VOCABULARY = 4096
REQUEST = GenerateRequest("r", PROMPT, SamplingParameters(max_tokens=3, n=2, seed=7))
SAMPLES = [
    Completion([9, 8, 1], [-1.5, -0.25, -3.0], "length", [VersionSpan("e1", 3, 0, 2), VersionSpan("e1", 4, 2, 3)]),
    Completion([2, 2, 2], [-0.5, -0.5, -0.5], "length", [VersionSpan("e1", 4, 0, 3)]),
]


def config_of(engine: str) -> JobConfig:
    """A configuration that chooses this engine, and asks it for nothing that it does not have to do."""
    config = JobConfig()
    config.inference.backend = engine
    config.model.hf_assets_path, config.model.name, config.model.flavor = "/a/model", "qwen3", "0.6B"
    return config


def keys_of_table(name: str) -> set[str]:
    """The keys of [inference.NAME]."""
    return set(fields_of(engine_tables()[name])) if name in engine_tables() else set()


# What it says of itself


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_says_what_it_is_in_words_that_the_configuration_knows(name: str) -> None:
    engine = load_engine(name)
    features, keys = engine.features, get_type_hints(Inference)
    assert engine_of(config_of(name)) is engine
    # What all engines are asked for is said in one place; a table without a key has the value there.
    shared = vars(EngineTable)
    for key in keys_of_table(name) & shared.keys():
        assert getattr(engine_tables()[name](), key) == shared[key], key
    assert "keep" in features.in_flight_kv and set(features.in_flight_kv) <= set(get_args(keys["in_flight_kv"]))
    assert "in_flight" in features.update_modes and set(features.update_modes) <= set(get_args(keys["update_mode"]))
    if isinstance(engine, ServedEngine):
        assert engine.foreign.find_route("auto") == engine.foreign.routes[0]
        assert ("route" in keys_of_table(name)) is (len(engine.foreign.routes) > 1)
    assert engine.spec.in_ranks or name in STAND_IN, "an engine with a server needs a stand-in in stand_ins.py"


@pytest.mark.parametrize("name", ENGINES)
def test_the_pages_that_list_engines_are_up_to_date(name: str) -> None:
    assert load_engine(name).documentation.keys() == set(TITLES)
    assert engines_table() in (ROOT / "docs" / "engines.md").read_text()
    assert f"{name} ({engine_specs()[name].about})" in markdown()
    assert all(f"[inference.{name}]" in markdown() for _ in keys_of_table(name))


def test_all_engines_are_described_without_torch_or_an_engines_package() -> None:
    code = "import sys; from torchtitan.inference.engines import registry; registry.all_engines(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True, cwd=ROOT
    )
    assert not {"torch", "transformers", *engine_specs()} & set(done.stdout.split())


# What it refuses


def refused_keys(config: JobConfig, ranks: int = 1) -> set[str]:
    check = Check(config, ranks, planning=True)
    check_inference(check)
    return {problem.key for problem in check.problems}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_takes_what_it_can_do_and_refuses_everything_else(name: str) -> None:
    engine = load_engine(name)
    assert not refused_keys(config_of(name))
    settings: list[tuple[str, str, Any, bool]] = []
    for key in ("update_mode", "in_flight_kv"):
        supported = getattr(engine.features, "update_modes" if key == "update_mode" else key)
        values = get_args(get_type_hints(Inference)[key])
        settings += [("inference", key, value, value in supported) for value in values]
    settings.append(("weight_sync", "verify", "digest", not engine.digest_problem(config_of(name))))
    settings.append(("grpo", "routing_replay", True, engine.features.reports_experts))
    for table, key, value, supported in settings:
        config = config_of(name)
        config.grpo.async_weight_update = False
        setattr(getattr(config, table), key, value)
        assert (f"{table}.{key}" not in refused_keys(config, ranks=2)) is supported, f"{table}.{key} = {value}"


@pytest.mark.parametrize("name", ENGINES)
def test_a_key_that_an_engines_table_lacks_is_unknown_and_one_of_another_engine_has_no_effect(name: str) -> None:
    for key, default in ((key, value) for key, value in vars(EngineTable).items() if not key.startswith("_")):
        draft = Draft(values={"inference.backend": name})
        draft.set(f"inference.{name}.{key}", dict(default) if key == "args" else default, PLACE)
        known = key in keys_of_table(name)
        assert known is not any("unknown key" in problem.text for problem in draft.build()[1])
        if known:
            other = next(engine for engine in ENGINES if engine != name)
            draft.set("inference.backend", other, PLACE)
            ((found, text),) = [(problem.key, problem.text) for problem in draft.build()[1]]
            assert found.startswith(f"inference.{name}.{key}") and f'inference.backend is "{other}"' in text


# Starting it


@pytest.mark.parametrize("name", SERVERS)
def test_an_actors_command_line_is_one_that_its_program_reads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, config = load_engine(name), config_of(name)
    if "python" in keys_of_table(name):
        config.inference.engine.python = sys.executable
    monkeypatch.setenv("TORCHTITAN_ACTOR_TOKEN", TOKEN)
    command = engine.command(config, tmp_path / "actor.port", 1)
    assert TOKEN not in " ".join(command)
    assert command[:2] == [sys.executable, "-m"]
    parse = parse_agent if isinstance(engine, ServedEngine) else parse_embedded
    arguments = parse([*command[3:], "--activity-file", str(tmp_path / "activity")])
    assert arguments.port_file == tmp_path / "actor.port" and arguments.token_env == "TORCHTITAN_ACTOR_TOKEN"
    assert arguments.max_length == config.training.seq_len and arguments.model == "/a/model"


def options_of(tmp_path: Path, **changes: Any) -> EngineOptions:
    options = EngineOptions("a", "/a/model", sys.executable, "agent", tmp_path / "port", "T", 1, update_timeout_s=5.0)
    return replace(options, **changes)


@pytest.mark.parametrize("name", SERVED)
def test_a_server_is_told_its_port_file_its_parent_and_where_its_token_is(name: str, tmp_path: Path) -> None:
    engine = load_engine(name)
    assert isinstance(engine, ServedEngine)
    command, environment = engine.foreign.command(options_of(tmp_path, arguments=("--an-option", "1")))
    assert command[:3] == [sys.executable, "-m", f"torchtitan.inference.engines.{name}.serve"]
    options, arguments = command[3 : command.index("--")], command[command.index("--") + 1 :]
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    assert pairs["--port-file"] == str(tmp_path / "port") and pairs["--token-env"] == "T"
    assert pairs["--parent-pid"] == "1"
    # A person's own options come last, and so count.
    assert arguments[-2:] == ["--an-option", "1"]
    assert Path(sys.executable).parent.as_posix() in environment["PATH"]


@pytest.mark.parametrize("name", SERVERS)
def test_actors_get_gpus_of_their_own_if_their_engine_uses_any(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    config, engine = config_of(name), load_engine(name)
    environments = [engine.environment(config, number) for number in range(2)]
    expected = [{"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "2"}] if engine.spec.on_gpus else [{}, {}]
    assert environments == expected
    if engine.spec.on_gpus:
        with pytest.raises(UserError, match="there are 3"):
            engine.environment(config, 2)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engines_share_of_a_gpu_grows_with_its_cache_and_leaves_some(name: str) -> None:
    engine, gigabyte = load_engine(name), 2**30
    small = EngineMemory(weights=10 * gigabyte, kv_cache=5 * gigabyte, work=gigabyte, kv_wanted=1, kv_one_sequence=1)
    large = replace(small, kv_cache=30 * gigabyte)
    shares = [engine.memory_share(memory, 80 * gigabyte) for memory in (small, large)]
    assert 15 / 80 <= shares[0] < shares[1] < 1
    assert engine.memory_share(replace(small, kv_cache=10**15), 80 * gigabyte) < 1


# Asking it


class Stage:
    """A stand-in's server, and the client of an actor that runs it."""

    def __init__(self, name: str):
        self.stand_in: StandIn = STAND_IN[name]()
        self.engine = load_engine(name)
        self.reply: Any = None
        """The answer to everything that is not an order, unless `status` is another than 200"""
        self.status = 200
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        data = json.loads(body or b"{}")
        with contextlib.suppress(KeyError):
            return 200, self.stand_in.order("POST", path, data)
        self.asked.append(data)
        return self.status, self.reply if self.status == 200 else {"error": "the stand-in says no"}

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/health" and not isinstance(self.engine, ServedEngine):
            return 200, {"state": "ready", "serves": True, "verifies": True}
        if path == "/health" and path not in self.orders():
            return 200, self.agents_health()
        return 200, self.stand_in.order("GET", path, {})

    def orders(self) -> set[str]:
        return set()

    def agents_health(self) -> dict[str, Any]:
        capabilities = {"engine": self.engine.spec.name, "score": True}
        return {
            "state": "ready",
            "serves": True,
            "engine": {"url": self.url, "capabilities": capabilities, "token_env": None},
        }

    def ask(self, question: Any) -> Any:
        """What `question` returns of a client that has found the engine."""

        async def work() -> Any:
            client = self.engine.make_client(self.url, TOKEN, vocabulary=VOCABULARY)
            try:
                await client.capabilities(PATIENCE_S)
                return await question(client)
            finally:
                await client.close()

        return asyncio.run(work())

    def generate(self, request: GenerateRequest = REQUEST) -> list[Completion]:
        completions: list[Completion] = self.ask(lambda client: client.generate(request, PATIENCE_S))
        return completions


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = Stage(request.param)
    with serving(made.post, made.get) as url:
        made.url = url
        yield made


servers = pytest.mark.parametrize("stage", SERVERS, indirect=True)


@servers
def test_samples_come_back_as_the_server_meant_them(stage: Stage) -> None:
    stage.reply = stage.stand_in.sampled(PROMPT, SAMPLES)
    assert stage.generate() == SAMPLES
    (asked,) = stage.asked
    assert all(str(token) in json.dumps(asked) for token in PROMPT)


@servers
def test_tokens_that_truncation_kept_come_back_or_truncation_is_refused(stage: Stage) -> None:
    sampling = SamplingParameters(max_tokens=3, n=1, top_p=0.9)
    request = GenerateRequest("r", PROMPT, sampling)
    if not stage.stand_in.truncates:
        with pytest.raises(RequestRefused):
            stage.generate(request)
        assert not stage.asked
        return
    sample = replace(SAMPLES[0], kept_token_ids=[[9, 2], [8], [1, 5, 6]])
    stage.reply = stage.stand_in.sampled(PROMPT, [sample])
    assert stage.generate(request) == [sample]
    assert "0.9" in json.dumps(stage.asked)


@servers
def test_samples_of_one_request_are_drawn_from_streams_of_their_own_and_again_the_same(stage: Stage) -> None:
    stage.reply = stage.stand_in.sampled(PROMPT, SAMPLES)
    other = replace(REQUEST, sampling=replace(REQUEST.sampling, seed=8))
    for request in (REQUEST, REQUEST, other):
        stage.generate(request)
    first, again, different = (json.dumps(asked) for asked in stage.asked)
    assert first == again != different


@servers
def test_log_probs_of_given_tokens_come_with_their_version(stage: Stage) -> None:
    stage.reply = stage.stand_in.scored(PROMPT, [-2.0, -0.5], VersionSpan("e1", 4, 0, 1))
    scored = stage.ask(lambda client: client.score(PROMPT, PATIENCE_S))
    assert scored == ScoredTokens([-2.0, -0.5], "e1", 4)
    stage.reply = stage.stand_in.scored([5, 6], [-2.0], VersionSpan("e1", 4, 0, 1))
    with pytest.raises(ActorError):
        stage.ask(lambda client: client.score(PROMPT, PATIENCE_S))


async def ask_as_teacher(stage: Stage, top: int) -> Any:
    client = JsonClient(stage.url, TOKEN)
    try:
        return await ask_teacher(client, stage.engine.spec.name, PROMPT, top, PATIENCE_S)
    finally:
        await client.close()


@pytest.mark.parametrize("stage", TEACHERS, indirect=True)
def test_a_teacher_gives_the_log_probs_and_the_likeliest_tokens_in_order(stage: Stage) -> None:
    stage.reply = stage.stand_in.taught(PROMPT, [-2.0, -0.5], [])
    assert asyncio.run(ask_as_teacher(stage, 0)) == ([-2.0, -0.5], [])
    if stage.stand_in.gives_likeliest:
        likeliest = [[(-1.0, 4), (-0.75, 9)], [(-0.5, 7), (-3.0, 2)]]
        stage.reply = stage.stand_in.taught(PROMPT, [-2.0, -0.5], likeliest)
        taught = asyncio.run(ask_as_teacher(stage, 2))
        assert taught == ([-2.0, -0.5], [([9, 4], [-0.75, -1.0]), ([7, 2], [-0.5, -3.0])])
    else:
        with pytest.raises(WrongForm, match="2 tokens were requested for every place"):
            asyncio.run(ask_as_teacher(stage, 2))
    stage.reply = {"nonsense": True}
    with pytest.raises(WrongForm):
        asyncio.run(ask_as_teacher(stage, 0))


@pytest.mark.parametrize("stage", TEACHERS, indirect=True)
def test_a_teachers_likeliest_tokens_have_no_more_than_all_probability(stage: Stage) -> None:
    """vLLM's --logprobs-mode raw_logits gives logits, which may all be below 0."""
    if not stage.stand_in.gives_likeliest:
        pytest.skip("it gives none")
    stage.reply = stage.stand_in.taught(PROMPT, [-2.0, -0.2], [[(-1.0, 4), (-0.75, 9)], [(-0.2, 7), (-0.1, 2)]])
    with pytest.raises(WrongForm, match="likeliest tokens of place 2 are 1.72 in sum"):
        asyncio.run(ask_as_teacher(stage, 2))


@servers
@pytest.mark.parametrize(
    ("status", "failure"), [(503, ActorNotReady), (401, TokenRefused), (400, RequestRefused), (500, ActorError)]
)
def test_each_kind_of_error_answer_is_the_failure_that_it_means(
    stage: Stage, status: int, failure: type[ActorError]
) -> None:
    stage.status = status
    with pytest.raises(ActorError, match="says no|refuses our token") as raised:
        stage.generate()
    assert type(raised.value) is failure


def broken(sample: Completion, how: str) -> Completion:
    broken = copy.deepcopy(sample)
    if how == "a log-prob that is no number":
        broken.log_probs[1] = math.nan
    elif how == "spans that leave a token out":
        broken.spans = [VersionSpan("e1", 3, 0, 2)]
    elif how == "no tokens":
        broken = Completion([], [], "length", [])
    elif how == "shorter than its length":
        broken = Completion([1], [-1.0], "length", [VersionSpan("e1", 3, 0, 1)])
    elif how == "vLLM's floor":
        broken.log_probs[1] = -9999.0
    elif how == "a log-prob above 0":
        broken.log_probs[0] = 0.01
    elif how == "a token of another vocabulary":
        broken.token_ids[0] = VOCABULARY
    elif how == "more tokens than were asked for":
        broken = Completion([1] * 4, [-1.0] * 4, "length", [VersionSpan("e1", 3, 0, 4)])
    return broken


BROKEN = (
    "a log-prob that is no number",
    "spans that leave a token out",
    "no tokens",
    "more tokens than were asked for",
    "shorter than its length",
    "vLLM's floor",
    "a log-prob above 0",
    "a token of another vocabulary",
)


@servers
@pytest.mark.parametrize("how", [*BROKEN, "a sample too few", "another form"])
def test_an_answer_that_cannot_be_trained_on_is_the_actors_failure(stage: Stage, how: str) -> None:
    samples = [SAMPLES[1]] if how == "a sample too few" else [broken(SAMPLES[0], how), SAMPLES[1]]
    stage.reply = {"nonsense": [1]} if how == "another form" else stage.stand_in.sampled(PROMPT, samples)
    with pytest.raises(ActorError) as raised:
        stage.generate()
    assert not isinstance(raised.value, (ActorNotReady, RequestRefused))


@servers
@pytest.mark.parametrize("wrong", [-9999.0, 0.01])
def test_scores_that_cannot_be_are_the_actors_failure(stage: Stage, wrong: float) -> None:
    stage.reply = stage.stand_in.scored([5, 6, 7], [-0.5, wrong], VersionSpan("e1", 3, 0, 1))
    with pytest.raises(AnswerRefused, match=f"token 2 is {wrong:g}"):
        stage.ask(lambda client: client.score([5, 6, 7], PATIENCE_S))


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("name", IN_RANKS)
def test_an_answer_in_the_ranks_that_cannot_be_trained_on_names_the_replica(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(name)
    config.inference.max_retries = 0
    monkeypatch.setattr(replica_pool, "vocabulary_of", lambda _: VOCABULARY)

    async def work() -> None:
        pool = load_engine(name).open_pool(config, "e1", 1)
        assert pool is not None
        asked = asyncio.ensure_future(pool.generate(REQUEST, 3))
        await asyncio.sleep(0)
        ((request,),) = pool.begin_round(3).requests
        pool.finish_round([ReplicaAnswer(request.request_id, [broken(SAMPLES[0], how), SAMPLES[1]])])
        with pytest.raises(UserError, match="replica-0: "):
            await asked
        await pool.close()

    asyncio.run(work())


# Steering its server


@pytest.mark.parametrize("stage", SERVED, indirect=True)
def test_a_server_that_has_read_a_version_says_its_label(stage: Stage, tmp_path: Path) -> None:
    assert isinstance(stage.engine, ServedEngine)
    options = options_of(tmp_path, update_timeout_s=PATIENCE_S)
    control = stage.engine.foreign.control(stage.url, TOKEN, options)
    control.check_health(PATIENCE_S)
    facts = control.describe()
    assert (facts.capabilities.engine, facts.world_size) == (stage.engine.spec.name, 1)
    assert facts.can_wait is ("drain" in stage.engine.features.update_modes)
    assert control.weights_label() is None
    for label in (make_label("e1", 3), make_label("e1", 4)):
        assert control.pause("keep", PATIENCE_S)
        control.read_files(tmp_path, label)
        control.reset_prefix_cache()
        assert control.weights_label() == label
        control.resume()
    control.pause("abort", PATIENCE_S)


@pytest.mark.parametrize("name", SERVED)
def test_a_server_that_does_not_listen_is_told_apart(name: str, tmp_path: Path) -> None:
    engine = load_engine(name)
    assert isinstance(engine, ServedEngine)
    control = engine.foreign.control("http://127.0.0.1:1", TOKEN, options_of(tmp_path))
    with pytest.raises(EngineNotListening):
        control.check_health(PATIENCE_S)


# In the trainer's ranks


@pytest.mark.parametrize("name", IN_RANKS)
def test_an_engine_in_the_ranks_answers_through_its_pool(name: str, tmp_path: Path) -> None:
    engine, config = load_engine(name), config_of(name)

    async def work() -> None:
        pool = engine.open_pool(config, "e1", 1)
        assert pool is not None
        asked = asyncio.ensure_future(pool.generate(REQUEST, 3))
        await asyncio.sleep(0)
        assert not pool.wanted(2)
        round_ = pool.begin_round(3)
        ((request,),) = round_.requests
        assert (round_.label, request.prompt_ids) == (make_label("e1", 3), PROMPT)
        pool.finish_round([ReplicaAnswer(request.request_id, SAMPLES)])
        assert await asked == SAMPLES
        refused = asyncio.ensure_future(pool.generate(REQUEST, 3))
        await asyncio.sleep(0)
        ((request,),) = pool.begin_round(3).requests
        pool.finish_round([ReplicaAnswer(request.request_id, refused="too long")])
        with pytest.raises(UserError, match="too long"):
            await refused
        await pool.close()

    asyncio.run(work())
    assert engine.python(config) is None
    with pytest.raises(NotImplementedError):
        engine.command(config, tmp_path / "port", 0)


@pytest.mark.parametrize("name", SERVERS)
def test_an_engine_with_actors_has_no_part_in_the_ranks(name: str, tmp_path: Path) -> None:
    engine: EngineDescriptor = load_engine(name)
    with engine.open_in_rank(config_of(name), tmp_path) as replica:
        assert replica is None
    assert engine.open_pool(config_of(name), "e1", 1) is None
    assert isinstance(engine.make_client("http://127.0.0.1:1", TOKEN), ActorClient)
