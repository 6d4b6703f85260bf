"""The gateway's HTTP server: the routes for programs, and the connection to the run."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import json
import logging
import os
import re
import secrets
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from torchtitan.errors import UserError
from torchtitan.inference.serving.middleware import write_port_file
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters, stream_seed
from torchtitan.rollout.conversation.tokenizer import ChatRenderer, Tokenizer
from torchtitan.rollout.conversation.tool_formats.format import refuse_constant
from torchtitan.rollout.conversation.tool_formats.registry import find_format
from torchtitan.rollout.gateway.calls import Answer, Call, WrongCall, cut_at_stop, make_choice, stop_ids
from torchtitan.rollout.gateway.dialects.dialect import Dialect
from torchtitan.rollout.gateway.dialects.registry import DIALECTS, OPENAI
from torchtitan.rollout.gateway.dialects.token_ids import parse_tokens, tokens_answer
from torchtitan.rollout.gateway.peer import LOOPBACK, MAX_MESSAGE_BYTES, Peer, PeerFailed
from torchtitan.rollout.gateway.record import branches_to_json
from torchtitan.rollout.gateway.session import Session
from torchtitan.utils.child_process import end_with_parent
from torchtitan.utils.http_site import HttpSite, has_token
from torchtitan.utils.logs import log_to
from torchtitan.utils.machine import raise_descriptor_limit
from torchtitan.utils.typed_json import Object, WrongForm, decode, without_collection

logger = logging.getLogger(__name__)

# Parsing so many bytes holds up the gateway's other calls for a quarter of a second at most.
MAX_BODY_BYTES = 16 * 1024 * 1024
# The most calls of one key at a time, and the time that a program has to send its call, or to take its answer.
MAX_UNDER_WAY = 1024
TRANSFER_S = 60.0
# The number of ended episodes whose keys are remembered, so that late calls learn that their episode has ended.
MAX_ENDED = 65536
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
SESSION_HEADER = "X-Session-ID"
SESSION_ENDED = "session_ended"


class NoAnswer(Exception):
    """The system could not answer a call. The message says why."""


@dataclass(frozen=True)
class Settings:
    """The run's settings, which it sends when it connects."""

    model: str
    """Checkpoint directory, with the tokenizer"""
    chat_template_kwargs: dict[str, Any]
    stop_token_ids: list[int]
    tool_parser: str
    name: str
    """Name of the model, as programs see it"""
    seq_len: int
    max_calls: int
    """Maximum calls of one session"""
    timeout_s: float
    """Deadline for an answer of the engines, including the wait for a free one"""


@dataclass
class _Access:
    """The access of one key: to an episode's only session or, with `many`, to sessions that calls name in a header."""

    name: str
    many: bool
    sampling: SamplingParameters
    min_version: int
    shares: str
    sessions: dict[str, Session] = field(default_factory=dict)
    under_way: set[asyncio.Task[Any]] = field(default_factory=set)
    ended: bool = False
    reported: bool = False
    """Whether the run has been told of a call after the end"""


class GatewayServer:
    """Serves sessions over HTTP.

    Args:
        token: for the run's own connection; programs use the keys of their sessions.
        public: strangers may come, so a connection may stay only once a request on it had a key.
    """

    def __init__(self, token: str, public: bool = False):
        self._token, self._public = token, public
        self._accesses: dict[str, _Access] = {}
        """Accesses by key"""
        self._open_keys: dict[str, str] = {}
        """Name of an access that has not ended -> its key"""
        self._ended_keys: deque[str] = deque()
        # Sampling is cancelled when a program disconnects.
        self.site = HttpSite(self._application())
        self.gone = asyncio.Event()
        """The run has disconnected"""

    def _application(self) -> web.Application:
        """Return all routes. Errors have the format of their dialect; of no dialect, OpenAI's."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._has_spoken])
        application.add_routes(
            [
                web.get("/control", self._control),
                *(web.post(one.path, self._answering(self._converse(one), one)) for one in DIALECTS),
                *(
                    web.post(one.counting_path, self._answering(self._count_tokens(one), one))
                    for one in DIALECTS
                    if one.counting_path
                ),
                web.get("/v1/models", self._answering(self._models)),
                web.post("/inference/v1/generate", self._answering(self._generate)),
                web.route("*", "/{other:.*}", _no_route),
            ]
        )
        return application

    @web.middleware
    async def _has_spoken(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not self._public:
            self.site.trust(request)
        return await handler(request)

    # Calls from the run

    async def _control(self, request: web.Request) -> web.StreamResponse:
        if not has_token(request, self._token):
            raise web.HTTPUnauthorized
        self.site.trust(request)
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES)
        await socket.prepare(request)
        self._peer = Peer(socket, {"set_up": self._set_up, "open": self._open, "end": self._end})
        try:
            await self._peer.run()
        finally:
            self.gone.set()
        return socket

    async def _set_up(self, **values: Any) -> None:
        self._settings = Settings(**values)
        self._tokenizer = Tokenizer(self._settings.model, self._settings.chat_template_kwargs)
        self._renderer = ChatRenderer(self._tokenizer, self._settings.stop_token_ids)
        self._tool_format = find_format(self._settings.tool_parser, self._tokenizer.template_source)

    async def _open(self, session: str, many: bool, sampling: dict[str, Any], min_version: int, shares: str) -> str:
        """Open a new access and return its key."""
        key = secrets.token_urlsafe(24)
        self._accesses[key] = _Access(session, many, SamplingParameters(**sampling), min_version, shares)
        self._open_keys[session] = key
        return key

    async def _end(self, session: str) -> dict[str, Any] | None:
        """End an access, abort its calls in progress, and return the record of its sessions (None: no such access)."""
        key = self._open_keys.pop(session, None)
        if key is None:
            return None
        access = self._accesses[key]
        access.ended = True
        for task in access.under_way:
            task.cancel()
        self._ended_keys.append(key)
        if len(self._ended_keys) > MAX_ENDED:
            del self._accesses[self._ended_keys.popleft()]
        sessions, access.sessions = list(access.sessions.values()), {}
        return {
            "branches": branches_to_json([branch for one in sessions for branch in one.branches]),
            "calls": sum(one.calls for one in sessions),
            "failed": sum(len(one.failed) for one in sessions),
            "cut": any(one.cut for one in sessions),
            "counts": sum((one.counts for one in sessions), Counter()),
        }

    # Calls from programs

    def _answering(
        self, handler: Callable[[web.Request, _Access], Awaitable[web.StreamResponse]], dialect: Dialect = OPENAI
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                access = await self._find_access(request)
                task = asyncio.ensure_future(handler(request, access))
                access.under_way.add(task)
                try:
                    return await task
                except asyncio.CancelledError:
                    task.cancel()
                    if not access.ended:
                        raise  # the program has disconnected
                    raise _ended() from None
                finally:
                    access.under_way.discard(task)
            except WrongCall as error:
                return web.json_response(dialect.error(str(error), error.status, error.code), status=error.status)
            except NoAnswer as error:
                text = f"the policy could not answer: {error}"
                return web.json_response(dialect.error(text, 503, None), status=503)

        return handle

    async def _find_access(self, request: web.Request) -> _Access:
        """Return the access of a request's key.

        Raises WrongCall if the key is unknown or its episode has ended; the run is told once of a late call.
        """
        given = request.headers.get("Authorization", "")
        key = given.removeprefix("Bearer ") if given.startswith("Bearer ") else request.headers.get("X-Api-Key", "")
        access = self._accesses.get(key)
        if access is None:
            raise WrongCall("this key belongs to no session here", "invalid_api_key", 401)
        self.site.trust(request)
        if len(access.under_way) >= MAX_UNDER_WAY:
            raise WrongCall(f"this key has {MAX_UNDER_WAY} calls under way", "too_many_calls", 429)
        if access.ended:
            if not access.reported:
                access.reported = True
                await self._peer.call("late_call", session=access.name, path=request.path)
            raise _ended()
        return access

    def _session(self, request: web.Request, access: _Access) -> Session:
        """Return the session of a call. Raises WrongCall if the call must name its session but does not."""
        name = access.name
        if access.many:
            given = request.headers.get(SESSION_HEADER, "")
            if not given:
                raise WrongCall(f"a call with this key names its session in the header {SESSION_HEADER}")
            name = f"{access.name}-{given}"
        if name not in access.sessions:
            sampling = replace(access.sampling, seed=stream_seed(access.sampling.seed, len(access.sessions)))
            access.sessions[name] = Session(name, sampling, self._settings.seq_len, access.min_version, access.shares)
        return access.sessions[name]

    async def _models(self, _request: web.Request, _access: _Access) -> web.Response:
        model = {"id": self._settings.name, "object": "model", "created": 0, "owned_by": "torchtitan"}
        return web.json_response({"object": "list", "data": [model | {"max_model_len": self._settings.seq_len}]})

    def _converse(self, dialect: Dialect) -> Callable[[web.Request, _Access], Awaitable[web.StreamResponse]]:
        """Return the handler of a dialect's calls."""

        async def converse(request: web.Request, access: _Access) -> web.StreamResponse:
            session = self._session(request, access)
            call = self._understood(dialect.read(await _body(request), session.recall))
            prompt_ids = self._prompt(session, call)
            name, completions = await self._sample(session, prompt_ids, call, call.n)
            choices = []
            for index, completion in enumerate(completions):
                named = f"{name}-{index}" if index else name
                choice = make_choice(completion, call, self._tokenizer, named, self._tool_format, prompt_ids)
                session.remember(name, call, prompt_ids, choice)
                choices.append(choice)
            answer = Answer(name, self._settings.name, int(time.time()), len(prompt_ids), choices)
            if not call.stream:
                return web.json_response(dialect.write(call, answer))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            frames = b"".join(dialect.frames(call, answer))
            await asyncio.wait_for(response.write(frames), TRANSFER_S)
            await response.write_eof()
            return response

        return converse

    def _count_tokens(self, dialect: Dialect) -> Callable[[web.Request, _Access], Awaitable[web.StreamResponse]]:
        """Return the handler of calls whose tokens are only counted."""

        async def count(request: web.Request, access: _Access) -> web.StreamResponse:
            session = self._session(request, access)
            call = self._understood(dialect.read(await _body(request), session.recall))
            return web.json_response(dialect.write_count(len(self._prompt(session, call))))

        return count

    def _understood(self, call: Call) -> Call:
        """Return a call with the roles that the template knows. Raises WrongCall for template values of its own."""
        own = self._settings.chat_template_kwargs
        if wrong := [name for name, value in call.template_values.items() if name not in own or own[name] != value]:
            raise WrongCall(
                f"chat_template_kwargs: {wrong[0]} = {json.dumps(call.template_values[wrong[0]])} is not what the run "
                "renders all conversations with (rollout.chat_template_kwargs)"
            )
        return replace(call, messages=self._renderer.known_roles(call.messages))

    def _prompt(self, session: Session, call: Call) -> list[int]:
        try:
            return session.prompt(self._renderer, call.messages, call.tools)
        except UserError as error:
            raise WrongCall(str(error)) from error

    async def _generate(self, request: web.Request, access: _Access) -> web.Response:
        session = self._session(request, access)
        call = parse_tokens(await _body(request))
        name, (completion,) = await self._sample(session, call.token_ids, call, 1)
        return web.json_response(tokens_answer(name, completion))

    async def _sample(
        self, session: Session, prompt_ids: list[int], call: Call, n: int
    ) -> tuple[str, list[Completion]]:
        """Sample n completions and record them before the program gets them. Return the call's name and them.

        Raises WrongCall if there is no room or no call left, NoAnswer if the system fails.
        """
        own, number = session.sampling, session.calls
        stops = list(dict.fromkeys([*own.stop_token_ids, *stop_ids(call, self._tokenizer)]))
        room = session.longest - len(prompt_ids)
        if room < 1:
            session.cut = True
            raise WrongCall(
                f"the conversation has {len(prompt_ids)} tokens, of at most {session.longest} (training.seq_len)",
                "context_length_exceeded",
            )
        if number + n > self._settings.max_calls:
            session.cut = True
            raise WrongCall(
                f"this session has had {number} of its {self._settings.max_calls} answers", "too_many_calls", 429
            )
        session.calls += n
        sampling = replace(
            own,
            n=n,
            max_tokens=min(room, own.max_tokens, call.max_tokens or room),
            stop_token_ids=stops,
            seed=stream_seed(own.seed, number),
        )
        name = f"{session.name}-{number}"
        asked = GenerateRequest(name, prompt_ids, sampling).to_json()
        answers = self._peer.call("sample", request=asked, min_version=session.min_version, shares=session.shares)
        try:
            body = await asyncio.wait_for(answers, self._settings.timeout_s)
        except (PeerFailed, ConnectionError, asyncio.TimeoutError) as error:
            session.failed.add(hash(tuple(prompt_ids)))
            raise NoAnswer(str(error) or f"no engine answered within {self._settings.timeout_s:g} s") from error
        data = decode(list[Object], body, len(body))
        completions = [cut_at_stop(Completion.from_json(one), call.stop, self._tokenizer) for one in data]
        for completion in completions:
            session.record(prompt_ids, completion)
        return name, completions


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await asyncio.wait_for(request.read(), TRANSFER_S)
    except asyncio.TimeoutError:
        raise WrongCall(f"the body took longer than {TRANSFER_S:g} s", status=408) from None
    try:
        return decode(Object, body, len(body))
    except WrongForm as error:
        if (data := _lenient(body)) is None:
            raise WrongCall(f"the body is not JSON, or not an object: {error}") from None
        return data


def _lenient(body: bytes) -> dict[str, Any] | None:
    """Return an object that only `json` reads, with a byte order mark or half of a surrogate pair; None if it is none.

    JSON.stringify and json.dumps write such a half where a text was cut inside an emoji.
    """
    if not body.startswith(codecs.BOM_UTF8) and SURROGATE.search(body) is None:
        return None
    try:
        with without_collection():
            data = json.loads(body.decode("utf-8-sig"), parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


async def _no_route(request: web.Request) -> web.Response:
    paths = ", ".join(one.path for one in DIALECTS)
    text = f"{request.method} {request.path} is not served here: programs POST to {paths}"
    return web.json_response(OPENAI.error(text, 404, "unknown_url"), status=404)


def _ended() -> WrongCall:
    return WrongCall("this session has ended: its episode is over", SESSION_ENDED, 410)


async def serve(host: str, port_file: Path, token: str, port: int = 0) -> None:
    """Serve until the run disconnects."""
    server = GatewayServer(token, public=host not in LOOPBACK)
    write_port_file(port_file, await server.site.start(host, port))
    try:
        await server.gone.wait()
    finally:
        await server.site.close()


def main(argv: list[str]) -> None:
    """Run the server process, which a run starts (process.py)."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan.rollout.gateway.server", description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--token-env", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args(argv)
    log_to()
    raise_descriptor_limit()
    end_with_parent(arguments.parent_pid)
    asyncio.run(serve(arguments.host, arguments.port_file, os.environ[arguments.token_env], arguments.port))


if __name__ == "__main__":
    main(sys.argv[1:])
