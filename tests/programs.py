"""Programs that talk to a gateway in the JSON of each of its dialects, and keep their history in the API's own form."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

API = ("chat", "messages", "responses", "responses by id")


@dataclass
class Said:
    """What a program reads of an answer."""

    text: str
    calls: list[tuple[str, str, Any]]
    """(id, name, arguments) of each"""
    reason: str
    id: str


@dataclass
class Program:
    """A conversation over one API. `tools` are (name, description, parameters)."""

    api: str
    http: aiohttp.ClientSession
    base_url: str
    key: str
    stream: bool
    tools: list[tuple[str, str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    previous: str = ""
    system: str = ""

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self, results: list[tuple[str, str]]) -> None:
        """What the tools returned, by the ids of their calls."""
        if self.api == "messages":
            blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, text in results]
            self.history.append({"role": "user", "content": blocks})
        elif self.api == "chat":
            self.history += [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in results]
        else:
            kind = "function_call_output"
            self.history += [{"type": kind, "call_id": call_id, "output": text} for call_id, text in results]

    async def ask(self, **options: Any) -> Said:
        path, body = self.body()
        body |= {"model": "policy", "stream": self.stream, **options}
        data = await self.post(path, body)
        return self.read(data)

    def body(self) -> tuple[str, dict[str, Any]]:
        tools = [{"name": name, "description": text} for name, text, _ in self.tools]
        if self.api == "messages":
            tools = [{**tool, "input_schema": self.tools[i][2]} for i, tool in enumerate(tools)]
            more = {"system": [{"type": "text", "text": self.system}]} if self.system else {}
            return "/v1/messages", {"messages": self.history, "tools": tools, "max_tokens": 4096, **more}
        functions = [{**tool, "parameters": self.tools[i][2]} for i, tool in enumerate(tools)]
        if self.api == "chat":
            first = [{"role": "system", "content": self.system}] if self.system else []
            wrapped = [{"type": "function", "function": function} for function in functions]
            return "/v1/chat/completions", {"messages": [*first, *self.history], "tools": wrapped}
        flat = [{"type": "function", **function} for function in functions]
        body: dict[str, Any] = {"input": self.history, "tools": flat, "instructions": self.system or None}
        if self.api == "responses by id" and self.previous:
            body |= {"previous_response_id": self.previous}
        return "/v1/responses", body

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer as JSON, put together from its events if it was streamed."""
        headers = {"X-Api-Key": self.key} if self.api == "messages" else {"Authorization": f"Bearer {self.key}"}
        async with self.http.post(f"{self.base_url}{path}", json=body, headers=headers) as response:
            if response.status != 200:
                raise AssertionError(f"{response.status}: {await response.text()}")
            if not body.get("stream"):
                return await response.json()
            lines = (await response.text()).splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return {"chat": joined_chunks, "messages": joined_blocks}.get(self.api, joined_items)(events)

    def read(self, data: Any) -> Said:
        """Read an answer and append it to the history as it came."""
        if self.api == "chat":
            choice = data["choices"][0]
            message = choice["message"]
            self.history.append(message)
            calls = [(tool_call["id"], tool_call["function"]) for tool_call in message.get("tool_calls") or ()]
            read = [(call, function["name"], json.loads(function["arguments"])) for call, function in calls]
            return Said(message["content"] or "", read, choice["finish_reason"], data["id"])
        if self.api == "messages":
            self.history.append({"role": "assistant", "content": data["content"]})
            text = "".join(block["text"] for block in data["content"] if block["type"] == "text")
            uses = [block for block in data["content"] if block["type"] == "tool_use"]
            return Said(text, [(use["id"], use["name"], use["input"]) for use in uses], data["stop_reason"], data["id"])
        self.previous = data["id"]
        self.history = [] if self.api == "responses by id" else [*self.history, *data["output"]]
        texts = [part["text"] for item in data["output"] if item["type"] == "message" for part in item["content"]]
        called = [item for item in data["output"] if item["type"] == "function_call"]
        read = [(item["call_id"], item["name"], json.loads(item["arguments"])) for item in called]
        return Said("".join(texts), read, data["status"], data["id"])


def joined_chunks(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    reason = None
    for event in events:
        for choice in event["choices"]:
            message["content"] += choice["delta"].get("content") or ""
            message["tool_calls"] += choice["delta"].get("tool_calls", [])
            reason = choice["finish_reason"] or reason
    return {"id": events[0]["id"], "choices": [{"message": message, "finish_reason": reason}]}


def joined_blocks(events: list[dict[str, Any]]) -> dict[str, Any]:
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    data = dict(events[0]["message"])
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                block["input"] = json.loads(delta["partial_json"])
        elif event["type"] == "message_delta":
            data |= event["delta"]
    return {**data, "content": blocks}


def joined_items(events: list[dict[str, Any]]) -> dict[str, Any]:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created" and events[-1]["type"] in (
        "response.completed",
        "response.incomplete",
    )
    data: dict[str, Any] = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
    texts = [item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in done]
    assert data["output"] == done and deltas == texts
    return data
