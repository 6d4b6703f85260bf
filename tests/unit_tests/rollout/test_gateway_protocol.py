"""What the gateway's APIs promise besides the answer: streams that begin at once, errors in their form, keys, bytes."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from tests.chat_families import FAMILIES
from tests.chat_models import write_chat_tokenizer
from tests.patience import PATIENCE_S, asynchronous, eventually
from tests.programs import API, Program
from tests.unit_tests.rollout.data.test_tool_formats import OTHERS
from tests.unit_tests.rollout.data.test_tool_formats import TOOLS as TOOL_SCHEMAS
from tests.unit_tests.rollout.test_gateway_dialects import answer_nothing, branches_of, opened, serving
from torchtitan.errors import UserError
from torchtitan.inference.types import Completion, VersionSpan
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.conversation.tool_formats.registry import FORMATS
from torchtitan.rollout.gateway import answer_stream, parser_process
from torchtitan.rollout.gateway.calls import Call, cut, make_choice
from torchtitan.rollout.gateway.dialects.registry import DIALECTS
from torchtitan.rollout.gateway.peer import PeerFailed

APIS = API[:3]
BRACKETED = "tests.call_parsers:bracketed"


class WaitingEngine:
    """Takes the place of an engine that samples until `go` is set, and then fails if it is to."""

    def __init__(self, engine: Any, fails: bool = False):
        self.go, self.asked, self._engine, self._fails = asyncio.Event(), asyncio.Event(), engine, fails

    async def call(self, name: str, **more: Any) -> bytes | None:
        if name != "sample":
            return None
        self.asked.set()
        await self.go.wait()
        if self._fails:
            raise PeerFailed("an actor died")
        found: bytes = await self._engine.call(name, **more)
        return found


def events_of(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def program_of(api: str, http: aiohttp.ClientSession, url: str, key: str, stream: bool) -> Program:
    program = Program(api, http, url, key, stream)
    program.user("?")
    return program


@asynchronous
async def test_a_stream_begins_before_sampling_and_shows_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    monkeypatch.setattr(answer_stream, "PING_S", 0.01)
    first = {"chat": "chat.completion.chunk", "messages": "message_start", "responses": "response.created"}
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession() as http:
        for api in APIS:
            server._peer = waiting = WaitingEngine(engine)  # type: ignore[assignment]
            engine.says = ["hello"]
            program = program_of(api, http, url, await opened(server, api, stop), True)
            path, body = program.body()
            headers = {"X-Api-Key": program.key}
            async with http.post(f"{url}{path}", json={**body, "stream": True}, headers=headers) as response:
                assert response.status == 200 and response.content_type == "text/event-stream"
                seen = b""
                while len(events_of(seen.decode())) < 5:  # what comes while nothing has been sampled
                    seen += await asyncio.wait_for(response.content.readany(), PATIENCE_S)
                waiting.go.set()
                seen += await response.read()
            begin = events_of(seen.decode())[0]
            assert first[api] == begin.get("type", begin.get("object"))
            # What libraries make of all of it.
            engine.says, waiting.go = ["hello"], asyncio.Event()
            asking = asyncio.ensure_future(program.ask())
            await waiting.asked.wait()
            waiting.go.set()
            assert (await asking).text == "hello"


@asynchronous
async def test_a_failure_behind_the_headers_of_a_stream_is_an_error_of_the_api(tmp_path: Path) -> None:
    """The system fails, or the episode ends: libraries raise, and nothing of it is an answer."""
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession():
        for ends in (False, True):
            for api in APIS:
                name = f"{api}-{ends}"
                server._peer = waiting = WaitingEngine(engine, fails=True)  # type: ignore[assignment]
                asking = asyncio.ensure_future(ask_by_library(api, url, await opened(server, name, stop)))
                await waiting.asked.wait()
                if ends:
                    await server._end(name)
                else:
                    waiting.go.set()
                assert ("has ended" if ends else "an actor died") in await asking


async def ask_by_library(api: str, url: str, key: str) -> str:
    """Return the error of a streamed call."""
    messages: Any = [{"role": "user", "content": "?"}]
    if api == "messages":
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as claude:
            with pytest.raises(anthropic.APIError) as raised:
                async with claude.messages.stream(model="p", max_tokens=9, messages=messages) as events:
                    await events.get_final_message()
        return str(raised.value)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as gpt:
        if api == "chat":
            with pytest.raises(openai.APIError) as failed:
                async for _ in await gpt.chat.completions.create(model="p", messages=messages, stream=True):
                    pass
            return str(failed.value)
        stream = await gpt.responses.create(model="p", input="?", stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.failed" and last.response.error is not None
        return last.response.error.message


@asynchronous
async def test_a_full_context_is_said_as_agents_read_it(tmp_path: Path) -> None:
    """Claude Code reads "prompt is too long: 5 tokens > 4"; Codex reads a stream's response.failed and its code."""
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    async with serving(tmp_path, stop, seq_len=20) as (server, engine, url), aiohttp.ClientSession() as http:
        for api in APIS:
            for stream in (False, True):
                key = await opened(server, f"{api}-{stream}", stop)
                path, body = program_of(api, http, url, key, stream).body()
                async with http.post(f"{url}{path}", json={**body, "stream": stream}, headers=bearer(key)) as response:
                    status, text = response.status, await response.text()
                if api == "responses" and stream:
                    failed = events_of(text)[-1]
                    assert status == 200 and failed["type"] == "response.failed"
                    error = failed["response"]["error"]
                else:
                    assert status == 400
                    error = json.loads(text)["error"]
                assert "prompt is too long: " in error["message"] and " tokens > 19 maximum" in error["message"]
                if api == "messages":
                    assert error["type"] == "invalid_request_error"
                else:
                    assert error["code"] == "context_length_exceeded"
        assert not engine.log


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@asynchronous
async def test_a_key_is_found_in_either_header_whatever_stands_in_the_other(tmp_path: Path) -> None:
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    async with serving(tmp_path, stop) as (server, _engine, url), aiohttp.ClientSession() as http:
        key, ended = await opened(server, "s", stop), await opened(server, "ended", stop)
        await server._end("ended")
        server._peer.call = answer_nothing  # type: ignore[assignment, union-attr]
        tried: list[tuple[dict[str, str], int]] = [
            ({"Authorization": f"bearer {key}"}, 200), ({"authorization": f"BEARER  {key} "}, 200),
            ({**bearer("stale"), "x-api-key": key}, 200), ({**bearer(ended), "x-api-key": key}, 200),
            ({**bearer(key), "x-api-key": "stale"}, 200), ({**bearer(key), "x-api-key": ended}, 200),
            (bearer(ended), 410), (bearer("stale"), 401), ({"Authorization": f"Basic {key}"}, 401), ({}, 401),
        ]  # fmt: skip
        for headers, status in tried:
            async with http.get(f"{url}/v1/models", headers=headers) as response:
                assert response.status == status, headers


@asynchronous
async def test_every_error_has_the_form_of_its_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its status: bodies that are too large, too deep or packed in an unknown way, wrong methods, faults."""
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    async with serving(tmp_path, stop) as (server, _engine, url), aiohttp.ClientSession() as http:
        key = await opened(server, "s", stop)
        for api in APIS:
            path, body = program_of(api, http, url, key, False).body()
            plain = json.dumps(body).encode()
            deep: Any = 1
            for _ in range(900):
                deep = {"properties": deep}
            nested = json.dumps({**body, "tools": [{"type": "function", "name": "f", "function": {"name": "f"},
                "input_schema": deep, "parameters": deep}], "response_format": deep, "mcp_servers": deep,
                "truncation": deep}).encode()  # fmt: skip
            bomb = gzip.compress(b" " * (17 << 20) + plain)
            sent: list[tuple[int, str, str, bytes, str]] = [
                (413, "POST", path, b"x" * (17 << 20), ""), (413, "POST", path, bomb, "gzip"),
                (415, "POST", path, plain, "zstd"), (415, "POST", path, plain, "br"),
                (400, "POST", path, plain, "gzip"), (400, "POST", path, gzip.compress(plain)[:-9], "gzip"),
                (400, "POST", path, nested, ""), (404, "GET", path, b"", ""), (404, "DELETE", f"{path}/x", b"", ""),
                (200, "POST", path, gzip.compress(plain), "gzip"), (200, "POST", path, zlib.compress(plain), "deflate"),
                (200, "POST", path, zlib.compress(plain)[2:-4], "Deflate"), (200, "POST", path, plain, "identity"),
            ]  # fmt: skip
            for status, method, target, data, encoding in sent:
                form = {**bearer(key), **({"Content-Encoding": encoding} if encoding else {})}
                async with http.request(method, f"{url}{target}", data=data, headers=form) as response:
                    assert response.status == status, (api, encoding, data[:20], await response.text())
                    if status != 200:
                        check_form(api, await response.json())
            with monkeypatch.context() as broken:
                broken.setattr(server, "_prompt", None)
                async with http.post(f"{url}{path}", data=plain, headers=bearer(key)) as response:
                    assert response.status == 500
                    check_form(api, await response.json())


def check_form(api: str, data: Any) -> None:
    if api == "messages":
        assert data["type"] == "error"
    else:
        assert {"code", "param"} <= data["error"].keys()
    assert data["error"]["message"] and data["error"]["type"]


@asynchronous
async def test_numbers_that_are_no_json_never_leave(tmp_path: Path) -> None:
    """Neither as the arguments of a call, nor as what an answer repeats of the request, nor as log-probs."""
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    tools = [("look", "Look", {"type": "object", "properties": {"at": {"type": "number"}}})]
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession() as http:
        key = await opened(server, "s", stop)
        for api in APIS:
            for stream in (False, True):
                for number in ("NaN", "-Infinity", "1e999", "[-1E999]", '{"x": 1e400}'):
                    engine.says = [f'<tool_call>{{"name": "look", "arguments": {{"at": {number}}}}}</tool_call>']
                    program = Program(api, http, url, key, stream, tools)
                    program.user("?")
                    answer = await program.ask()
                    assert not answer.calls and number in answer.text
                # A byte order mark has the body read by another parser.
                path, body = Program(api, http, url, key, stream, tools, [{"role": "user", "content": "?"}]).body()
                text = json.dumps({**body, "stream": stream}).replace('"number"', '"number", "maximum": 1e999')
                async with http.post(f"{url}{path}", data=b"\xef\xbb\xbf" + text.encode(), headers=bearer(key)) as got:
                    assert got.status == 400
        sample = engine.sample
        for log_prob in (float("-inf"), float("nan")):

            def broken(request: Any, log_prob: float = log_prob) -> Any:
                completion = sample(request)
                completion.log_probs[-1] = log_prob
                return completion

            engine.sample = broken  # type: ignore[method-assign]
            async with http.post(
                f"{url}/v1/chat/completions", headers=bearer(key),
                json={"messages": [{"role": "user", "content": "?"}], "logprobs": True},
            ) as response:  # fmt: skip
                assert response.status == 503
                check_form("chat", await response.json())


@pytest.mark.parametrize("family", [case for case in FAMILIES if case.name in ("qwen2.5", "phi3", "mistral")], ids=str)
def test_the_bytes_of_tokens_join_to_the_text(family: Any, tmp_path: Path) -> None:
    """Also where a character is spread over tokens, of which none can be decoded alone, and at a leading space."""
    tokenizer = Tokenizer(family.write(tmp_path))
    for text in ("a🙂é 日本\n", " two  words", f"end{family.said}"):
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes(ids)) == tokenizer.decode(ids, skip_special=False).encode()


# A call in each format of a real family, and two of them behind one another.
SAID = {
    "hermes": ('<tool_call>{"name": "look", "arguments": {"at": "%s"}}</tool_call>', ""),
    "mistral": ('[TOOL_CALLS]look[ARGS]{"at": "%s"}', ""),
    "qwen3_coder": ("<tool_call><function=look><parameter=at>%s</parameter></function></tool_call>", "\n"),
    "lfm2": ("<|tool_call_start|>[look(at='%s')]<|tool_call_end|>", ""),
    "kimi_k2": ('<|tool_call_begin|>functions.look:%s<|tool_call_argument_begin|>{"at": "%s"}<|tool_call_end|>', ""),
    "minimax_m2": ('<minimax:tool_call><invoke name="look"><parameter name="at">%s</parameter></invoke>'
                   "</minimax:tool_call>", "\n"),
}  # fmt: skip
TOOLS = [("look", "Look", {"type": "object", "properties": {"at": {"type": "string"}}})]
ONE_CALL: dict[str, dict[str, Any]] = {
    "chat": {"parallel_tool_calls": False},
    "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    "responses": {"parallel_tool_calls": False},
}


@pytest.mark.parametrize("form", SAID)
@asynchronous
async def test_a_program_that_takes_one_call_gets_one_and_only_that_is_trained(form: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_chat_tokenizer(tmp_path))
    stop = tokenizer.eos_token_ids[0]
    template, between = SAID[form]
    first, second = (template.replace("%s", number) for number in "01")
    async with serving(tmp_path, stop, tool_parser=form) as (server, engine, url), aiohttp.ClientSession() as http:
        for api in APIS:
            for stream in (False, True):
                name = f"{api}-{stream}"
                program = Program(api, http, url, await opened(server, name, stop), stream, TOOLS)
                program.user("?")
                engine.says = [f"I look. {first}{between}{second}", "done"]
                answer = await program.ask(**ONE_CALL[api])
                assert [call[1:] for call in answer.calls] == [("look", {"at": "0"})] and answer.text == "I look."
                program.results([(answer.calls[0][0], "x")])
                await program.ask()
                ended = await server._end(name)
                assert ended is not None and ended["counts"]["calls_cut"] == 1
                (branch,) = branches_of(ended["branches"])
                trained = tokenizer.decode(branch.sampled[0].token_ids, skip_special=False)
                assert trained == f"I look. {first}"


@asynchronous
async def test_calls_that_one_list_holds_are_one_text_of_which_the_first_is_returned(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_chat_tokenizer(tmp_path))
    stop = tokenizer.eos_token_ids[0]
    output = '[TOOL_CALLS][{"name": "look", "arguments": {"at": "0"}}, {"name": "look", "arguments": {"at": "1"}}]'
    async with serving(tmp_path, stop, tool_parser="mistral") as (server, engine, url), aiohttp.ClientSession() as http:
        program = Program("chat", http, url, await opened(server, "s", stop), False, TOOLS)
        program.user("?")
        engine.says = [output]
        answer = await program.ask(parallel_tool_calls=False)
        assert [call[2] for call in answer.calls] == [{"at": "0"}]
        ended = await server._end("s")
        assert ended is not None and ended["counts"]["calls_cut"] == 1


@asynchronous
async def test_an_answer_repeats_the_requests_own_settings(tmp_path: Path) -> None:
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession() as http:
        program = Program("responses", http, url, await opened(server, "s", stop), False, TOOLS)
        program.user("?")
        path, body = program.body()
        asked = {"parallel_tool_calls": False, "tool_choice": "required", "metadata": {"a": "b"}, "instructions": "Go."}
        for more, expected in (({}, {"parallel_tool_calls": True, "tool_choice": "auto"}), (asked, asked)):
            engine.says = ["yes"]
            data = await program.post(path, {**body, **more})
            assert {key: data[key] for key in expected} == expected


@asynchronous
async def test_a_call_that_cannot_be_read_is_counted_and_told_and_the_other_is_kept(tmp_path: Path) -> None:
    """As environments tell it: as the result of that call, in its place."""
    tokenizer = Tokenizer(write_chat_tokenizer(tmp_path))
    stop = tokenizer.eos_token_ids[0]
    good, bad = SAID["hermes"][0] % "0", '<tool_call>{"name": "look", "arguments": "{}"}</tool_call>'
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession() as http:
        for api in APIS:
            for stream in (False, True):
                for number, output in enumerate((bad + good, good + bad, bad)):
                    name = f"{api}-{stream}-{number}"
                    program = Program(api, http, url, await opened(server, name, stop), stream, TOOLS)
                    program.user("?")
                    engine.says = [output, "done"]
                    answer = await program.ask()
                    assert len(answer.calls) == (good in output)
                    if answer.calls:
                        program.results([(answer.calls[0][0], "RESULT")])
                    else:
                        program.user("RESULT")
                    held = [token for pair in engine.log[-1:] for token in (*pair[0], *pair[1])]
                    await program.ask()
                    assert engine.log[-1][0][: len(held)] == held
                    behind = tokenizer.decode(engine.log[-1][0][len(held) :])
                    assert "tool call must be" in behind
                    assert (behind.find("tool call must be") < behind.find("RESULT")) == (number != 1)
                    ended = await server._end(name)
                    assert ended is not None and ended["counts"]["calls_unreadable"] == 1
                    assert len(ended["branches"]) == 1


@asynchronous
async def test_an_error_of_a_tool_reaches_the_policy(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_chat_tokenizer(tmp_path))
    stop = tokenizer.eos_token_ids[0]
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession() as http:
        prompts = []
        for is_error in (False, None, True):
            program = Program("messages", http, url, await opened(server, str(is_error), stop), False, TOOLS)
            program.user("?")
            engine.says = [SAID["hermes"][0] % "0", "done"]
            answer = await program.ask()
            result = {"type": "tool_result", "tool_use_id": answer.calls[0][0], "content": "no such file"}
            more = {} if is_error is None else {"is_error": is_error}
            program.history.append({"role": "user", "content": [{**result, **more}]})
            await program.ask()
            prompts.append(tokenizer.decode(engine.log[-1][0]))
        assert prompts[0] == prompts[1] and '{"error": "no such file"}' in prompts[2]


@asynchronous
async def test_a_tool_that_takes_any_text_is_called_as_such(tmp_path: Path) -> None:
    """OpenAI's custom tools: the policy sees one parameter, the program gets the text, and one branch continues. A tool
    whose text must follow a grammar is left out."""
    tokenizer = Tokenizer(write_chat_tokenizer(tmp_path))
    stop = tokenizer.eos_token_ids[0]
    call = '<tool_call>{"name": "patch", "arguments": {"input": "*** a\\n"}}</tool_call>'
    about: dict[str, Any] = {"name": "patch", "description": "Apply a patch"}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession() as http:
        for api in ("chat", "responses"):
            for stream in (False, True):
                for form in ({}, {"format": {"type": "text"}}):
                    name = f"{api}-{stream}-{len(form)}"
                    program = Program(api, http, url, await opened(server, name, stop), stream)
                    program.user("?")
                    engine.says = [call, "done"]
                    tool = {"type": "custom", **about, **form}
                    tools = [tool if api == "responses" else {"type": "custom", "custom": {**about, **form}}]
                    path, body = program.body()
                    body = {**body, "tools": tools, "stream": stream}
                    data = await post(http, f"{url}{path}", program.key, body)
                    if api == "responses":
                        events = [*data] if stream else []
                        final = events[-1]["response"] if stream else data
                        (item,) = final["output"]
                        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "*** a\n")
                        assert not stream or "*** a\n" in [event.get("delta") for event in events]
                        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
                        following = {"input": [*body["input"], item, output]}
                    else:
                        if stream:
                            deltas = [choice["delta"] for event in data for choice in event["choices"]]
                            calls = [tool_call for delta in deltas for tool_call in delta.get("tool_calls", ())]
                            message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": calls}
                        else:
                            message = data["choices"][0]["message"]
                        (made,) = message["tool_calls"]
                        assert (made["type"], made["custom"]) == ("custom", {"name": "patch", "input": "*** a\n"})
                        output = {"role": "tool", "tool_call_id": made["id"], "content": "ok"}
                        following = {"messages": [*body["messages"], message, output]}
                    await post(http, f"{url}{path}", program.key, {**body, **following})
                    ended = await server._end(name)
                    assert ended is not None and len(ended["branches"]) == 1
            strict = {"type": "custom", **about, "format": grammar}
            tools = [strict if api == "responses" else {"type": "custom", "custom": {**about, "format": grammar}}]
            program = Program(api, http, url, await opened(server, api, stop), False)
            program.user("?")
            engine.says = ["no"]
            path, body = program.body()
            await post(http, f"{url}{path}", program.key, {**body, "tools": tools})
            ended = await server._end(api)
            assert ended is not None and ended["counts"]["tools_left_out"] == 1


async def post(http: aiohttp.ClientSession, url: str, key: str, body: Any) -> Any:
    """The answer, or the events of a stream."""
    async with http.post(url, json=body, headers=bearer(key)) as response:
        text = await response.text()
        assert response.status == 200, text
        return events_of(text) if body.get("stream") else json.loads(text)


@asynchronous
async def test_ids_that_the_policy_wrote_are_those_that_programs_get_and_give_back(tmp_path: Path) -> None:
    """Unless the conversation has them already: a program finds the result of a call by its id."""
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    output = "[TOOL_CALLS]look[CALL_ID]a1B2c3D4e[ARGS]{}"
    async with serving(tmp_path, stop, tool_parser="mistral") as (server, engine, url), aiohttp.ClientSession() as http:
        for api in APIS:
            program = Program(api, http, url, await opened(server, api, stop), False, TOOLS)
            program.user("?")
            ids = []
            for _ in range(2):
                engine.says = [output]
                answer = await program.ask()
                ids.append(answer.calls[0][0])
                program.results([(ids[-1], "x")])
            assert ids[0] == "a1B2c3D4e" and ids[1] != ids[0] and len(ids[1]) == 9


def test_an_answer_of_gpt_oss_that_is_cut_shows_its_final_channel_as_far_as_it_goes(tmp_path: Path) -> None:
    """By a limit or a stop text, wherever that falls; what is in no message is no place for a stop text."""
    family = next(candidate for candidate in OTHERS if candidate.name == "harmony")
    tokenizer = Tokenizer(family.write(tmp_path))
    prompt = tokenizer.encode("<|start|>user<|message|>?<|end|><|start|>assistant")
    thought = "<|channel|>analysis<|message|>I assume.<|end|>"
    text = f"{thought}<|start|>assistant<|channel|>final<|message|>Hello world"
    ids = tokenizer.encode(text)
    for length in range(1, len(ids) + 1):
        whole = Completion(ids[:length], [-0.5] * length, "length", [VersionSpan("e", 0, 0, length)])
        for tools in ([], TOOL_SCHEMAS):
            message = make_choice(whole, Call(tools=tools), tokenizer, "x", "harmony", prompt).message
            assert "Hello world".startswith(message["content"] or "") and "tool_calls" not in message
    stops = {"world": "Hello ", "lo w": "Hel", "assume": ""}
    stops |= dict.fromkeys(("final", "assistant", "analysis"), "Hello world")
    for stop, expected in stops.items():
        whole = Completion(ids, [-0.5] * len(ids), "stop", [VersionSpan("e", 0, 0, len(ids))])
        call = Call(stop=[stop])
        kept, _ = cut(whole, call, tokenizer, "harmony", prompt)
        choice = make_choice(kept, call, tokenizer, "x", "harmony", prompt)
        assert choice.message["content"] == expected
        assert choice.stopped_by == (None if expected == "Hello world" else stop)


@asynchronous
async def test_a_parser_of_the_users_own_reads_calls_for_agents(tmp_path: Path) -> None:
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    async with serving(tmp_path, stop, tool_parser=BRACKETED) as (server, engine, url), aiohttp.ClientSession() as http:
        for api in APIS:
            program = Program(api, http, url, await opened(server, api, stop), False, TOOLS)
            program.user("?")
            engine.says = ["<think>[look no]</think>So [look here] and [look there]", "[oops"]
            answer = await program.ask()
            assert [call[1:] for call in answer.calls] == [("look", {"at": "here"}), ("look", {"at": "there"})]
            program.results([(call[0], "x") for call in answer.calls])
            assert not (await program.ask()).calls
            ended = await server._end(api)
            assert ended is not None and ended["counts"]["calls_unreadable"] == 1 and len(ended["branches"]) == 1
    # The next run of this process looks for a format among those that there are.
    assert BRACKETED not in FORMATS


@asynchronous
async def test_a_parser_that_never_returns_or_ends_its_process_holds_up_no_other_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    async with serving(tmp_path, stop, tool_parser=BRACKETED) as (server, engine, url), aiohttp.ClientSession() as http:
        program = Program("chat", http, url, await opened(server, "until", stop), False, TOOLS)
        program.user("?")
        engine.says = [f"[until {tmp_path / 'goes_on'}]"]
        asking = asyncio.ensure_future(program.ask())
        await eventually(lambda: bool(engine.log))
        async with http.get(f"{url}/v1/models", headers={"X-Api-Key": program.key}) as response:
            assert response.status == 200 and not asking.done()
        (tmp_path / "goes_on").touch()
        assert not (await asking).calls
        for output, limit_s, reason in (
            ("[forever", 0.2, "no answer within 0.2 s"),
            ("[exit", 60.0, "exit code 3"),
            ("[object", 60.0, "not JSON serializable"),
        ):
            program = Program("chat", http, url, await opened(server, output, stop), False, TOOLS)
            program.user("?")
            engine.says = [output]
            monkeypatch.setattr(parser_process, "ALTOGETHER_S", limit_s)
            assert (await program.ask()).calls == []
            monkeypatch.setattr(parser_process, "ALTOGETHER_S", 60.0)
            program.user("go on")
            engine.says = ["[look here]"]
            assert [call[1:] for call in (await program.ask()).calls] == [("look", {"at": "here"})]
            assert reason in server._tokenizer.decode(engine.log[-1][0])
            record = await server._end(output)
            assert record is not None and record["counts"]["calls_unreadable"] == 1


@pytest.mark.slow
def test_a_parser_that_calculates_for_ever_ends_with_its_processor_time() -> None:
    parser = parser_process.ParserProcess(BRACKETED)
    with pytest.raises(ValueError, match="took more than 5 s of processor time"):
        parser.parse("[forever")
    assert parser.parse("[look here]") == [["look", {"at": "here"}]]
    parser.close()


@pytest.mark.parametrize("name, problem", [("no_such_module:parse", "cannot be imported"), (f"{BRACKETED}s", "has no")])
@asynchronous
async def test_a_parser_that_cannot_be_loaded_is_refused_at_the_start(tmp_path: Path, name: str, problem: str) -> None:
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    with pytest.raises(UserError, match=problem):
        async with serving(tmp_path, stop, tool_parser=name):
            pass


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
@asynchronous
async def test_an_answer_that_the_gateway_cannot_write_is_none_and_not_the_policy_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: str, stream: bool
) -> None:
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession() as http:
        engine.says = ["first", "second"]
        program = program_of(api, http, url, await opened(server, api, stop), False)
        await program.ask()
        program.user("go on")
        dialect = next(candidate for candidate in DIALECTS if candidate.path == program.body()[0])
        for error in (RuntimeError("broken"), RecursionError()):
            engine.says = ["second"]

            def fail(*_: Any, why: Exception = error) -> Any:
                raise why

            monkeypatch.setattr(type(dialect), "events" if stream else "write", fail)
            path, body = program.body()
            headers = {"X-Api-Key": program.key}
            async with http.post(f"{url}{path}", json={**body, "stream": stream}, headers=headers) as response:
                assert response.status == (200 if stream else 500)
                assert "an error of the gateway" in await response.text()
        record = await server._end(api)
        assert record is not None and record["calls"] == 1 and record["counts"]["calls_refused/internal_error"] == 2
        (branch,) = branches_of(record["branches"])
        assert [server._tokenizer.decode(completion.token_ids) for completion in branch.sampled] == ["first"]
        # So the episode is begun again, like one whose engine gave no answer.
        assert record["failed"] == 1 and not record["ended_by"]


@pytest.mark.parametrize("levels", [90, 110, 450, 900])
@asynchronous
async def test_arguments_of_very_many_levels_are_an_unreadable_call_on_every_api(tmp_path: Path, levels: int) -> None:
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession() as http:
        for api in APIS:
            for stream in (False, True):
                name = f"{api}-{stream}"
                program = program_of(api, http, url, await opened(server, name, stop), stream)
                program.tools = [("look", "Look", {"type": "object"})]
                arguments = '{"at": ' + "[" * levels + "]" * levels + "}"
                engine.says = [f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>']
                assert len((await program.ask()).calls) == (levels < 100)
                record = await server._end(name)
                assert record is not None and record["counts"]["calls_unreadable"] == (levels > 100)
                assert record["counts"]["calls_answered"] == len(record["branches"]) == 1


@pytest.mark.parametrize("kind", ["function_call", "custom_tool_call"])
@asynchronous
async def test_a_refused_result_ends_a_conversation_whatever_items_say_that_there_is_one(
    tmp_path: Path, kind: str
) -> None:
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    tools: dict[str, Any] = {
        "function_call": {"type": "function", "name": "look", "parameters": {"type": "object"}},
        "custom_tool_call": {"type": "custom", "name": "look"},
    }
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession() as http:
        engine.says = ['<tool_call>{"name": "look", "arguments": {"input": "up"}}</tool_call>']
        headers = {"Authorization": f"Bearer {await opened(server, kind, stop)}"}
        question: dict[str, Any] = {"role": "user", "content": "?"}
        body: dict[str, Any] = {"input": [question], "tools": [tools[kind]]}
        async with http.post(f"{url}/v1/responses", json=body, headers=headers) as response:
            (call,) = (await response.json())["output"]
        assert call["type"] == kind
        image = [{"type": "input_image", "image_url": "data:image/png;base64,aGk="}]
        result = {"type": f"{kind}_output", "call_id": call["call_id"], "output": image}
        async with http.post(
            f"{url}/v1/responses", json={**body, "input": [question, call, result]}, headers=headers
        ) as response:
            assert response.status == 400
        record = await server._end(kind)
        assert record is not None and "/v1/responses" in record["ended_by"]


@asynchronous
async def test_a_rewritten_history_whose_calls_a_template_leaves_out_is_refused_by_name(tmp_path: Path) -> None:
    """The policy would read the result of a call that it has never seen. What only goes on is not rendered anew."""
    lfm2 = next(family for family in FAMILIES if family.name == "lfm2")
    tokenizer = Tokenizer(lfm2.write(tmp_path))
    stop = tokenizer.eos_token_ids[0]
    async with serving(tmp_path, stop, tool_parser="lfm2") as (server, engine, url), aiohttp.ClientSession() as http:
        for api in APIS:
            for text in ("", "I look. "):
                name = f"{api}-{text}"
                program = Program(api, http, url, await opened(server, name, stop), False, TOOLS)
                program.user("?")
                engine.says = [f"{text}<|tool_call_start|>[look(at='up')]<|tool_call_end|>", "a star"]
                ((call_id, _, _),) = (await program.ask()).calls
                program.results([(call_id, "bright")])
                assert (await program.ask()).text == "a star"
                program.history[0]["content"] = "What is there?"
                program.user("And now?")
                path, body = program.body()
                async with http.post(f"{url}{path}", json=body, headers={"X-Api-Key": program.key}) as response:
                    assert response.status == 400
                    assert "does not write the calls of an earlier answer" in await response.text()
                record = await server._end(name)
                assert record is not None and len(record["branches"]) == 1 and path in record["ended_by"]
