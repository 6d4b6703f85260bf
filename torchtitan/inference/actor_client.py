"""The client of one actor: how every engine reports its health and its failures, JSON over HTTP, and the checks of the
answers. This module does not import torch.
"""

from __future__ import annotations

import abc
import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from torchtitan.errors import UserError
from torchtitan.inference.types import (
    TAGS,
    Capabilities,
    Completion,
    GenerateRequest,
    Routes,
    ScoredTokens,
    Tag,
    check_routes,
    compact,
    mistakes_of,
)
from torchtitan.utils.machine import NO_DESCRIPTOR, describe_lack_of_descriptors
from torchtitan.utils.reader_process import Pieces
from torchtitan.utils.typed_json import Object, WrongForm, decode
from torchtitan.weight_sync.actor_state import REPORTED, SERVING, ActorState
from torchtitan.weight_sync.wire import runtime as wire

if TYPE_CHECKING:
    import aiohttp
    import numpy as np

TOKEN_VARIABLE = wire.ACTOR_TOKEN_VARIABLE
WRONG_REQUEST = 400
UNAUTHORIZED = 401
NOT_FOUND = 404
NOT_READY = 503
# Idle connections are closed sooner than servers close them: vLLM's and SGLang's do after 5 s. A request that is sent
# just then is lost.
KEEP_ALIVE_S = 4.0
# Exit code of an actor whose options or engine cannot work, and which would end the same way again. It is argparse's.
UNUSABLE = 2
PIECE_BYTES = 1 << 20
MAX_REASON_CHARACTERS = 500
MIN_TIMEOUT_S = 0.1
# An answer to an order, or about an actor's state, is no longer.
STATE_BYTES = 1 << 18


Facts = dict[str, str | float]
"""What an actor is, or has to be, by name (serving/joining.py)"""


class ActorError(Exception):
    """An actor failed in `phase` (generate, health, connect, startup, …). The message is the reason."""

    def __init__(self, phase: str, reason: str, status: int | None = None):
        """status: of the answer, if there was one."""
        super().__init__(reason)
        self.phase, self.status = phase, status


class ActorNotReady(ActorError):
    """The actor lives but must not serve now: it has no weights yet, or is paused."""


class AnswerRefused(ActorError):
    """The actor answered, and its answer is malformed or has values that no engine can have computed for this run."""


class RequestRefused(ActorError):
    """The actor found fault with the request itself, as every other actor would. Ends the run."""


class TokenRefused(ActorError):
    """The actor does not know our bearer token. At start-up this ends the run."""


@dataclass
class VerifiedVersions:
    """What an actor has found of its own weights, since it was connected."""

    version: int | None = None
    """The last version that it found whole"""
    matched: int = 0
    """Versions that it found whole"""
    unfinished: int = 0
    """Versions that it could not look at in time"""


@dataclass
class ActorHealth:
    """The answer of /health. version is None before a first one has been applied."""

    state: ActorState
    serves: bool
    """Whether it takes requests now"""
    epoch: str | None = None
    version: int | None = None
    reason: str | None = None
    """Why the actor does not serve"""
    weights_state: ActorState | None = None
    """What it does with versions, also while it is paused or asleep; None without a trainer"""
    weights_failure: str | None = None
    """Why no more weights come"""
    engine_age_s: float = 0.0
    """Seconds without progress of an engine that has work"""
    answered_age_s: float = 0.0
    """Seconds since the engine behind the actor was last seen alive, if it is a separate process"""
    asleep: tuple[Tag, ...] = ()
    """Parts of its memory that the actor has given back; it serves nothing until it has all of them again"""
    verified: VerifiedVersions | None = None
    """None where it looks at nothing, or has not yet"""

    def __post_init__(self) -> None:
        """Raises ValueError for what no actor can say: the pool would wait for ever, or give it up, without a word."""
        for state in (self.state, self.weights_state):
            if state is not None and state not in REPORTED:
                raise ValueError(f"an actor does not say of itself that it is {state}")
        if self.serves and self.state not in SERVING:
            raise ValueError(f"it says that it serves while it is {self.state}")

    @property
    def leaves(self) -> bool:
        """Whether the actor takes no new requests, and ends when it is released."""
        return self.state is ActorState.LEAVING


@dataclass
class Offers:
    """The answer of /offers."""

    offers: Facts
    """What the actor is, for the comparison with joining.demands()"""
    unverified: tuple[str, ...] = ()
    """Names of what its command line says and its engine does not report"""


OFFERS = TypeAdapter(Offers)
# Keys that only a newer actor knows are ignored.
HEALTH = TypeAdapter(ActorHealth)


def base_url(host: str, port: int) -> str:
    """Return the URL of a server; IPv6 addresses are put in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def wrong_request(status: int, _reason: str) -> bool:
    """Whether an answer with this status is about the request itself, not about this actor."""
    return status == WRONG_REQUEST


@dataclass
class _Connection:
    """What is known of the connection that a request was sent by."""

    is_reused: bool = False
    """It has served an earlier request"""
    has_answered: bool = False
    """The answer has begun"""


async def _note_reuse(_session: aiohttp.ClientSession, context: SimpleNamespace, _parameters: object) -> None:
    context.trace_request_ctx.is_reused = True


class JsonClient:
    """Client of the server at `url` (http://host:port) that reuses its connections; belongs to one asyncio loop.

    token_variable: the environment variable in which users set `token`.
    """

    def __init__(self, url: str, token: str, token_variable: str = TOKEN_VARIABLE):
        self.url = url.rstrip("/")
        self._token, self._token_variable = token, token_variable
        self._session: aiohttp.ClientSession | None = None

    async def fetch(
        self,
        phase: str,
        method: str,
        path: str,
        timeout_s: float,
        body: dict[str, Any] | None = None,
        refused: Callable[[int, str], bool] = wrong_request,
        most_bytes: int = STATE_BYTES,
        repeatable: bool = False,
    ) -> Pieces:
        """Return the answer in pieces. One with more than `most_bytes` is refused as soon as it has them.

        repeatable: the server may get the request twice. It is then sent once more if its connection, which had served
        an earlier one, was closed before any answer: the server may have closed it while it was idle.

        Raises:
            ActorNotReady: the server said 503.
            TokenRefused: the server said 401.
            RequestRefused: `refused(status, reason)` holds.
            ActorError: no answer in time, another status, or too long an answer.
        """
        import aiohttp  # slow, and who only plans a run has no client

        deadline = time.monotonic() + timeout_s
        try:
            try:
                connection = _Connection()
                status, pieces = await self._exchange(method, path, timeout_s, body, most_bytes, connection)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError):  # it was closed
                if not (repeatable and connection.is_reused and not connection.has_answered):
                    raise
                left_s = max(MIN_TIMEOUT_S, deadline - time.monotonic())
                status, pieces = await self._exchange(method, path, left_s, body, most_bytes, _Connection())
        except TimeoutError as error:
            raise ActorError(phase, f"{path} gave no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
                raise ActorError(phase, f"{path}: {describe_lack_of_descriptors(error)}") from error
            raise ActorError(phase, f"{path}: {type(error).__name__}: {error}") from error
        if status == 200:
            return pieces
        text = pieces[0][: 4 * MAX_REASON_CHARACTERS].decode(errors="replace")[:MAX_REASON_CHARACTERS]
        reason = f"{path} answered {status}: {text}"
        if status == NOT_READY:
            raise ActorNotReady(phase, reason)
        if status == UNAUTHORIZED:
            hint = f"set {self._token_variable} in this environment to the token that the server was started with"
            raise TokenRefused(phase, f"{self.url} refuses our token ({path} answered 401): {hint}")
        # Other codes are about this actor: its limits, or what it can do now.
        if refused(status, text):
            raise RequestRefused(phase, reason)
        raise ActorError(phase, reason, status)

    async def _exchange(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: dict[str, Any] | None,
        most_bytes: int,
        connection: _Connection,
    ) -> tuple[int, Pieces]:
        """Send a request once. Returns the answer's status and its body. Notes in `connection` what came of it."""
        import aiohttp

        if self._session is None:
            tracing = aiohttp.TraceConfig()
            tracing.on_connection_reuseconn.append(_note_reuse)
            # The pool bounds the requests in flight; a second bound here would only delay health probes.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False, trace_configs=[tracing])
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(
            method, self.url + path, json=body, headers=headers, timeout=timeout, allow_redirects=False,
            trace_request_ctx=connection,
        ) as response:  # fmt: skip
            connection.has_answered = True
            most = most_bytes if response.status == 200 else STATE_BYTES
            pieces, size = [bytearray()], 0
            async for piece in response.content.iter_any():
                size += len(piece)
                if size > most:
                    raise ValueError(f"the answer has more than {most} bytes")
                if len(pieces[-1]) >= PIECE_BYTES:
                    pieces.append(bytearray())
                pieces[-1] += piece
            return response.status, pieces

    async def call_object(
        self,
        phase: str,
        method: str,
        path: str,
        timeout_s: float,
        body: dict[str, Any] | None = None,
        repeatable: bool = False,
    ) -> dict[str, Any]:
        """Return the answer to an order, a JSON object. See `fetch`, whose exceptions it raises."""
        (data,) = await self.fetch(phase, method, path, timeout_s, body, repeatable=repeatable)
        try:
            return decode(Object, data)
        except WrongForm as error:
            raise ActorError(phase, f"{path} did not answer with a JSON object: {error}") from error

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class ActorClient(abc.ABC):
    """Client of the actor at `url`, with `token` as authorisation. Every method has a deadline and raises ActorError.
    Belongs to one asyncio loop."""

    def __init__(self, url: str, token: str, experts: int = 0, vocabulary: int | None = None):
        """experts: how many a token has in all layers, where requests ask for them. vocabulary: of the run's model,
        if that is known; an answer with a token beyond it is refused."""
        self.client = JsonClient(url, token)
        self.experts, self.vocabulary = experts, vocabulary

    @property
    def url(self) -> str:
        return self.client.url

    @abc.abstractmethod
    async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
        """Also raises ActorNotReady (the actor must not serve now) and RequestRefused (the request itself is wrong)."""

    @abc.abstractmethod
    async def score(self, token_ids: list[int], timeout_s: float) -> ScoredTokens:
        """Return the log-probs of given tokens under the weights that are served now; requires capabilities().score."""

    @abc.abstractmethod
    async def capabilities(self, timeout_s: float) -> Capabilities: ...

    async def health(self, timeout_s: float) -> ActorHealth:
        return parse_health(await self.state(timeout_s))

    async def state(self, timeout_s: float) -> dict[str, Any]:
        """Return all that /health reports."""
        return await self.client.call_object("health", "GET", "/health", timeout_s)

    async def offers(self, timeout_s: float, weights: bool) -> Offers | None:
        """Return what the actor says of itself, or None if it has no such answer. weights: also a digest of the weights
        in its checkpoint."""
        path = f"/offers?weights={int(weights)}"
        try:
            (data,) = await self.client.fetch("offers", "GET", path, timeout_s)
        except ActorError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        try:
            return OFFERS.validate_json(bytes(data))
        except ValidationError as error:
            raise ActorError("offers", f"the answer is malformed: {mistakes_of(error)}") from error

    async def connect_weights(
        self, registry: str, actor: str, epoch: str, key: str, relay: bool, timeout_s: float
    ) -> None:
        """Have the actor pull its weights from the trainer with this registry (host:port), under this name and with its
        key. Replaces an earlier connection. With `relay`, it also passes them on to other actors."""
        body = {"registry": registry, "actor": actor, "epoch": epoch, "key": key, "relay": relay}
        await self.client.call_object("connect", "POST", "/weights/connect", timeout_s, body, repeatable=True)

    async def release(self, timeout_s: float) -> None:
        """Tell an actor that leaves that it gets no more requests, and that the answers to all it had have come."""
        await self.client.call_object("release", "POST", "/release", timeout_s)

    async def sleep(self, level: int, timeout_s: float) -> bool:
        """Have the actor give back its KV cache and its weights. Level 1 may keep the weights elsewhere; level 2 drops
        them.

        Running requests get half of the time to finish. Returns False if they did not; the actor then goes on as
        before.
        """
        body = {"level": level, "finish_s": timeout_s / 2}
        data = await self.client.call_object("sleep", "POST", "/sleep", timeout_s, body)
        return set(parse_health(data).asleep) == set(TAGS)

    async def wake(self, tags: Sequence[Tag], timeout_s: float) -> None:
        """Have the actor take back memory, weights first. Dropped weights have to come as a new version; until one has
        been applied, nothing is sampled."""
        await self.client.call_object("wake", "POST", "/wake", timeout_s, {"tags": list(tags)})

    async def close(self) -> None:
        await self.client.close()


def parse_health(data: dict[str, Any]) -> ActorHealth:
    """Parse the answer of /health. Raises ActorError if it is malformed."""
    try:
        weights = data.get("weights") or {}
        about_weights = {"weights_state": weights.get("state"), "weights_failure": weights.get("failure")}
        return HEALTH.validate_python({**data, **about_weights})
    except ValidationError as error:
        raise ActorError("health", f"the answer is malformed: {mistakes_of(error)}") from error
    except AttributeError as error:
        raise ActorError("health", f"the answer is malformed: weights {weights!r}") from error


def failed_too_often(request_id: str, failures: Sequence[str], max_retries: int) -> UserError:
    """Return the error for a request that has failed more often than it may."""
    reasons = "; ".join(failures)
    return UserError(f"request {request_id} failed {len(failures)} times ({max_retries} retries): {reasons}")


def read_routes(
    request: GenerateRequest, sampled: int, encoded: str | None, decode: Callable[[bytes], np.ndarray], lack: str
) -> Routes | None:
    """Read the experts of a completion of `sampled` tokens; None if the request does not want them. encoded: base64 of
    what `decode` makes [tokens - 1, layers, experts per token] of. Raises RequestRefused without it, which says what
    is lacking (`lack`), and ValueError."""
    if not request.sampling.routes:
        return None
    if encoded is None:
        raise RequestRefused("generate", lack)
    routes = Routes(0, compact(decode(base64.b64decode(encoded, validate=True))))
    check_routes(routes, len(request.prompt_ids) + sampled)
    return routes
