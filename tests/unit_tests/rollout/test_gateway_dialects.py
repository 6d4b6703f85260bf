"""Programs of every dialect against the gateway's server, with an engine that says random things."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import random
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.chat_families import FAMILIES, Family
from tests.chat_models import ADDED, SPECIAL, write_chat_tokenizer
from tests.patience import PATIENCE_S, asynchronous
from tests.programs import API, Program
from torchtitan.inference.types import Branch, Completion, Given, VersionSpan
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.gateway.server import GatewayServer

PIECES = ["a", "B ", "\n", "\n\n", "é", "日本", "🙂", "\u200d", "{}", '"', "<", "|", "im_end", "\\u0", *SPECIAL, *ADDED]
PIECES += ["<|eot_id|>", "<|start_header_id|>", "<|python_tag|>"]
TURNS = 30
TOOLS = [("look", "Look <|im_end|> up", {"type": "object", "properties": {"at": {"type": "string"}}})]


def noise(generator: random.Random, most: int = 12) -> str:
    return "".join(generator.choices(PIECES, k=generator.randint(0, most)))


class Engine:
    """Takes the place of the run's connection. `log` has (prompt, sampled tokens) of every completion."""

    def __init__(self, tokenizer: Tokenizer, generator: random.Random):
        self.tokenizer, self.generator = tokenizer, generator
        self.log: list[tuple[list[int], list[int]]] = []
        self.says: list[str] = []
        """What it says next, in place of random things"""

    async def call(self, name: str, request: dict[str, Any], **_more: Any) -> bytes:
        assert name == "sample"
        return json.dumps([self.sample(request).to_json() for _ in range(request["sampling"]["n"])]).encode()

    def sample(self, request: dict[str, Any]) -> Completion:
        generator, tokenizer = self.generator, self.tokenizer
        finish = "length" if generator.random() < 0.1 else "stop"
        if self.says:
            ids, finish = tokenizer.encode(self.says.pop(0)), "stop"
        elif generator.random() < 0.8:
            arguments = {"at": noise(generator).replace("</tool_call>", "")}
            called = json.dumps({"name": "look", "arguments": arguments}, ensure_ascii=generator.random() < 0.5)
            # A call in a thought is none, nor is one that a thought's end makes a part of it.
            before = noise(generator, 3).replace("<think>", "").replace("</think>", "")
            ids = tokenizer.encode(f"{before}<tool_call>\n{called}\n</tool_call>" * generator.choice((2, 4, 8)))
        else:
            ids = [generator.randrange(tokenizer.vocab_size) for _ in range(generator.randint(1, 12))]
        ends = request["sampling"]["stop_token_ids"]
        ids = [token for token in ids if token not in ends]
        ids = [*ids, ends[0]] if finish == "stop" else ids or [5]
        self.log.append((request["prompt_ids"], ids))
        log_probs = [-generator.random() for _ in ids]
        return Completion(ids, log_probs, finish, [VersionSpan("e", 3, 0, len(ids))])  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def serving(directory: Path, stop: int, **settings: Any) -> AsyncIterator[tuple[GatewayServer, Engine, str]]:
    """A gateway's server, with an engine behind it, and its address."""
    server = GatewayServer("secret")
    about = {"model": str(directory), "chat_template_kwargs": {}, "stop_token_ids": [stop], "name": "policy"}
    about["tool_parser"] = "hermes"
    await server._set_up(**{**about, "seq_len": 10**7, "max_calls": 10**6, "timeout_s": 60.0, **settings})
    server._peer = Engine(server._tokenizer, random.Random(7))  # type: ignore[assignment]
    port = await server.site.start("127.0.0.1", 0)
    try:
        yield server, server._peer, f"http://127.0.0.1:{port}"  # type: ignore[misc]
    finally:
        await server.close()


async def opened(server: GatewayServer, name: str, stop: int) -> str:
    sampling = {"max_tokens": 4096, "stop_token_ids": [stop], "seed": 1}
    return await server._open(name, False, sampling, 0, "")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3.1"])
@asynchronous
async def test_every_trained_token_is_one_that_was_sampled(family: str, tmp_path: Path) -> None:
    """Over every dialect, streamed and not: a prompt begins with the tokens of the turn before it, behind which stand
    the new messages, with names of special tokens as text; and what is trained is what the engine has said."""
    known: Family = next(candidate for candidate in FAMILIES if candidate.name == family)
    tokenizer = Tokenizer(known.write(tmp_path))
    stop = tokenizer.encode(known.said)[0]
    results = 0
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession() as http:
        for api in API:
            for stream in (False, True):
                name = f"{api}-{stream}"
                generator = engine.generator = random.Random(name)
                engine.log.clear()
                program = Program(api, http, url, await opened(server, name, stop), stream, TOOLS, system="Be brief.")
                program.user(noise(generator))
                before, expected = list[int](), list[str]()
                for turn in range(TURNS):
                    reply = await program.ask()
                    prompt, ids = engine.log[-1]
                    texts = [noise(generator) for _ in reply.calls or " "]
                    results += len(reply.calls)
                    if reply.calls:
                        program.results([(call[0], text) for call, text in zip(reply.calls, texts, strict=True)])
                    else:
                        program.user(texts[0])
                    assert prompt[: len(before)] == before
                    if turn:
                        check_new(tokenizer, prompt[len(before) :], expected)
                    before, expected = prompt + ids, texts
                ended = await server._end(name)
                assert ended is not None
                (branch,) = branches_of(ended["branches"])
                assert [completion.token_ids for completion in branch.sampled] == [ids for _, ids in engine.log]
                assert branch.token_ids == engine.log[-1][0] + engine.log[-1][1]
    assert results > 670  # about 2,000 over three families


def branches_of(rows: list[list[Any]]) -> list[Branch]:
    """The branches of a record."""
    return [Branch([Given(raw) if isinstance(raw, list) else Completion.from_json(raw) for raw in row]) for row in rows]


def check_new(tokenizer: Tokenizer, ids: list[int], texts: list[str]) -> None:
    """The texts are written out (as JSON by Llama 3), in their order, and none of their special tokens is one."""
    written = tokenizer.decode(ids, skip_special=False)
    place = 0
    for text in texts:
        forms = text.strip(), json.dumps(text, ensure_ascii=False)[1:-1]
        # The first place: the end of another result, with the quotation mark behind it, may read like this one.
        places = [found for form in forms if (found := written.find(form, place)) >= 0]
        assert places, (text, written)
        place = min(places)
    special = [token for token in ids if token in tokenizer.special_token_ids]
    spelled = sum(written.count(tokenizer.decode([token], skip_special=False)) for token in set(special))
    inside = sum(text.count(tokenizer.decode([token], skip_special=False)) for token in set(special) for text in texts)
    assert len(special) == spelled - inside


def text_of(tokenizer: Tokenizer, ended: dict[str, Any] | None) -> list[str]:
    """The trained texts of a session."""
    assert ended is not None
    branches = branches_of(ended["branches"])
    return [tokenizer.decode(completion.token_ids) for branch in branches for completion in branch.sampled]


@asynchronous
async def test_options_do_what_they_say_or_are_counted(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_chat_tokenizer(tmp_path))
    stop = tokenizer.eos_token_ids[0]
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession() as http:
        # A stop of several tokens: cut after sampling, whatever comes behind it is neither said nor trained.
        for api, option in (("chat", "stop"), ("messages", "stop_sequences")):
            program = Program(api, http, url, await opened(server, api, stop), False, TOOLS)
            program.user("?")
            engine.says = ["one two. three", f"so {call} wo.", "at last"]
            answer = await program.ask(**{option: ["wo. ", "never"]})
            assert (answer.text, answer.calls) == ("one t", [])
            assert answer.reason == {"chat": "stop", "messages": "stop_sequence"}[api]
            program.user("more")
            assert [tool_call[1] for tool_call in (await program.ask(**{option: [" wo"]})).calls] == ["look"]
            program.user("more")
            await program.ask(**{option: ["never"]})
            assert tokenizer.decode(engine.log[-1][0]).count("three") == 0
            ended = await server._end(api)
            assert text_of(tokenizer, ended) == ["one two. ", f"so {call} wo", "at last"]
            assert ended is not None and ended["counts"]["stops_cut"] == 2 and len(ended["branches"]) == 1

        # A call that nothing can force: what comes is answered, and counted if it is none.
        choices: dict[str, Any] = {
            "chat": [{"type": "function", "function": {"name": "look"}}, "required"],
            "messages": [{"type": "tool", "name": "look"}, {"type": "any"}],
            "responses": [{"type": "function", "name": "look"}, "required"],
        }
        for api, (named, required) in choices.items():
            program = Program(api, http, url, await opened(server, api, stop), False, TOOLS)
            program.user("?")
            engine.says = [call, "no", "no"]
            for tool_choice in (named, named, required):
                await program.ask(tool_choice=tool_choice)
                program.user("?")
            ended = await server._end(api)
            assert ended is not None and ended["counts"]["tool_choices_missed"] == 2

        # Tools that would run at a provider are not shown, and counted.
        for api, hosted in (
            ("messages", {"type": "web_search_1", "name": "web_search"}),
            ("responses", {"type": "mcp"}),
        ):
            program = Program(api, http, url, await opened(server, api, stop), False, TOOLS)
            program.user("?")
            await program.ask(tools=[*program.body()[1]["tools"], hosted])
            prompt = engine.log[-1][0]
            program = Program(api, http, url, program.key, False, TOOLS)
            program.user("?")
            await program.ask()
            assert prompt == engine.log[-1][0]
            ended = await server._end(api)
            assert ended is not None and ended["counts"]["tools_left_out"] == 1

        # Several answers to one call are branches of one turn.
        program = Program("chat", http, url, await opened(server, "n", stop), False, TOOLS)
        program.user("?")
        path, body = program.body()
        data = await program.post(path, {**body, "n": 3, "stop": "."})
        prompt = engine.log[-1][0]
        assert [choice["index"] for choice in data["choices"]] == [0, 1, 2]
        program.history.append(data["choices"][1]["message"])
        program.user("and?")
        await program.ask()
        ended = await server._end("n")
        assert ended is not None and ended["calls"] == 4
        branches = branches_of(ended["branches"])
        assert [branch.token_ids[: len(prompt)] for branch in branches] == [prompt] * 3
        assert sorted(len(branch.sampled) for branch in branches) == [1, 1, 2]

        # Tokens are counted as they would be sampled after, and a developer speaks where the template has the system.
        program = Program("messages", http, url, await opened(server, "count", stop), False, TOOLS, system="Be brief.")
        program.user("?")
        _, body = program.body()
        counted = await program.post(
            "/v1/messages/count_tokens", {"messages": body["messages"], "tools": body["tools"]}
        )
        await program.ask(system="")
        assert counted == {"input_tokens": len(engine.log[-1][0])}
        program = Program("chat", http, url, program.key, False)
        program.history = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "?"}]
        await program.ask()
        begin = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user"
        assert tokenizer.decode(engine.log[-1][0], skip_special=False).startswith(begin)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format"),
    ("chat", {"chat_template_kwargs": {"enable_thinking": True}}, "rollout.chat_template_kwargs"),
    ("chat", {"n": 1000}, "n: it must be less than or equal to 128"),
    ("chat", {"max_completion_tokens": 0}, "max_completion_tokens: it must be greater than or equal to 1"),
    ("chat", {"stop": [""]}, "stop"),
    ("chat", {"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content must be text"),
    ("chat", {"tool_choice": {"type": "function", "function": {"name": "run"}}}, "among the tools"),
    ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ("messages", {"messages": [{"role": "user", "content": [IMAGE]}]}, "image"),
    ("messages", {"messages": []}, "messages"),
    ("messages", {"messages": 3}, "messages"),
    ("messages", {"tools": [{"input_schema": {}}]}, "needs a name"),
    ("messages", {"tool_choice": {"type": "tool", "name": "run"}}, "among the tools"),
    ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ("responses", {"previous_response_id": "resp_other"}, "resp_other|other"),
    ("responses", {"tools": [3]}, "tools"),
    ("responses", {"background": True}, "background"),
]


@asynchronous
async def test_refusals_have_the_form_of_their_api(tmp_path: Path) -> None:
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    values = {"chat_template_kwargs": {"tools_first": True}}
    tokenizer = tmp_path / "tokenizer_config.json"
    tokenizer.write_text(
        tokenizer.read_text().replace("{%- if tools", "{%- if tools_first %}{%- endif %}{%- if tools", 1)
    )
    async with serving(tmp_path, stop, **values) as (server, engine, url), aiohttp.ClientSession() as http:
        key = await opened(server, "s", stop)
        for api, options, reason in REFUSED:
            for stream in (False, True):
                program = Program(api, http, url, key, stream, TOOLS)
                program.user("?")
                path, body = program.body()
                body |= {"stream": stream, **options}
                await refused(http, f"{url}{path}", key, body, api, 400, reason)
                assert not engine.log
        program = Program("chat", http, url, key, False)
        program.user("?")
        await program.ask(chat_template_kwargs={"tools_first": True})
        for api in API[:3]:
            program = Program(api, http, url, "guessed", False)
            program.user("?")
            path, body = program.body()
            await refused(http, f"{url}{path}", "guessed", body, api, 401, "no session")
        await server._end("s")
        server._peer.call = answer_nothing  # type: ignore[assignment, union-attr]
        for api in API[:3]:
            program = Program(api, http, url, key, False)
            program.user("?")
            path, body = program.body()
            await refused(http, f"{url}{path}", key, body, api, 410, "has ended")
        assert len(engine.log) == 1


@asynchronous
async def test_a_key_is_worth_nothing_after_its_episode(tmp_path: Path) -> None:
    """Over every route, and neither is the key of another episode's conversation, nor a program that says nothing."""
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession() as http:
        key, other = [await opened(server, name, stop) for name in ("first", "second")]
        program = Program("responses by id", http, url, key, False)
        program.user("a secret")
        answer = await program.ask()
        stolen = {"input": "?", "previous_response_id": answer.id}
        await refused(http, f"{url}/v1/responses", other, stolen, "responses", 400, "no answer")
        await server._end("first")
        server._peer.call = answer_nothing  # type: ignore[assignment, union-attr]
        body = {"messages": [{"role": "user", "content": "?"}], "input": "?", "token_ids": [1], "max_tokens": 1}
        routes = ("chat/completions", "messages", "messages/count_tokens", "responses")
        for path in (*(f"/v1/{route}" for route in routes), "/inference/v1/generate"):
            for form in ({"Authorization": f"Bearer {key}"}, {"X-Api-Key": key}):
                async with http.post(f"{url}{path}", json=body, headers=form) as response:
                    assert response.status == 410
        async with http.get(f"{url}/v1/models", headers={"X-Api-Key": key}) as response:
            assert response.status == 410
        assert len(engine.log) == 1


@asynchronous
async def test_bodies_are_read_as_programs_write_them(tmp_path: Path) -> None:
    """With half of an emoji, as JSON.stringify writes it, and a byte order mark; others are refused with the reason."""
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    async with serving(tmp_path, stop) as (server, engine, url), aiohttp.ClientSession() as http:
        headers = {"X-Api-Key": await opened(server, "raw", stop)}
        bodies = [
            ("chat/completions", json.dumps({"messages": [{"role": "user", "content": text}]}).encode(), "")
            for text in ("a?", "a\ud83d", "a\ude42", "a\ude42\ud83d", "a🙂")
        ]
        bodies += [("messages", b'{"max_tokens": 4, "messages": [{"role": "user", "content": "a?"}]}', "")]
        bodies += [(path, codecs.BOM_UTF8 + body, why) for path, body, why in bodies]
        half = b'{"messages": [{"role": "user", "content": "\\ud83d"}], "top_p": '
        bodies += [
            ("chat/completions", half + b"NaN}", "not JSON"),
            ("chat/completions", half, "not JSON"),
            ("chat/completions", half + b"[" * 100_000 + b"]" * 100_000 + b"}", "not JSON"),
            ("chat/completions", b'["\\ud83d"]', "not an object"),
            ("chat/completions", codecs.BOM_UTF8, "not JSON"),
            ("chat/completions", b'{"messages": [{"role": null, "content": "a"}]}', "needs the keys"),
        ]
        for path, body, why in bodies:
            async with http.post(f"{url}/v1/{path}", data=body, headers=headers) as response:
                data = await response.json()
            assert response.status == (400 if why else 200), (body[:99], data)
            assert why in str(data), data
        prompts = [server._tokenizer.decode(prompt) for prompt, _ in engine.log]
        assert len(prompts) == 12
        assert [prompts[0] == prompt for prompt in prompts] == [True, True, True, False, False, True] * 2
        assert "a??" in prompts[3] and "a🙂" in prompts[4]


async def answer_nothing(_name: str, **_more: Any) -> None:
    """Of a late call."""


async def refused(
    http: aiohttp.ClientSession, url: str, key: str, body: Any, api: str, status: int, reason: str
) -> None:
    async with http.post(url, json=body, headers={"X-Api-Key": key}) as response:
        data = await response.json()
        assert response.status == status, (api, body, data)
    if api == "messages":
        kind = {401: "authentication_error"}.get(status, "invalid_request_error")
        assert data["type"] == "error" and data["error"]["type"] == kind
    else:
        assert data["error"]["type"] == "invalid_request_error" and "code" in data["error"]
    assert re.search(reason, data["error"]["message"]), data


@asynchronous
async def test_a_coding_agent_connects_unmodified(tmp_path: Path) -> None:
    """Its own prompt, its own tools: one conversation, in which the policy has had a command run."""
    program = shutil.which("codex")
    if program is None:
        pytest.skip("there is no program `codex` here (npm install -g @openai/codex)")
    stop = Tokenizer(write_chat_tokenizer(tmp_path)).eos_token_ids[0]
    async with serving(tmp_path, stop) as (server, engine, url):
        engine.says = [
            '<tool_call>{"name": "exec_command", "arguments": {"cmd": "echo $((40 + 2)) apples"}}</tool_call>', "Done.",
        ]  # fmt: skip
        provider = f'{{name="run",base_url="{url}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}}'
        options = ["-c", "model_provider=run", "-c", f"model_providers.run={provider}", "-m", "policy"]
        key = await opened(server, "s", stop)
        process = await asyncio.create_subprocess_exec(
            program, "exec", "--skip-git-repo-check", *options, "Count the apples", cwd=tmp_path,
            env={**os.environ, "CODEX_HOME": str(tmp_path), "OPENAI_API_KEY": key}, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        assert process.returncode == 0, output.decode()
        ended = await server._end("s")
        assert ended is not None and ended["calls"] == 2 and len(ended["branches"]) == 1
        assert "42 apples" in server._tokenizer.decode(engine.log[1][0])
