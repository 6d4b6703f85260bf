"""What the agent has to know of a foreign engine: how its server is started, what it is asked over HTTP (to
stand still, to go on, what it holds, for tokens), and how weights get into it."""

from __future__ import annotations

import http.client
import importlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

from torchtitan.errors import UserError
from torchtitan.inference.types import (
    Capabilities,
    Completion,
    FinishReason,
    GenerateRequest,
    Routes,
    ScoredTokens,
    Tag,
    VersionSpan,
    parse_label,
)

if TYPE_CHECKING:
    from torchtitan.weight_sync.actor import Actor
    from torchtitan.weight_sync.staging import StagedVersion

FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
LONGEST_ANSWER = 64 * 1024 * 1024
LONGEST_REASON = 500
BLOCK = 1 << 20

PauseMode = Literal["keep", "wait", "abort"]
"""What happens to running requests: they stand still and go on afterwards; they end before, while new ones wait or are
sent away; they end at once, incomplete."""
# An agent beside an engine that listens everywhere reaches it here.
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class EngineError(Exception):
    """The engine did not do as asked, or not in time. The message is one line for people."""


class EngineNotListening(EngineError):
    """Its port is closed: a frozen engine keeps it open, one that is ending does not."""


@dataclass(frozen=True)
class EngineFacts:
    """What the engine's server says about itself."""

    capabilities: Capabilities
    """With the engine's name and version"""
    world_size: int = 1
    """Its workers, each with a part of the model"""
    can_wait: bool = True
    """It has the pause mode `wait`"""


class EngineControl:
    """Blocking client of an engine's admin routes; a class of each engine fills it in. Every method has a deadline and
    raises EngineError. Called from several threads; each call makes its own connection.

    url, token: of the engine's server.
    """

    label_route: ClassVar[str]
    """Says `weight_version`: the label (types.make_label) of the version that the engine holds"""

    def __init__(self, url: str, token: str, options: EngineOptions):
        self.client, self.options = AdminClient(url, token), options
        self.timeout_s = options.update_timeout_s
        """Of each order that names none"""
        self.keeps_cache = options.in_flight_kv == "keep"
        """Running requests keep their KV cache over a pause, or give it up and have it recomputed"""

    def describe(self) -> EngineFacts:
        raise NotImplementedError

    def check_health(self, timeout_s: float) -> None:
        """Raises EngineError unless all of the engine's processes live and answer, also while it is paused."""
        raise NotImplementedError

    def pause(self, mode: PauseMode, timeout_s: float) -> bool:
        """Have the engine stand still: nothing is computed when this returns True.

        False: `wait` was asked for and running requests have not ended within `timeout_s`; the caller then asks for
        `keep`. Pausing an engine that stands already is allowed.
        """
        raise NotImplementedError

    def resume(self) -> None:
        """Go on. Allowed where it is not paused."""
        raise NotImplementedError

    def sleep(self, level: int, tags: Sequence[Tag], finish_s: float) -> bool:
        """Have the engine stand still once nothing runs, and give these parts of its memory back, which it still has.

        False: something still ran after `finish_s`. It has its memory then, but may stand still: resume() has it go on.
        """
        raise NotImplementedError

    def drops_weights(self, level: int) -> bool:
        """Whether weights that sleep so are lost. Known after describe()."""
        raise NotImplementedError

    def wake(self, tag: Tag) -> None:
        """Have the engine take a part of its memory again that it gave back, weights first. With the last one it may go
        on by itself, or stand still until resume()."""
        raise NotImplementedError

    def reset_prefix_cache(self) -> None:
        """No request that begins from here on reuses what was computed before. Called while it is paused."""
        raise NotImplementedError

    def read_files(self, folder: Path, label: str) -> None:
        """Have the engine, which stands still, read `folder` like a checkpoint and serve it as `label`."""
        raise NotImplementedError

    def weights_label(self) -> str | None:
        """The label (types.make_label) of the version that the engine says it holds; None where it has none."""
        label = self.ask(self.label_route)["weight_version"]
        return None if label in (None, "default") else str(label)

    def ask(self, path: str, timeout_s: float | None = None) -> dict[str, Any]:
        """The JSON object that it answers GET with."""
        data = self.client.call("GET", path, self.timeout_s if timeout_s is None else timeout_s)
        if not isinstance(data, dict):
            raise EngineError(f"{path} did not answer with a JSON object")
        return data

    def order(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """What it answers POST with. Raises EngineError also where that says {"success": false, "message"}."""
        answer = self.client.call("POST", path, self.timeout_s if timeout_s is None else timeout_s, body)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{path}: {answer.get('message')}")
        return answer


class AdminClient:
    """Calls the server at `url`, authorised by `token` where it is not empty. One connection per call, so that threads
    may share it and nothing is lost with an engine that was restarted."""

    def __init__(self, url: str, token: str):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._token = token

    def call(self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> Any:
        """The answer's JSON, or its text where it is none. Raises EngineError: no answer in time, or not status 200."""
        status, text = self.exchange(method, path, timeout_s, body)
        if status != 200:
            raise EngineError(f"{path} answered {status}: {text[:LONGEST_REASON]}")
        try:
            return json.loads(text) if text else None
        except ValueError:
            return text

    def exchange(self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """(status, text) of the answer. Raises EngineError where none came within `timeout_s`."""
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
                if len(text) > LONGEST_ANSWER:
                    raise EngineError(f"{path} answers with more than {LONGEST_ANSWER} bytes")
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
    """One way into one engine. All methods are called from the agent's threads and have deadlines of their own."""

    workers = 0
    """0: the agent stages whole versions. n: so many workers inside the engine stage them (pull.actor.Worker) and the
    agent leads them; `staged.tensors` is then empty and `staged.apply_on_workers()` has them apply."""

    def connected(self, weights: Actor) -> None:
        """The agent has begun to pull `weights`; with workers, have them connect to weights.workers_address.

        Called after every connection; replaces earlier ones. Raises EngineError.
        """

    def prepare(self, staged: StagedVersion, label: str) -> None:
        """What can be done while the engine still generates, such as writing files. Whatever it raises leaves the
        engine as it is."""

    def load(self, staged: StagedVersion, label: str) -> None:
        """Called while the engine stands still. When it returns the engine holds the version, and says `label` of
        every token that it samples from here on.

        Raises WeightsRefused only where the engine is certainly as it was; anything else means that it may hold half
        a version.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give up groups, files and threads. The engine may be gone already."""


Route = Literal["direct", "agent"]


@dataclass(frozen=True)
class Call:
    """One POST to the engine."""

    path: str
    body: dict[str, Any]


class Malformed(ValueError):
    """An engine's answer is not what is known of its kind."""


class NoVersion(ValueError):
    """An engine's answer is from weights of no version of ours."""


def read_spans(parts: list[dict[str, Any]]) -> list[VersionSpan]:
    """The versions that an engine names by label, each with `start` and `end`. Raises NoVersion."""
    spans = []
    for part in parts:
        held = parse_label(part["version"])
        if held is None:
            raise NoVersion(f"sampled under {part['version']!r}, which is no version of ours")
        if part["end"] > part["start"]:
            spans.append(VersionSpan(*held, int(part["start"]), int(part["end"])))
    return spans


def make_completion(
    token_ids: list[int],
    scored: list[int],
    log_probs: list[float],
    finished: FinishReason,
    spans: list[VersionSpan],
    kept: list[list[int]] | None,
    routes: Routes | None = None,
) -> Completion:
    """A completion whose parts fit together. scored: the tokens that the log-probs are of. Raises Malformed."""
    if scored != token_ids:
        raise Malformed("the log-probs are of other tokens than those of the answer")
    if kept is not None and len(kept) != len(token_ids):
        raise Malformed(f"{len(kept)} sets of kept tokens came for {len(token_ids)} tokens")
    return Completion(token_ids, log_probs, finished, spans, kept, routes)


def aborted() -> Completion:
    """The caller has to ask again: what there is of an answer that was broken off means nothing."""
    return Completion([], [], "abort", [])


@dataclass(frozen=True)
class EngineOptions:
    """One engine as the command line of the agent asks for it."""

    name: str
    """Of the actor: in files and logs"""
    model: str
    """Checkpoint directory"""
    python: str
    """Interpreter of the engine's environment"""
    route: Route
    port_file: Path
    """Gets the port of the engine's server once it listens"""
    token_env: str
    """Environment variable with the bearer token that all routes of the server ask for"""
    parent_pid: int
    """The server ends when this process is gone"""
    host: str = "127.0.0.1"
    dtype: str = "float32"
    max_sequences: int = 256
    max_length: int = 2048
    tensor_parallel_size: int = 1
    memory_gb: float = 0.0
    """Of the KV cache; 0: the engine's own choice"""
    device_share: float = 0.0
    """Of a GPU's memory that it may count on, beside whom it shares that with; 0: the engine's own choice"""
    sleep_level: int = 0
    """How deep it is going to sleep, and with it whether"""
    threads: int = 1
    """CPU threads of one engine worker"""
    in_flight_kv: Literal["keep", "recompute"] = "keep"
    update_timeout_s: float = 60.0
    """Deadline of each order that an apply gives to the engine"""
    stage_on_device: bool = False
    """Where the engine itself stages versions: on its device, for transports between devices, instead of on the host"""
    verify_every: int = 0
    """Where the engine itself stages versions: from one look at its weights in use to the next, 0 for none"""
    disk_path: str = ""
    """Folder for versions on their way into the engine; empty: memory-backed files of this machine"""
    arguments: tuple[str, ...] = ()
    """Passed to the engine's own command line, untouched and last"""

    @property
    def folder(self) -> Path:
        """For the engine's sockets: see engine_server.engine_folder"""
        return self.port_file.parent


class ForeignEngine:
    """An engine's entry: `ENGINE` in torchtitan.inference.<name>.engine. Imports neither the engine nor torch."""

    name: ClassVar[str]
    routes: ClassVar[tuple[Route, ...]]
    """The first is what `auto` takes"""
    control: ClassVar[type[EngineControl]]

    def server(self, options: EngineOptions) -> tuple[list[str], dict[str, str]]:
        """The server's own command line, and what its environment has beside ours."""
        raise NotImplementedError

    def special_loader(self, control: EngineControl, options: EngineOptions) -> WeightLoader:
        """For routes other than "agent", which has FileLoader."""
        raise NotImplementedError

    # How it is asked for tokens, and how it answers: pure functions

    def generate(self, request: GenerateRequest) -> Call:
        """What to ask. Raises RequestRefused where the engine cannot do that."""
        raise NotImplementedError

    def completions(self, request: GenerateRequest, answer: Any) -> list[Completion]:
        """The answer (JSON) of this call, with spans from the engine's version labels.

        Raises Malformed, NoVersion, or KeyError, TypeError, IndexError, ValueError for an answer that is not
        well-formed.
        """
        raise NotImplementedError

    def score(self, token_ids: list[int]) -> Call:
        """What to ask for the log-probs of these tokens."""
        raise NotImplementedError

    def scored(self, token_ids: list[int], answer: Any) -> ScoredTokens:
        """Raises as `completions` does."""
        raise NotImplementedError

    def refused(self, status: int, reason: str) -> bool:
        """Whether an error answer finds fault with the request itself, so that no other actor will like it better."""
        raise NotImplementedError

    # What every engine has

    def command(self, options: EngineOptions) -> tuple[list[str], dict[str, str]]:
        """The command line that starts the server, and what its environment has beside ours."""
        theirs, environment = self.server(options)
        ours = [
            options.python, "-m", f"torchtitan.inference.{self.name}.serve",
            "--host", options.host,
            "--port-file", str(options.port_file),
            "--token-env", options.token_env,
            "--parent-pid", str(options.parent_pid),
        ]  # fmt: skip
        return [*ours, "--", *theirs, *options.arguments], environment

    def find_route(self, asked: str, said: str) -> Route:
        """The route that is asked for. Raises UserError, with `said` for what was asked, where there is none."""
        for route in self.routes:
            if asked in ("auto", route):
                return route
        raise UserError(f"{said}: {self.name} takes weights by {' or '.join(self.routes)}")


def load_engine(name: str) -> ForeignEngine:
    """The engine of that name. Raises UserError where there is none."""
    try:
        engine: ForeignEngine = importlib.import_module(f"torchtitan.inference.{name}.engine").ENGINE
    except ModuleNotFoundError as error:
        if error.name is None or not f"torchtitan.inference.{name}.engine".startswith(error.name):
            raise
        raise UserError(f"there is no engine {name!r} to start an agent for") from error
    return engine
