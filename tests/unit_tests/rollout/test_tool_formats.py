"""How families of models write tool calls: what their templates write is read as it was given, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chat_families import FAMILIES, Family
from torchtitan.inference.types import Completion, VersionSpan
from torchtitan.rollout.data.tool_formats.format import ToolCall
from torchtitan.rollout.data.tool_formats.registry import find_format, parse_tool_calls
from torchtitan.rollout.gateway.calls import Call, make_choice
from torchtitan.rollout.tokenizer import ChatRenderer, Tokenizer

# As these families' templates write calls; the rest of a template does not matter here.
FRAME = """
{{- tools and (tools | tojson) or '' }}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
    {%- for call in m.tool_calls or [] %}{%- set c = call.function %}CALL{%- endfor %}
    {{- END }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CODER = """{{- '\\n<tool_call>\\n<function=' + c.name + '>\\n' }}
    {%- for key, value in c.arguments | items %}
        {{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
    {%- endfor %}{{- '</function>\\n</tool_call>' }}"""
DEEPSEEK = """{{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}{{- '<｜tool▁call▁begin｜>' + WRITTEN }}
    {{- '<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}"""
V3 = "'function<｜tool▁sep｜>' + c.name + '\\n```json\\n' + (c.arguments | tojson) + '\\n```'"
V3_1 = "c.name + '<｜tool▁sep｜>' + (c.arguments | tojson)"
MISTRAL = "{{- '[TOOL_CALLS]' + c.name + '[ARGS]' + (c.arguments | tojson) }}"
MISTRAL_LIST = """{{- '[TOOL_CALLS][' if loop.first else ', ' }}
    {{- '{"name": "' + c.name + '", "arguments": ' + (c.arguments | tojson) + ', "id": "123456789"}' }}
    {{- ']' if loop.last else '' }}"""
HARMONY = """
{{- tools and (tools | tojson) or '' }}
{%- for m in messages %}
    {{- '<|start|>' + m.role }}
    {%- if m.tool_calls %}
        {{- '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.' }}
        {{- m.tool_calls[0].function.name + ' <|constrain|>json<|message|>' }}
        {{- (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
    {%- elif m.role == 'assistant' %}{{- '<|channel|>final<|message|>' + m.content + '<|return|>' }}
    {%- else %}{{- '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


def family(name: str, call: str, end: str, special: tuple[str, ...] = ()) -> Family:
    """`special` are added to its tokens."""
    return Family(name, FRAME.replace("CALL", call).replace("END", f"'{end}'"), (end,), end, end, stops=special)


MARKS = tuple(f"<｜tool▁{one}｜>" for one in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
OTHERS = [
    family("qwen3_coder", CODER, "<|im_end|>"),
    family("deepseek v3", DEEPSEEK.replace("WRITTEN", V3), "<｜end▁of▁sentence｜>", MARKS),
    family("deepseek v3.1", DEEPSEEK.replace("WRITTEN", V3_1), "<｜end▁of▁sentence｜>", MARKS),
    family("mistral", MISTRAL, "</s>", ("[TOOL_CALLS]", "[ARGS]")),
    family("mistral list", MISTRAL_LIST, "</s>", ("[TOOL_CALLS]", "[ARGS]")),
    Family("harmony", HARMONY, ("<|return|>", "<|call|>"), "<|return|>", "<|call|>"),
]
SHIPPED = {"qwen2.5": "hermes", "qwen3": "hermes", "llama3.1": "hermes", "glm4.5": "glm"}
ONE_CALL = ("llama3.1", "harmony")

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"type": "array"}, "depth": {"type": "integer"}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Do.", "parameters": SCHEMA}}
    for name in ("read_file", "list-all")
]
CALLS = [
    ToolCall("read_file", {"path": 'a "b" <c>\n  日本 🙂 </x>', "lines": [1, {"to": "é"}], "depth": 7}),
    ToolCall("list-all", {"path": "7"}),
]


@pytest.mark.parametrize(
    "family", [*OTHERS, *(one for one in FAMILIES if one.name in SHIPPED)], ids=lambda one: one.name
)
def test_calls_are_read_as_the_template_writes_them(family: Family, tmp_path: Path) -> None:
    tokenizer = Tokenizer(family.write(tmp_path))
    form = find_format("auto", tokenizer.template_source)
    assert form == SHIPPED.get(family.name, family.name.split()[0])
    calls = CALLS[:1] if family.name in ONE_CALL else CALLS
    written = [{"type": "function", "function": {"name": one.name, "arguments": one.arguments}} for one in calls]
    question: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    renderer = ChatRenderer(tokenizer)
    for answer in (
        {"role": "assistant", "content": "", "tool_calls": written},
        {"role": "assistant", "content": "No."},
    ):
        sampled = renderer.answered(question, answer, TOOLS)
        assert sampled is not None
        choice = make_choice(whole(sampled[1]), Call(question, TOOLS), tokenizer, "x", form)
        read = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in choice.calls]
        if "tool_calls" in answer:
            assert read == calls and "".join((choice.message["content"] or "").split()) in ("", "<think></think>")
        else:
            assert not read and str(choice.message["content"]).endswith("No.")
        # Without tools, nothing is a call.
        assert not make_choice(whole(sampled[1]), Call(question), tokenizer, "x", form).calls


def whole(ids: list[int]) -> Completion:
    return Completion(ids, [-0.5] * len(ids), "stop", [VersionSpan("e", 0, 0, len(ids))])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen3_coder", "<tool_call>\nread_file\n</tool_call>"),
        ("glm", "<tool_call></tool_call>"),
        ("deepseek", "<｜tool▁call▁begin｜>read_file<｜tool▁sep｜>{broken<｜tool▁call▁end｜>"),
        ("mistral", "[TOOL_CALLS]read_file[ARGS]3"),
        ("mistral", "[TOOL_CALLS][3]"),
        ("harmony", "<|channel|>commentary to=functions.read_file<|message|>{"),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>{"half": "\\ud800"}'),
    ],
)
def test_broken_calls_are_told_to_the_policy(form: str, text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_tool_calls(text, form)
