"""The gateway's HTTP server: the routes for programs, and the connection to the run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import os
import secrets
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from torchtitan.errors import UserError
from torchtitan.inference.serving.middleware import write_port_file
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters, stream_seed
from torchtitan.rollout.conversation.tokenizer import ChatRenderer, Tokenizer
from torchtitan.rollout.gateway.access import Access, keys_of
from torchtitan.rollout.gateway.answer_reader import AnswerReader
from torchtitan.rollout.gateway.answer_stream import AnswerStream, RefusedInStream
from torchtitan.rollout.gateway.calls import CONTEXT_FULL, Answer, Call, WrongCall, stop_ids
from torchtitan.rollout.gateway.conversation_reader import refuse_prefill
from torchtitan.rollout.gateway.dialects.dialect import Dialect, compact_json
from torchtitan.rollout.gateway.dialects.registry import DIALECTS, OPENAI
from torchtitan.rollout.gateway.dialects.token_ids import parse_tokens, tokens_answer
from torchtitan.rollout.gateway.exchange import TURNS_USED_UP, Exchange, Ledger, NoAnswer
from torchtitan.rollout.gateway.peer import LOOPBACK, MAX_MESSAGE_BYTES, Peer, PeerFailed
from torchtitan.rollout.gateway.request_body import MAX_BODY_BYTES, read_body
from torchtitan.rollout.gateway.session import Session
from torchtitan.utils.child_process import end_with_parent
from torchtitan.utils.http_site import HttpSite, has_token
from torchtitan.utils.logs import log_to
from torchtitan.utils.machine import raise_descriptor_limit
from torchtitan.utils.typed_json import Object, WrongForm, decode

logger = logging.getLogger(__name__)

# The most calls of one key at a time, and the time that a program has to send its call, or to take its answer.
MAX_UNDER_WAY = 1024
TRANSFER_S = 60.0
# The number of ended episodes whose keys are remembered, so that late calls learn that their episode has ended.
MAX_ENDED = 65536
# Rewritten histories of which the run gets an event; all are counted.
MAX_DIFFERENCES = 20
SESSION_HEADER = "X-Session-ID"
# The libraries of OpenAI and Anthropic count there how often they have repeated a call.
RETRY_HEADER = "x-stainless-retry-count"
SESSION_ENDED = "session_ended"


@dataclass(frozen=True)
class GatewaySettings:
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


Handler = Callable[[web.Request, Access, Exchange], Awaitable[web.StreamResponse]]
"""Answers a request of an episode. What it returns may have been sent already"""


class GatewayServer:
    """Serves sessions over HTTP.

    Args:
        token: for the run's own connection; programs use the keys of their sessions.
        public: strangers may come, so a connection may stay only once a request on it had a key.
    """

    def __init__(self, token: str, public: bool = False):
        self._token, self._public = token, public
        self._accesses: dict[str, Access] = {}
        """Accesses by key"""
        self._open_keys: dict[str, str] = {}
        """Name of an access that has not ended -> its key"""
        self._ended_keys: deque[str] = deque()
        self._strangers = Ledger()
        """Requests with no key of an open episode, since an episode has last ended"""
        self._differences_told = 0
        # Sampling is cancelled when a program disconnects.
        self.site = HttpSite(self._application(), decompress=False)
        self._cleanup = contextlib.AsyncExitStack()
        self.gone = asyncio.Event()
        """The run has disconnected"""

    async def close(self) -> None:
        """Stop listening, and end all that was started here."""
        await self.site.close()
        await self._cleanup.aclose()

    def _application(self) -> web.Application:
        """Return all routes. Errors have the format of their dialect; of no dialect, OpenAI's."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._has_spoken])
        router = application.router
        router.add_get("/control", self._control)
        for dialect in DIALECTS:
            router.add_post(dialect.path, self._answering(self._converse(dialect), dialect))
            if dialect.counting_path:
                count = self._answering(self._count_tokens(dialect), dialect, asks_policy=False)
                router.add_post(dialect.counting_path, count)
        router.add_get("/v1/models", self._answering(self._models, asks_policy=False))
        router.add_post("/inference/v1/generate", self._answering(self._generate))
        router.add_route("*", "/{other:.*}", self._no_route)
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
        self._settings = GatewaySettings(**values)
        self._tokenizer = Tokenizer(self._settings.model, self._settings.chat_template_kwargs)
        self._renderer = ChatRenderer(self._tokenizer, self._settings.stop_token_ids)
        self._reader = AnswerReader(self._tokenizer, self._settings.tool_parser)
        self._cleanup.push_async_callback(self._reader.close)
        await self._reader.start()

    async def _open(self, session: str, many: bool, sampling: dict[str, Any], min_version: int, shares: str) -> str:
        """Open a new access and return its key."""
        key = secrets.token_urlsafe(24)
        self._accesses[key] = Access(session, many, SamplingParameters(**sampling), min_version, shares)
        self._open_keys[session] = key
        return key

    async def _end(self, session: str) -> dict[str, Any] | None:
        """End an access, abort its calls in progress, and return the record of its sessions (None: no such access)."""
        key = self._open_keys.pop(session, None)
        if key is None:
            return None
        self._ended_keys.append(key)
        access = self._accesses[key]
        if len(self._ended_keys) > MAX_ENDED:
            del self._accesses[self._ended_keys.popleft()]
        strangers, self._strangers = self._strangers, Ledger()
        return access.end(strangers)

    # Calls from programs

    def _answering(
        self, handler: Handler, dialect: Dialect = OPENAI, asks_policy: bool = True
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that finds the episode of a request, answers it and counts what becomes of it."""

        async def handle(request: web.Request) -> web.StreamResponse:
            exchange = Exchange(request.path, asks_policy, request.headers.get(RETRY_HEADER, "0") != "0")
            try:
                access = await self._find_access(request)
            except WrongCall as error:
                if error.code != SESSION_ENDED:  # of which the run has heard
                    exchange.fail(error, error.status, error.code)
                    self._strangers.settle(exchange)
                return _refused(dialect, error)
            task = asyncio.ensure_future(self._respond(handler, request, access, exchange))
            access.under_way[task] = exchange
            try:
                return await task
            except asyncio.CancelledError:
                task.cancel()
                if access.ended:
                    return _refused(dialect, _ended())
                exchange.break_off()
                raise  # the program has disconnected
            except (TimeoutError, ConnectionError):
                exchange.break_off()
                if request.transport is not None:
                    request.transport.abort()
                return web.Response(status=499)  # which nobody reads
            except RefusedInStream as error:
                exchange.fail(error.refusal, error.refusal.status, error.refusal.code)
                with contextlib.suppress(ConnectionError):  # Codex goes as soon as it has read why
                    await error.stream.begin(request)
                    await error.stream.fail(*_error_of(error.refusal))
                return error.stream.response
            except Exception as error:
                message, status, code = _error_of(error, bool(exchange.answers))
                exchange.fail(error, status, code)
                return _refused(dialect, WrongCall(message, code, status))
            finally:
                del access.under_way[task]
                if not access.ended:
                    access.ledger.settle(exchange)

        return handle

    async def _respond(
        self, handler: Handler, request: web.Request, access: Access, exchange: Exchange
    ) -> web.StreamResponse:
        """Answer a request and send the answer: only then the program has it.

        Raises ConnectionError if the program is gone, TimeoutError if it does not take its answer.
        """
        if len(access.under_way) > MAX_UNDER_WAY:
            raise WrongCall(f"this key has {MAX_UNDER_WAY} calls under way", "too_many_calls", 429)
        # What is written may still not be received.
        self.site.on_reset(request, functools.partial(access.take_back, exchange))
        response = await handler(request, access, exchange)

        async def send() -> None:
            await response.prepare(request)
            await response.write_eof()
            exchange.answer()  # a program may end its connection at once

        await asyncio.wait_for(send(), TRANSFER_S)
        return response

    async def _find_access(self, request: web.Request) -> Access:
        """Return the access of a request's key.

        Raises WrongCall if the key is unknown or its episode has ended; the run is told once of a late call.
        """
        found = [self._accesses[key] for key in keys_of(request) if key in self._accesses]
        if not found:
            raise WrongCall("this key belongs to no session here", "invalid_api_key", 401)
        access = next((access for access in found if not access.ended), found[0])
        self.site.trust(request)
        if access.ended:
            if not access.reported:
                access.reported = True
                await self._peer.call("late_call", session=access.name, path=request.path)
            raise _ended()
        return access

    async def _no_route(self, request: web.Request) -> web.Response:
        """Refuse a request to no route, in the form of the dialect whose path it begins with."""
        matching = [dialect for dialect in DIALECTS if request.path.startswith(dialect.path)]
        dialect = matching[0] if matching else OPENAI
        paths = ", ".join(dialect.path for dialect in DIALECTS)
        text = f"{request.method} {request.path} is not served here: programs POST to {paths}"
        error = WrongCall(text, "unknown_url", 404)
        if request.method != "HEAD":  # which only asks whether somebody is here
            exchange = Exchange(request.path, asks_policy=False)
            exchange.fail(error, error.status, error.code)
            found = [self._accesses[key] for key in keys_of(request) if key in self._accesses]
            ledgers = [access.ledger for access in found if not access.ended]
            (ledgers[0] if ledgers else self._strangers).settle(exchange)
        return _refused(dialect, error)

    def _session(self, request: web.Request, access: Access) -> Session:
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

    async def _models(self, _request: web.Request, _access: Access, _exchange: Exchange) -> web.Response:
        model = {"id": self._settings.name, "object": "model", "created": 0, "owned_by": "torchtitan"}
        return _json({"object": "list", "data": [model | {"max_model_len": self._settings.seq_len}]})

    def _converse(self, dialect: Dialect) -> Handler:
        """Return the handler of a dialect's calls."""

        async def converse(request: web.Request, access: Access, exchange: Exchange) -> web.StreamResponse:
            session = self._session(request, access)
            exchange.body = await read_body(request, TRANSFER_S)
            call = self._understood(session, dialect.read(exchange.body, session.recall))
            refuse_prefill(call.messages)
            prompt_ids = self._prompt(session, call)
            started = Answer(f"{session.name}-refused", self._settings.name, int(time.time()), len(prompt_ids), [])
            try:
                number = self._admit(session, prompt_ids, call, exchange)
            except WrongCall as error:
                if call.stream and error.code == CONTEXT_FULL and dialect.streams_full_context:
                    raise RefusedInStream(error, AnswerStream(dialect, call, started, TRANSFER_S)) from error
                raise
            started = replace(started, name=f"{session.name}-{number}")
            if not call.stream:
                return _json(dialect.write(call, await self._answer(session, call, prompt_ids, exchange, started)))
            stream = AnswerStream(dialect, call, started, TRANSFER_S)
            await stream.begin(request)
            try:
                answer = await stream.keep_alive(self._answer(session, call, prompt_ids, exchange, started))
                await stream.finish(answer, exchange.answer)
            except asyncio.CancelledError:
                if not access.ended:
                    raise  # the program has disconnected
                await stream.fail(*_error_of(_ended()))
            except (TimeoutError, ConnectionError):
                raise  # the same, or it takes nothing
            except Exception as error:
                message, status, code = _error_of(error, bool(exchange.answers))
                exchange.fail(error, status, code)
                await stream.fail(message, status, code)
            return stream.response

        return converse

    async def _answer(
        self, session: Session, call: Call, prompt_ids: list[int], exchange: Exchange, started: Answer
    ) -> Answer:
        """Return the policy's answer to a call. Raises NoAnswer if the system fails."""
        choices = []
        for index, completion in enumerate(await self._sample(session, prompt_ids, call, exchange)):
            named = f"{started.name}-{index}" if index else started.name
            choice = await self._reader.choice(completion, call, named, prompt_ids)
            difference = session.remember(started.name, call, choice)
            if difference and self._differences_told < MAX_DIFFERENCES:
                self._differences_told += 1
                await self._peer.call("history_rewritten", session=session.name, difference=difference)
            choices.append(choice)
        return replace(started, choices=choices)

    def _count_tokens(self, dialect: Dialect) -> Handler:
        """Return the handler of calls whose tokens are only counted."""

        async def count(request: web.Request, access: Access, _exchange: Exchange) -> web.StreamResponse:
            session = self._session(request, access)
            call = self._understood(session, dialect.read(await read_body(request, TRANSFER_S), session.recall))
            return _json(dialect.write_count(len(self._prompt(session, call))))

        return count

    def _understood(self, session: Session, call: Call) -> Call:
        """Return a call with its messages in the order that templates read. Raises WrongCall for template values that
        are not the run's."""
        run_values = self._settings.chat_template_kwargs
        for name, value in call.template_values.items():
            if name not in run_values or run_values[name] != value:
                raise WrongCall(
                    f"chat_template_kwargs: {name} = {json.dumps(value)} is not what the run renders all conversations "
                    "with (rollout.chat_template_kwargs)"
                )
        return replace(call, messages=session.settled(call.messages))

    def _prompt(self, session: Session, call: Call) -> list[int]:
        try:
            return session.prompt(self._renderer, call.messages, call.tools, call.header)
        except UserError as error:
            raise WrongCall(str(error)) from error

    async def _generate(self, request: web.Request, access: Access, exchange: Exchange) -> web.Response:
        session = self._session(request, access)
        exchange.body = await read_body(request, TRANSFER_S)
        call = parse_tokens(exchange.body)
        number = self._admit(session, call.token_ids, call, exchange)
        (completion,) = await self._sample(session, call.token_ids, call, exchange)
        return _json(tokens_answer(f"{session.name}-{number}", completion))

    def _admit(self, session: Session, prompt_ids: list[int], call: Call, exchange: Exchange) -> int:
        """Give a call its number, and return it. Raises WrongCall if there is no room or no answer left."""
        stop_ids(call, self._tokenizer)  # refuses tokens that do not exist
        if len(prompt_ids) >= session.longest:
            session.run_out(prompt_ids, call)
            # Agents compact when they read this: Claude Code looks for the first words and reads both numbers, LiteLLM
            # looks for "maximum context length".
            raise WrongCall(
                f"prompt is too long: {len(prompt_ids)} tokens > {session.longest - 1} maximum; this model's maximum "
                f"context length is {session.longest} tokens (training.seq_len), of which an answer needs one",
                CONTEXT_FULL,
            )
        if call.n == 1:
            exchange.discards = session.find_discarded(prompt_ids, exchange.retries)
        most, further = self._settings.max_calls, 0 if exchange.discards else call.n
        if session.calls + session.under_way + further > most or session.counts["answers_repeated"] >= most:
            session.run_out(prompt_ids, call)
            text = f"this session has had {session.calls} of its {most} answers (environment.max_turns)"
            raise WrongCall(text, TURNS_USED_UP, 429)
        exchange.number = session.asked
        session.asked += call.n
        return exchange.number

    async def _sample(
        self, session: Session, prompt_ids: list[int], call: Call, exchange: Exchange
    ) -> list[Completion]:
        """Sample the completions of an admitted call and record them before the program gets them.

        Raises NoAnswer if the system fails.
        """
        limits = session.sampling
        room = session.longest - len(prompt_ids)
        sampling = replace(
            limits,
            n=call.n,
            max_tokens=min(room, limits.max_tokens, call.max_tokens or room),
            stop_token_ids=list(dict.fromkeys([*limits.stop_token_ids, *stop_ids(call, self._tokenizer)])),
            seed=stream_seed(limits.seed, exchange.number),
        )
        asked = GenerateRequest(f"{session.name}-{exchange.number}", prompt_ids, sampling).to_json()
        answers = self._peer.call("sample", request=asked, min_version=session.min_version, shares=session.shares)
        session.under_way += call.n
        try:
            body = await asyncio.wait_for(answers, self._settings.timeout_s)
            sampled = [Completion.from_json(sequence) for sequence in decode(list[Object], body, len(body))]
            ended = [await self._reader.cut(completion, call, prompt_ids) for completion in sampled]
        except (TimeoutError, PeerFailed, ConnectionError, WrongForm) as error:
            session.failed.add(hash(tuple(prompt_ids)))
            raise NoAnswer(str(error) or f"no engine answered within {self._settings.timeout_s:g} s") from error
        finally:
            session.under_way -= call.n
        if exchange.discards is not None:
            session.discard(exchange.discards)
        completions = []
        for completion, calls_cut in ended:
            completions.append(completion)
            session.counts["calls_cut"] += calls_cut
            session.record(prompt_ids, completion, call)
            exchange.answers.append((session, completion))
        return completions


def _json(data: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=compact_json(data), status=status, content_type="application/json")


def _error_of(error: Exception, sampled: bool = False) -> tuple[str, int, str | None]:
    """Return (message, status, code) of what ended a call. sampled: its answer was there already, so that whatever went
    wrong is not the program's fault."""
    if isinstance(error, WrongCall):
        return str(error), error.status, error.code
    if isinstance(error, NoAnswer):
        return f"the policy could not answer: {error}", 503, None
    if isinstance(error, RecursionError) and not sampled:
        return "the body is nested too deeply", 400, None
    if isinstance(error, web.HTTPException):
        return error.text or error.reason, error.status, None
    logger.error("a call failed: %s", "".join(traceback.format_exception(error)))
    return f"an error of the gateway, which its log describes: {type(error).__name__}", 500, None


def _refused(dialect: Dialect, error: WrongCall) -> web.Response:
    response = _json(dialect.error(str(error), error.status, error.code), error.status)
    if error.code == TURNS_USED_UP:
        # Libraries repeat a call that gets 429, unless they are told not to: an episode gets no further answers.
        response.headers["x-should-retry"] = "false"
    return response


def _ended() -> WrongCall:
    return WrongCall("this session has ended: its episode is over", SESSION_ENDED, 410)


async def serve(host: str, port_file: Path, token: str, port: int = 0) -> None:
    """Serve until the run disconnects."""
    server = GatewayServer(token, public=host not in LOOPBACK)
    write_port_file(port_file, await server.site.start(host, port))
    try:
        await server.gone.wait()
    finally:
        await server.close()


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
