"""The official libraries of the APIs that the gateway speaks, unmodified, with the embedded engine behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chat_models import END, QUESTION, SAID, TOOLS, WEATHER, make_chat_model
from tests.gateways import client, make_config, play_both_ways, playing
from tests.patience import PATIENCE_S, asynchronous
from torchtitan.rollout.gateway.gateway_process import SessionAccess

FUNCTION: dict[str, Any] = TOOLS[0]["function"]  # type: ignore[assignment]
Play = Callable[[SessionAccess], Awaitable[str]]
"""Plays the conversation with the weather tool, and returns the policy's last words"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("models") / "chat")


async def anthropic_plays(access: SessionAccess, stream: bool) -> str:
    anthropic = pytest.importorskip("anthropic")
    schema = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    url = access.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=access.key, max_retries=0, timeout=PATIENCE_S) as api:
        while True:
            arguments: dict[str, Any] = {"model": "chat", "max_tokens": 500, "messages": messages, "tools": [schema]}
            if stream:
                async with api.messages.stream(**arguments) as events:
                    message = await events.get_final_message()
            else:
                message = await api.messages.create(**arguments)
            messages.append({"role": "assistant", "content": message.content})
            if message.stop_reason != "tool_use":
                assert message.stop_reason == "end_turn" and message.usage.output_tokens > 0
                return str(message.content[0].text)
            (use,) = message.content
            assert use.name == "weather" and use.input == {"city": "Rome"}
            result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": WEATHER}]}
            messages.append({"role": "user", "content": [result]})


async def responses_play(access: SessionAccess, stream: bool, by_id: bool) -> str:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    previous: dict[str, str] = {}
    async with client(access) as api:
        while True:
            arguments: dict[str, Any] = {"model": "chat", "input": items, "tools": [{"type": "function", **FUNCTION}]}
            if stream:
                async with api.responses.stream(**arguments, **previous) as events:
                    async for _ in events:
                        pass
                    response = await events.get_final_response()
            else:
                response = await api.responses.create(**arguments, **previous)
            assert response.status == "completed"
            items = [] if by_id else [*items, *response.output]
            previous = {"previous_response_id": response.id} if by_id else {}
            (item,) = response.output
            if item.type != "function_call":
                return str(response.output_text)
            assert item.name == "weather" and json.loads(item.arguments) == {"city": "Rome"}
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": WEATHER})


async def agents_play(access: SessionAccess, stream: bool, chat: bool) -> str:
    agents = pytest.importorskip("agents")

    async def weather(_context: Any, arguments: str) -> str:
        assert json.loads(arguments) == {"city": "Rome"}
        return WEATHER

    agents.set_tracing_disabled(True)
    tool = agents.FunctionTool(
        "weather", FUNCTION["description"], FUNCTION["parameters"], weather, strict_json_schema=False
    )
    kind = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
    async with client(access) as api:
        agent = agents.Agent("forecaster", model=kind(model="chat", openai_client=api), tools=[tool])
        if not stream:
            return str((await agents.Runner.run(agent, QUESTION)).final_output)
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)


LIBRARIES: dict[str, list[Play]] = {
    "anthropic": [lambda access, s=s: anthropic_plays(access, s) for s in (False, True)],
    "openai": [lambda access, s=s, i=i: responses_play(access, s, i) for s in (False, True) for i in (False, True)],
    "agents": [lambda access, s=s, c=c: agents_play(access, s, c) for s in (False, True) for c in (False, True)],
}


@pytest.mark.parametrize("library", LIBRARIES)
@asynchronous
async def test_official_libraries_play_with_tools(library: str, model: Path, tmp_path: Path) -> None:
    """Whatever the library, the policy reads and samples the same tokens as over chat completions."""
    pytest.importorskip("openai")
    pytest.importorskip(library)
    async with playing(make_config(model), tmp_path / "run", END) as behind:
        chats: AsyncIterator[Any] = play_both_ways(behind)
        expected, _ = [branch.token_ids async for branch in chats]
        for number, play in enumerate(LIBRARIES[library]):
            access = await behind.open(f"s{number}", temperature=0.0)
            assert await play(access) == SAID[1]
            played = await behind.gateway.end(access.session)
            (branch,) = played.branches
            assert (played.calls, played.failed, played.truncated) == (2, 0, False)
            assert branch.token_ids == expected and len(branch.sampled) == 2
