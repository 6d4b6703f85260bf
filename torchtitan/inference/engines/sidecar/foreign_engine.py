"""What the agent has to know about a foreign engine: how to start its server, its HTTP interface (pause, resume, what
it holds, tokens), and how weights get into it."""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import Facts
from torchtitan.inference.engines.options import engine_words, read_options
from torchtitan.inference.types import (
    Capabilities,
    Completion,
    EngineCall,
    FinishReason,
    GenerateRequest,
    NoVersion,
    Routes,
    ScoredTokens,
    Tag,
    VersionSpan,
    parse_label,
)
from torchtitan.utils.typed_json import Natural, WrongForm, decode

if TYPE_CHECKING:
    from torchtitan.weight_sync.actor.actor import SyncActor
    from torchtitan.weight_sync.memory.staging import StagedVersion

FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
# The longest answer of a server is the list of its routes.
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_REASON_CHARACTERS = 500
BLOCK = 1 << 20
UNAUTHORIZED = 401
# Statuses that no time changes: the token is wrong, or there is no such route.
REFUSALS = (UNAUTHORIZED, 403, 404, 405)
UNKNOWN_TOKEN = (
    "the engine asks for another token than it was given: that of its --api-key, or of VLLM_API_KEY where vLLM was "
    "started; --engine-token-env names the variable that has it"
)

PauseMode = Literal["keep", "wait", "abort"]
"""What happens to running requests. keep: they stop and continue afterwards. wait: they finish first, while new ones
wait or are refused. abort: they end at once, incomplete."""
# The agent reaches an engine that listens on all addresses here.
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class EngineError(Exception):
    """The engine did not do as asked, or not in time. The message is one line for the user."""


class EngineUnfit(EngineError):
    """The engine answers, and has said that it cannot be an actor as it was started."""


class EngineRefused(EngineError):
    """The engine answers, and has refused a question that every engine of a supported version answers."""


class EngineNotListening(EngineError):
    """The engine's port is closed. A frozen engine keeps its port open; one that is shutting down does not."""


@dataclass(frozen=True)
class EngineFacts:
    """What the engine's server says about itself."""

    capabilities: Capabilities
    """With the engine's name and version"""
    world_size: int = 1
    """Number of workers, each with a part of the model"""
    can_wait: bool = True
    """Whether it has the pause mode `wait`"""
    reported: Facts = field(default_factory=dict)
    """What it says of what joining.demands() asks for, under the same names; what it does not say is missing"""
    model: str | None = None
    """The checkpoint that it was started with; None where it does not say"""


class EngineControl:
    """Blocking client of an engine's admin routes; each engine has a subclass. Every method has a deadline and raises
    EngineError. Several threads may call it: each call makes its own connection.

    url, token: of the engine's server.
    """

    label_route: ClassVar[str]
    """Returns `weight_version`: the label (types.make_label) of the version that the engine holds"""

    def __init__(self, url: str, token: str, options: EngineOptions):
        self.client, self.options = AdminClient(url, token), options
        self.timeout_s = options.update_timeout_s
        """Deadline of each order without one of its own"""
        self.keeps_cache = options.in_flight_kv == "keep"
        """Whether running requests keep their KV cache over a pause; otherwise it is dropped and recomputed"""

    def describe(self) -> EngineFacts:
        raise NotImplementedError

    def check_health(self, timeout_s: float) -> None:
        """Raises EngineError unless all of the engine's processes live and answer. This also holds while it is
        paused."""
        raise NotImplementedError

    def pause(self, mode: PauseMode, timeout_s: float) -> bool:
        """Pause the engine. When this returns True, nothing is computed.

        Returns False if `wait` was asked for and running requests have not ended within `timeout_s`; the caller then
        asks for `keep`. An engine that is already paused may be paused again.
        """
        raise NotImplementedError

    def resume(self) -> None:
        """Resume the engine; allowed if it is not paused."""
        raise NotImplementedError

    def sleep(self, level: int, tags: Sequence[Tag], finish_s: float) -> bool:
        """Pause the engine once nothing runs, and have it give back these parts of its memory, all of which it still
        has.

        Returns False if something still ran after `finish_s`. The engine then keeps its memory but may be paused, so
        the caller calls resume().
        """
        raise NotImplementedError

    def drops_weights(self, level: int) -> bool:
        """Whether sleep at this level loses the weights. Known after describe()."""
        raise NotImplementedError

    def wake(self, tag: Tag) -> None:
        """Have the engine take back a part of its memory, weights first. After the last part it may resume by itself or
        stay paused until resume()."""
        raise NotImplementedError

    def reset_prefix_cache(self) -> None:
        """Keep requests that begin from here on from reusing earlier computations. Called while the engine is
        paused."""
        raise NotImplementedError

    def read_files(self, folder: Path, label: str) -> None:
        """Have the paused engine read `folder` like a checkpoint and serve it as `label`."""
        raise NotImplementedError

    def weights_label(self) -> str | None:
        """Return the label (types.make_label) of the version that the engine says it holds, or None if it has none."""
        label = self.ask(self.label_route)["weight_version"]
        return None if label in (None, "default") else str(label)

    def ask(self, path: str, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the JSON object that the engine answers to a GET."""
        data = self.client.call("GET", path, self.timeout_s if timeout_s is None else timeout_s)
        if not isinstance(data, dict):
            raise EngineError(f"{path} did not answer with a JSON object")
        return data

    def order(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """Return the engine's answer to a POST. Raises EngineError also if that is {"success": false, "message"}."""
        answer = self.client.call("POST", path, self.timeout_s if timeout_s is None else timeout_s, body)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{path}: {answer.get('message')}")
        return answer


class AdminClient:
    """Calls the server at `url`, with `token` as authorisation unless it is empty. Each call has its own connection, so
    that threads can share the client and nothing is lost when an engine restarts."""

    def __init__(self, url: str, token: str):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._token = token

    def call(self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> Any:
        """Return the answer's JSON, or its text if it is not JSON. Raises EngineError if the status is not 200 or no
        answer comes in time."""
        status, text = self.exchange(method, path, timeout_s, body)
        if status != 200:
            refusal = EngineRefused if status in REFUSALS else EngineError
            hint = f" ({UNKNOWN_TOKEN})" if status == UNAUTHORIZED else ""
            raise refusal(f"{path} answered {status}: {text[:MAX_REASON_CHARACTERS]}{hint}")
        try:
            return decode(object, text.encode(), MAX_ANSWER_BYTES) if text else None
        except WrongForm:
            return text

    def exchange(self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """Return (status, text) of the answer. Raises EngineError if none comes within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        connection = self._class(self._host, self._port, timeout=timeout_s)
        try:
            connection.request(method, self._prefix + path, data, headers)
            response = connection.getresponse()
            text = bytearray()
            while block := response.read1(BLOCK):
                text += block
                if time.monotonic() > deadline:
                    raise TimeoutError
                if len(text) > MAX_ANSWER_BYTES:
                    raise EngineError(f"{path} answers with more than {MAX_ANSWER_BYTES} bytes")
            return response.status, text.decode(errors="replace")
        except TimeoutError as error:
            raise EngineError(f"{path} gave no answer within {timeout_s:g} s") from error
        except ConnectionRefusedError as error:
            raise EngineNotListening(f"{path}: nothing listens on {self.url}") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()


class WeightLoader:
    """One way to get weights into one engine. The agent's threads call all methods, which have deadlines of their
    own."""

    workers = 0
    """0: the agent stages complete versions. n: n workers inside the engine (weight_sync.actor.actor.Worker) stage them
    and the agent leads them; `staged.tensors` is then empty and `staged.apply_on_workers()` makes them apply."""

    def connected(self, weights: SyncActor) -> None:
        """The agent has begun to pull `weights`. If there are workers, have them connect to weights.workers_address.

        Called after every connection; replaces earlier ones. Raises EngineError.
        """

    def prepare(self, staged: StagedVersion, label: str) -> None:
        """Do what is possible while the engine still generates, such as writing files. An exception leaves the engine
        unchanged."""

    def load(self, staged: StagedVersion, label: str) -> None:
        """Called while the engine is paused. When this returns, the engine holds the version, and reports `label` for
        every token that it samples from here on.

        Raises WeightsRefused only if the engine is certainly unchanged. Any other exception means that it may hold a
        partial version.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release groups, files and threads. The engine may be gone already."""


Route = Literal["direct", "agent"]


class Malformed(ValueError):
    """The engine's answer does not have the form that it should have."""


class LabelledSpan(msgspec.Struct):
    """Tokens [start, end) of an engine's answer, and the label that the engine says they were sampled under."""

    version: str | int | None
    start: Natural
    end: Natural


def read_spans(parts: Sequence[LabelledSpan]) -> list[VersionSpan]:
    """Read an engine's version spans. Raises NoVersion."""
    spans = []
    for part in parts:
        held = parse_label(part.version)
        if held is None:
            raise NoVersion(f"sampled under {part.version!r}, which is not a version of this run")
        if part.end > part.start:
            spans.append(VersionSpan(*held, part.start, part.end))
    return spans


def make_completion(
    token_ids: list[int],
    scored: list[int | None],
    log_probs: list[float],
    finished: FinishReason,
    spans: list[VersionSpan],
    kept: list[list[int]] | None,
    routes: Routes | None = None,
) -> Completion:
    """Make a completion whose parts fit together. scored: the tokens that the log-probs belong to. Raises Malformed."""
    if scored != token_ids:
        raise Malformed("the log-probs are of other tokens than those of the answer")
    if kept is not None and len(kept) != len(token_ids):
        raise Malformed(f"{len(kept)} sets of kept tokens were returned for {len(token_ids)} tokens")
    return Completion(token_ids, log_probs, finished, spans, kept, routes)


def aborted() -> Completion:
    """Return a completion for an aborted request, which the caller has to repeat: a partial answer is of no use."""
    return Completion([], [], "abort", [])


@dataclass(frozen=True)
class EngineOptions:
    """The options of one engine, from the agent's command line."""

    name: str
    """The actor's name, in files and logs"""
    model: str
    """Checkpoint directory"""
    python: str
    """Interpreter of the engine's environment"""
    route: Route
    port_file: Path
    """File in which the engine's server writes its port once it listens"""
    token_env: str
    """Environment variable with the bearer token that all routes of the server require"""
    parent_pid: int
    """The server ends when this process is gone"""
    host: str = "127.0.0.1"
    dtype: str = "float32"
    max_sequences: int = 256
    max_length: int = 2048
    tensor_parallel_size: int = 1
    memory_gb: float = 0.0
    """Size of the KV cache; 0: the engine's own choice"""
    device_share: float = 0.0
    """Share of a GPU's memory that the engine may use on a GPU that it shares; 0: the engine's own choice"""
    sleep_level: int = 0
    """The level at which the engine will sleep; 0: never"""
    threads: int = 1
    """CPU threads of one engine worker"""
    in_flight_kv: Literal["keep", "recompute"] = "keep"
    update_timeout_s: float = 60.0
    """Deadline of each order that an apply gives to the engine"""
    stage_on_device: bool = False
    """For engines that stage versions themselves: on the device, for transports between devices, instead of on the
    host"""
    verify_every: int = 0
    """For engines that stage versions themselves: versions from one check of the weights in use to the next; 0: none"""
    disk_path: str = ""
    """Folder for versions on their way into the engine; empty: memory-backed files of this machine"""
    arguments: tuple[str, ...] = ()
    """Passed to the engine's own command line, untouched and last"""

    @property
    def folder(self) -> Path:
        """Folder for the engine's sockets: see middleware.engine_folder"""
        return self.port_file.parent


# Why options of engines are refused, whatever an engine calls them.
SEVERAL_ENGINES = (
    "its data-parallel workers would all be one actor, and drive each other out: start more actors instead "
    "(inference.num_actors)"
)
STAGES = (
    "a version is loaded by the workers of one tensor-parallel group: use tensor_parallel_size of the engine's table"
)
# In vLLM 0.32's CPU build, rejection_sampler.expand_batch_to_tokens writes the temperatures of drafted tokens to a copy
# that it drops, and their logits are divided by uninitialised memory. With Triton it is right, by reading.
SPECULATION = (
    "log-probs of tokens that a draft has proposed are not known to be those that the policy samples with: vLLM's CPU "
    "build computes them from uninitialised memory, and no GPU has been there to compare them with the trainer's"
)
IN_A_FILE = "options in a file are not looked at before the engine has started: give them one by one"
BY_PORT = "the agent and the run reach the engine's server by HTTP at a free port of the loopback"


class ForeignEngine:
    """An engine's entry: `ENGINE` in torchtitan.inference.engines.NAME.engine. Imports neither the engine nor torch."""

    name: ClassVar[str]
    routes: ClassVar[tuple[Route, ...]]
    """`auto` takes the first one"""
    control: ClassVar[type[EngineControl]]
    refused_options: ClassVar[Mapping[str, str]] = {}
    """Options of the engine's own command line that no actor can have, unless their value is 1 -> why not"""
    speculates: ClassVar[re.Pattern[str]] = re.compile("specul")
    """Matches the names of options that turn on speculative decoding, in short and cut forms too"""
    length_option: ClassVar[str] = ""
    """The option for the tokens of a prompt and its completion, which a run sets from training.seq_len; empty: none"""
    least_temperature: ClassVar[float] = 0.0
    """Anything less, but for 0, the engine replaces by another temperature"""

    def wrong_options(self, words: Sequence[str]) -> list[str]:
        """Return what is wrong with the engine's own options, for people; empty where they may be tried."""
        wrong = []
        for option in read_options(words):
            reason = self.refused_options.get(option.name)
            if reason is not None and option.value == "1":
                reason = None
            if self.speculates.match(option.name):
                reason = SPECULATION
            if reason is not None:
                value = "" if option.value is None else f" {option.value}"
                wrong.append(f"--{option.name}{value} is not allowed with {self.name}: {reason}")
        return wrong

    def problems(self, config: JobConfig) -> Iterator[tuple[str, str]]:
        """What a run cannot have of this engine: (key, text for people)."""
        words = engine_words(config.inference.engine.args)
        for problem in self.wrong_options(words):
            yield config.inference.engine_key("args"), problem
        limits = [option for option in read_options(words) if self.length_option and option.name == self.length_option]
        for option in limits:
            limit, needed = option.value or "", config.training.seq_len
            if limit.isascii() and limit.isdigit() and int(limit) < needed:
                text = f"--{option.name} {limit} would cut completions: training.seq_len = {needed} needs {needed}"
                yield config.inference.engine_key("args"), f"{text}, which the run sets where nothing is said"
        for key, value in (
            ("rollout.temperature", config.rollout.temperature),
            ("eval.temperature", config.eval.temperature),
        ):
            if 0 < value < self.least_temperature:
                least = f"{self.least_temperature:g}"
                yield key, f"must be 0 or at least {least}: {self.name} samples at {least} what is asked below"

    def passed(self, options: EngineOptions) -> list[str]:
        """Return the user's part of the command line; what of it has to be combined with ours is."""
        return [*options.arguments]

    def server(self, options: EngineOptions) -> tuple[list[str], dict[str, str]]:
        """Return the server's own command line, and the environment variables that it needs in addition to ours."""
        raise NotImplementedError

    def special_loader(self, control: EngineControl, options: EngineOptions) -> WeightLoader:
        """Return the loader for a route other than "agent", which uses FileLoader."""
        raise NotImplementedError

    # How to ask for tokens and read the answers: pure functions

    def generate(self, request: GenerateRequest) -> EngineCall:
        """Return the call for this request. Raises RequestRefused if the engine does not support it."""
        raise NotImplementedError

    def completions(self, request: GenerateRequest, answer: bytes | memoryview) -> list[Completion]:
        """Return the completions in the answer (JSON) to this request, with spans from the engine's version labels.

        Raises Malformed, NoVersion, RequestRefused, or another ValueError for an answer that is not well-formed.
        """
        raise NotImplementedError

    def score(self, token_ids: list[int]) -> EngineCall:
        """Return the call that asks for the log-probs of these tokens."""
        raise NotImplementedError

    def scored(self, token_ids: list[int], answer: bytes | memoryview) -> ScoredTokens:
        """Return the log-probs in the answer; raises the same errors as `completions`."""
        raise NotImplementedError

    def refused(self, status: int, reason: str) -> bool:
        """Whether an error answer is about the request itself, so that every other actor would refuse it too."""
        raise NotImplementedError

    # The same for every engine

    def command(self, options: EngineOptions) -> tuple[list[str], dict[str, str]]:
        """Return the command line that starts the server, and the environment variables that it needs in addition to
        ours."""
        engine_arguments, environment = self.server(options)
        own_arguments = [
            options.python, "-m", f"torchtitan.inference.engines.{self.name}.serve",
            "--host", options.host,
            "--port-file", str(options.port_file),
            "--token-env", options.token_env,
            "--parent-pid", str(options.parent_pid),
        ]  # fmt: skip
        # Programs that its kernels are compiled with (ninja) lie beside its Python.
        path = f"{Path(options.python).absolute().parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return [*own_arguments, "--", *engine_arguments, *self.passed(options)], {"PATH": path, **environment}

    def find_route(self, asked: str) -> Route:
        """Return the requested route. Raises UserError if the engine does not have it."""
        for route in self.routes:
            if asked in ("auto", route):
                return route
        raise UserError(f"route = {asked!r}: {self.name} takes weights by {' or '.join(self.routes)}")
