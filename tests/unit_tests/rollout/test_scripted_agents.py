"""What agents do to an episode, over every API: its branches and tokens, counts, events, and what is trained."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.chat_models import write_chat_tokenizer
from tests.patience import asynchronous, eventually
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters, VersionSpan
from torchtitan.rollout.environments.failure_log import FailureLog
from torchtitan.rollout.flow.episodes import EPISODES, AgentPlayer
from torchtitan.rollout.flow.group_maker import GroupMaker
from torchtitan.rollout.gateway.exchange import OUTCOMES
from torchtitan.rollout.gateway.gateway_process import SessionAccess
from torchtitan.rollout.gateway.record import SessionRecord, read_record
from torchtitan.rollout.gateway.server import GatewayServer
from torchtitan.rollout.types import Failure, Prompt
from torchtitan.rollout.workers.worker_process import CallFailed
from torchtitan.utils.json_lines import EventLog, read_json_lines

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
MAX_TURNS, STDERR = 6, "the end of its standard error"
APIS = ("chat", "messages", "responses")


class Hangs(Exception):
    """The agent would have missed its deadline."""


@dataclass
class Policy:
    """Takes the run's place behind the gateway. Says `answer 0`, `answer 1`, …, or what it is told to."""

    server: GatewayServer
    says: list[Any] = field(default_factory=list)
    """(text, finish reason), an exception, or an event that never comes"""
    asked: int = 0
    cancelled: int = 0

    async def call(self, name: str, **more: Any) -> bytes:
        assert name == "sample"
        reply = self.says.pop(0) if self.says else (f"answer {self.asked}", "stop")
        self.asked += 1
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, asyncio.Event):
            try:
                await reply.wait()
            finally:
                self.cancelled += 1
        sampling = more["request"]["sampling"]
        ids = self.server._tokenizer.encode(reply[0]) + sampling["stop_token_ids"][:1] * (reply[1] == "stop")
        completion = Completion(ids, [-0.5] * len(ids), reply[1], [VersionSpan("e", 0, 0, len(ids))])
        return msgspec.json.encode([completion.to_json()] * sampling["n"])


@dataclass
class Agent:
    """A program with the access of one episode, which speaks one API."""

    http: aiohttp.ClientSession
    access: SessionAccess
    policy: Policy
    api: str
    stream: bool

    async def ask(
        self, turns: list[str], system: str = "You are an agent.", tools: bool = True, image: bool = False, **more: Any
    ) -> str:
        """Ask for the next turn of a conversation, of which the program and the policy have said every other one.
        Return what the policy says; the status in words for an error."""
        path, body = getattr(self, f"_{self.api}")(turns, system, tools, image)
        headers = {"Authorization": f"Bearer {self.access.key}"}
        url = f"{self.access.base_url}{path}"
        async with self.http.post(url, json={**body, "stream": self.stream, **more}, headers=headers) as response:
            text = await response.text()
        if response.status != 200:
            return f"status {response.status}"
        if not self.stream:
            return self._text_of(json.loads(text))
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
        events = [json.loads(line) for line in lines]
        if failed := [
            event for event in events if event.get("type") in ("error", "response.failed") or "error" in event
        ]:
            return f"failed: {failed[0]}"
        deltas = {
            "chat": lambda chunk: (chunk["choices"][0]["delta"].get("content") if chunk["choices"] else "") or "",
            "messages": lambda chunk: chunk.get("delta", {}).get("text", ""),
            "responses": lambda chunk: chunk["delta"] if chunk["type"] == "response.output_text.delta" else "",
        }
        return "".join(map(deltas[self.api], events))

    def _chat(self, turns: list[str], system: str, tools: bool, image: bool) -> tuple[str, dict[str, Any]]:
        messages: list[Any] = [{"role": "system", "content": system}]
        messages += [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]
        if image:
            messages[-1]["content"] = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]
        function = {"name": "look", "description": "Looks", "parameters": SCHEMA}
        more = {"tools": [{"type": "function", "function": function}]} if tools else {}
        return "/chat/completions", {"messages": messages, **more}

    def _messages(self, turns: list[str], system: str, tools: bool, image: bool) -> tuple[str, dict[str, Any]]:
        messages: list[Any] = [
            {"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)
        ]
        if image:
            source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
            messages[-1]["content"] = [{"type": "image", "source": source}]
        more = {"tools": [{"name": "look", "description": "Looks", "input_schema": SCHEMA}]} if tools else {}
        return "/messages", {"messages": messages, "system": system, "max_tokens": 1000, **more}

    def _responses(self, turns: list[str], system: str, tools: bool, image: bool) -> tuple[str, dict[str, Any]]:
        items: list[Any] = [
            {"type": "message", "role": ("user", "assistant")[place % 2], "content": text}
            for place, text in enumerate(turns)
        ]
        if image:
            items[-1]["content"] = [{"type": "input_image", "image_url": "data:image/png;base64,aGk="}]
        function = {"type": "function", "name": "look", "description": "Looks", "parameters": SCHEMA}
        return "/responses", {"input": items, "instructions": system, **({"tools": [function]} if tools else {})}

    def _text_of(self, answer: dict[str, Any]) -> str:
        if self.api == "chat":
            return str(answer["choices"][0]["message"]["content"])
        blocks = answer["content"] if self.api == "messages" else answer["output"][0]["content"]
        return str(blocks[0]["text"])

    async def hang_up(self, turns: list[str]) -> None:
        """Ask, and give up while the answer is sampled."""
        before, asked = self.policy.cancelled, self.policy.asked
        self.policy.says.insert(0, asyncio.Event())
        task = asyncio.ensure_future(self.ask(turns))
        await eventually(lambda: self.policy.asked > asked)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: self.policy.cancelled > before)


async def never_calls(agent: Agent) -> float:
    return 1.0


async def dies(agent: Agent) -> float:
    assert await agent.ask(["look"]) == "answer 0"
    raise ValueError("no idea")


async def hangs(agent: Agent) -> float:
    await agent.ask(["look"])
    raise Hangs


async def is_refused(agent: Agent) -> float:
    answer = await agent.ask(["look"])
    assert await agent.ask(["look", answer, "an image"], image=True) == "status 400"
    return 0.0


async def is_refused_and_goes_on(agent: Agent) -> float:
    answer = await agent.ask(["look"])
    assert await agent.ask(["look", answer, "an image"], image=True) == "status 400"
    assert await agent.ask(["look", answer, "no image"]) == "answer 1"
    return 1.0


async def has_a_side_call_refused(agent: Agent) -> float:
    answer = await agent.ask(["look"])
    await agent.ask(["look", answer, "more"])
    assert await agent.ask(["a title"], "Write titles.", tools=False, image=True) == "status 400"
    return 1.0


async def times_out_and_retries(agent: Agent) -> float:
    await agent.hang_up(["look"])
    await agent.hang_up(["look"])
    answer = await agent.ask(["look"])
    await agent.ask(["look", answer, "more"])
    return 1.0


async def hears_503_and_retries(agent: Agent) -> float:
    agent.policy.says = [ConnectionError("an actor died")] * 2
    for _ in range(2):
        assert "could not answer" in (heard := await agent.ask(["look"])) or heard == "status 503"
    await agent.ask(["look"])
    return 1.0


async def gives_up_on_503(agent: Agent) -> float:
    answer = await agent.ask(["look"])
    agent.policy.says = [ConnectionError("an actor died")]
    await agent.ask(["look", answer, "more"])
    return 0.0


async def repeats_what_was_truncated(agent: Agent) -> float:
    agent.policy.says = [(f"cut {number}", "length") for number in range(3)]
    for _ in range(4):
        answer = await agent.ask(["look"])
    assert answer == "answer 3"
    return 1.0


async def asks_for_titles(agent: Agent) -> float:
    agent.policy.says = [("A title f", "length")]
    limit = {"max_output_tokens" if agent.api == "responses" else "max_tokens": 9}
    await agent.ask(["a title"], "Write titles.", tools=False, **limit)
    answer = await agent.ask(["look"])
    await agent.ask(["look", answer, "more"])
    agent.policy.says = [("Another t", "length")]
    await agent.ask(["another title"], "Write titles.", tools=False, **limit)
    return 1.0


async def compacts_twice(agent: Agent) -> float:
    first = "look"
    for number in range(3):
        answer = await agent.ask([first])
        if number < 2:
            summary = await agent.ask([first, answer, "summarise"])
            first = f"So far: {summary}"
    return 1.0


async def calls_what_cannot_be_read(agent: Agent) -> float:
    answer = await agent.ask(["look"])
    agent.policy.says = [(UNREADABLE, "stop")]
    assert "look" in await agent.ask(["look", answer, "more"])
    return 1.0


async def uses_up_its_turns(agent: Agent) -> float:
    turns = ["look"]
    while not (answer := await agent.ask(turns)).startswith("status"):
        turns += [answer, "more"]
    assert answer == "status 429"
    return 0.5


@dataclass(frozen=True)
class Row:
    """What becomes of an agent's episode."""

    agent: Callable[[Agent], Awaitable[float]]
    branches: list[list[str]] = field(default_factory=list)
    """What was sampled in each branch that is trained"""
    side: int = 0
    """So many of them, at the beginning, are of side calls"""
    finish: str = "stop"
    failure: Failure | None = None
    reward: float | None = 1.0
    """In training; None for left out"""
    calls: dict[str, int] = field(default_factory=dict)
    episodes: dict[str, int] = field(default_factory=dict)
    """Counts of failures, of episodes and of repeated answers"""
    events: list[str] = field(default_factory=list)


UNREADABLE = '<tool_call>{"name": "look", "arguments": 1}</tool_call>'
ALSO_REFUSED = {"calls_answered": 2, "calls_refused": 1, "calls_refused/invalid_request": 1}
TABLE = [
    Row(never_calls, failure=Failure.NOT_BEGUN, reward=None, episodes={"unasked": 1, "episodes_lost": 1},
        events=["environment_failed unasked"]),
    Row(dies, [["answer 0"]], failure=Failure.OWN_TURN, reward=0.0, calls={"calls_answered": 1},
        episodes={"exceptions": 1, "episodes_failed": 1}, events=["environment_failed exception"]),
    Row(hangs, failure=Failure.LOST, reward=None, calls={"calls_answered": 1},
        episodes={"timeouts": 1, "episodes_lost": 1}, events=["environment_failed timeout"]),
    Row(is_refused, [["answer 0"]], failure=Failure.OWN_TURN, reward=0.0,
        calls={"calls_answered": 1, "calls_refused": 1, "calls_refused/invalid_request": 1},
        episodes={"refused": 1, "episodes_failed": 1}, events=["calls_without_answer", "environment_failed refused"]),
    Row(is_refused_and_goes_on, [["answer 0", "answer 1"]], calls=ALSO_REFUSED, events=["calls_without_answer"]),
    Row(has_a_side_call_refused, [["answer 0", "answer 1"]], calls=ALSO_REFUSED, events=["calls_without_answer"]),
    Row(times_out_and_retries, [["answer 2", "answer 3"]], calls={"calls_answered": 2, "calls_hung_up": 2},
        events=["calls_without_answer"]),
    Row(hears_503_and_retries, [["answer 2"]], calls={"calls_answered": 1, "calls_failed": 2},
        events=["calls_without_answer"]),
    Row(gives_up_on_503, failure=Failure.LOST, reward=None, calls={"calls_answered": 1, "calls_failed": 1},
        episodes={"unanswered": 1, "episodes_lost": 1},
        events=["calls_without_answer", "environment_failed unanswered"]),
    Row(repeats_what_was_truncated, [["answer 3"]], calls={"calls_answered": 4}, episodes={"answers_repeated": 3}),
    Row(asks_for_titles, [["A title f"], ["Another t"], ["answer 1", "answer 2"]], side=2,
        calls={"calls_answered": 4}),
    Row(compacts_twice, [["answer 0", "answer 1"], ["answer 2", "answer 3"], ["answer 4"]],
        calls={"calls_answered": 5}),
    # The policy's calls of tools are not the program's calls of the policy.
    Row(calls_what_cannot_be_read, [["answer 0", UNREADABLE]], calls={"calls_answered": 2, "calls_unreadable": 1}),
    Row(uses_up_its_turns, [[f"answer {number}" for number in range(MAX_TURNS)]], finish="length", reward=0.5,
        calls={"calls_answered": MAX_TURNS, "calls_refused": 1, "calls_refused/max_turns_reached": 1},
        events=["calls_without_answer"]),
]  # fmt: skip


class Gateway:
    """The run's side, without a process of its own."""

    def __init__(self, server: GatewayServer, url: str, stop: int):
        self._server, self._url, self._stop = server, url, stop
        self.statistics: Counter[str] = Counter()

    async def open(self, session: str, *_: object, **_more: object) -> SessionAccess:
        sampling = {"max_tokens": 200, "stop_token_ids": [self._stop], "seed": 1}
        return SessionAccess(session, f"{self._url}/v1", await self._server._open(session, False, sampling, 0, ""))

    async def end(self, session: str) -> SessionRecord:
        record = await read_record(msgspec.json.encode(await self._server._end(session)))
        assert record is not None
        return record


class Agents:
    """The pool of agents: plays a script where a worker process would, and fails as that does."""

    def __init__(self, play: Callable[[SessionAccess], Awaitable[float]]):
        self._play = play
        self.statistics: Counter[str] = Counter()

    async def episode(self, alone: bool = False) -> Agents:
        return self

    async def __aenter__(self) -> Agents:
        return self

    async def __aexit__(self, *_error: object) -> None:
        return None

    async def run(self, row: object, index: int, access: SessionAccess, timeout_s: float) -> float:
        access.stderr = STDERR
        try:
            return await self._play(access)
        except Hangs:
            raise CallFailed("timeout", "no answer") from None
        except ValueError as error:
            raise CallFailed("exception", f"ValueError: {error}", caused=True) from None


class Rewards:
    last_failure, statistics = "", {}

    async def score(self, prompt: Prompt, trajectories: list[Any], functions: Any) -> list[Any]:
        return [(None, {}) for _ in trajectories]


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[GatewayServer, Policy, Gateway]]:
    server = GatewayServer("secret")
    model = write_chat_tokenizer(folder / "model")
    about = {"model": str(model), "chat_template_kwargs": {}, "stop_token_ids": [], "name": "policy"}
    await server._set_up(**about, tool_parser="auto", seq_len=100_000, max_calls=MAX_TURNS, timeout_s=60.0)
    policy = server._peer = Policy(server)  # type: ignore[assignment]
    port = await server.site.start("127.0.0.1", 0)
    try:
        yield server, policy, Gateway(server, f"http://127.0.0.1:{port}", server._tokenizer.eos_token_ids[0])
    finally:
        await server.close()


def agent_of(
    row: Row, http: aiohttp.ClientSession, policy: Policy, api: str, stream: bool
) -> Callable[[SessionAccess], Awaitable[float]]:
    return lambda access: row.agent(Agent(http, access, policy, api, stream))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.agent.__name__)
@asynchronous
async def test_an_episode_is_what_its_main_conversation_received(tmp_path: Path, row: Row) -> None:
    config = JobConfig()
    config.environment.max_retries = 0
    config.rewards.functions = []
    config.environment.agent = "agent"
    async with serving(tmp_path) as (server, policy, gateway), aiohttp.ClientSession() as http:
        decode = server._tokenizer.decode
        for api in APIS:
            for stream in (False, True):
                policy.says, policy.asked = [], 0
                play = agent_of(row, http, policy, api, stream)
                player = AgentPlayer(config, gateway, Agents(play), server._tokenizer)  # type: ignore[arg-type]
                events = EventLog(tmp_path / f"{api}-{stream}.jsonl")
                player.failures = FailureLog(events)
                request = GenerateRequest(f"{api}-{stream}", [], SamplingParameters(200, n=1, seed=1))
                prompt = Prompt(0, "x", [1], {})
                (played,) = await player.play(prompt, request, 0)
                groups = GroupMaker(config, None, Rewards(), server._tokenizer, "e", player)  # type: ignore[arg-type]
                ((reward, _),) = await groups.score(prompt, [played])

                texts = [[decode(completion.token_ids) for completion in branch.sampled] for branch in played.branches]
                assert (texts, reward) == (row.branches, row.reward), (api, stream)
                assert (played.failure, played.finish_reason) == (row.failure, row.finish), (api, stream)
                assert played.extra.get("side_branches", 0) == row.side
                assert played.completion == "\n".join(row.branches[-1] if row.branches else [])
                counts = {name: count for name, count in player.statistics.items() if count and name != "turns"}
                failures = {name: count for name, count in player.failures.statistics.items() if count}
                total = counts.pop("calls", 0)
                assert total == sum(counts.get(f"calls_{outcome}", 0) for outcome in OUTCOMES)
                kinds = [count for name, count in counts.items() if name.startswith("calls_refused/")]
                assert sum(kinds) == counts.get("calls_refused", 0)
                assert (
                    failures.pop("failures", 0) == sum(failures.values()) == sum(counts.get(key, 0) for key in EPISODES)
                )
                assert {**counts, **failures} == {**row.calls, **row.episodes}, (api, stream)
                written = read_json_lines(events.path) if events.path.exists() else []
                assert [" ".join(filter(None, (event["kind"], event.get("what")))) for event in written] == row.events
                assert all(event["stderr"] == STDERR for event in written)


def test_equal_failures_are_reported_after_five_in_a_row(tmp_path: Path) -> None:
    log = FailureLog(EventLog(tmp_path / "events.jsonl"))
    for kind in ("unasked", "unasked", "timeout", *["unasked"] * 30):
        log.attempt_failed(kind, "run", f"why {kind}", "lost", STDERR)
    log.attempt_ended_well()
    for _ in range(4):
        log.attempt_failed("refused", "run", "an image", "failed")
    events = read_json_lines(tmp_path / "events.jsonl")
    alike = [event for event in events if event["kind"] == "episodes_fail_alike"]
    assert [(entry["what"], entry["in_a_row"], entry["reason"]) for entry in alike] == [("unasked", 5, "why unasked")]
    # A new kind has events however many of another there were, and all are counted.
    assert sum(event.get("what") == "refused" for event in events) == 4
    assert log.statistics["failures"] == 37 and log.statistics["unasked"] == 32
    assert "37 attempts at episodes failed (1 timeouts, 32 unasked, 4 refused)" in log.summary()
