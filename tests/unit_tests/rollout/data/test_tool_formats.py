"""How families of models write tool calls: what their templates write is read as it was given, token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chat_families import FAMILIES, Family
from torchtitan.errors import UserError
from torchtitan.inference.types import Completion, VersionSpan
from torchtitan.rollout.conversation.tokenizer import ChatRenderer, Tokenizer
from torchtitan.rollout.conversation.tool_detection import detect_format, refuse_unread_calls
from torchtitan.rollout.conversation.tool_formats.format import ToolCall, UnreadableCall
from torchtitan.rollout.conversation.tool_formats.registry import FORMATS, find_format, parse_tool_calls
from torchtitan.rollout.conversation.turns import TurnReader
from torchtitan.rollout.gateway.calls import Call, make_choice

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
MINIMAX = """{{- '\\n<minimax:tool_call>' if loop.first else '' }}{{- '\\n<invoke name="' + c.name + '">\\n' }}
    {%- for key, value in c.arguments.items() %}
        {{- '<parameter name="' + key + '">' + (value if value is string else value | tojson) + '</parameter>' }}
    {%- endfor %}{{- '\\n</invoke>' + ('\\n</minimax:tool_call>' if loop.last else '') }}"""
GRANITE = """{{- '<|tool_call|>[' if loop.first else ', ' }}
    {{- {'name': c.name, 'arguments': c.arguments} | tojson }}{{- ']' if loop.last else '' }}"""
PHI4_MINI = GRANITE.replace("<|tool_call|>[", "functools[")
PYTHONIC = """{{- BEGIN if loop.first else BETWEEN }}{{- c.name + '(' }}
    {%- for key, value in c.arguments.items() %}
        {{- key + '=' + (value | tojson) + ('' if loop.last else ', ') }}
    {%- endfor %}{{- ')' + (CLOSE if loop.last else '') }}"""
KIMI = """{{- '<|tool_calls_section_begin|>' if loop.first else '' }}
    {{- '<|tool_call_begin|>functions.' + c.name + ':' + (loop.index0 | string) + '<|tool_call_argument_begin|>' }}
    {{- (c.arguments | tojson) + '<|tool_call_end|>' + ('<|tool_calls_section_end|>' if loop.last else '') }}"""
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


def pythonic(begin: str, between: str, close: str) -> str:
    """As templates write calls in Python's form."""
    return PYTHONIC.replace("BEGIN", f"'{begin}'").replace("BETWEEN", f"'{between}'").replace("CLOSE", f"'{close}'")


def family(name: str, call: str, end: str, special: tuple[str, ...] = ()) -> Family:
    """`special` are added to its tokens."""
    return Family(name, FRAME.replace("CALL", call).replace("END", f"'{end}'"), (end,), end, end, stops=special)


MARKS = tuple(f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
OTHERS = [
    family("qwen3_coder", CODER, "<|im_end|>"),
    family("deepseek v3", DEEPSEEK.replace("WRITTEN", V3), "<｜end▁of▁sentence｜>", MARKS),
    family("deepseek v3.1", DEEPSEEK.replace("WRITTEN", V3_1), "<｜end▁of▁sentence｜>", MARKS),
    family("mistral", MISTRAL, "</s>", ("[TOOL_CALLS]", "[ARGS]")),
    family("mistral list", MISTRAL_LIST, "</s>", ("[TOOL_CALLS]", "[ARGS]")),
    family("minimax_m2", MINIMAX, "[e~[", ("<minimax:tool_call>", "</minimax:tool_call>")),
    family("granite", GRANITE, "<|end_of_text|>", ("<|tool_call|>",)),
    family("phi4_mini", PHI4_MINI, "<|end|>"),
    family("olmo3", pythonic("<function_calls>", "\\n", "</function_calls>"), "<|im_end|>"),
    family(
        "lfm2",
        pythonic("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        "<|im_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    family(
        "kimi_k2",
        KIMI,
        "<|im_end|>",
        tuple(
            f"<|tool_call{tail}|>" for tail in ("s_section_begin", "_begin", "_argument_begin", "_end", "s_section_end")
        ),
    ),
    Family("harmony", HARMONY, ("<|return|>", "<|call|>"), "<|return|>", "<|call|>"),
]
SHIPPED = {"qwen2.5": "hermes", "qwen3": "hermes", "llama3.1": "hermes", "glm4.5": "glm"}
ONE_CALL = ("llama3.1", "harmony")

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "array"},
        "depth": {"type": "integer"},
        "sure": {"type": "boolean"},
        "share": {"type": "number"},
    },
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
    "family", [*OTHERS, *(family for family in FAMILIES if family.name in SHIPPED)], ids=lambda family: family.name
)
def test_calls_are_read_as_the_template_writes_them(family: Family, tmp_path: Path) -> None:
    tokenizer = Tokenizer(family.write(tmp_path))
    form = detect_format("auto", tokenizer)
    assert form == SHIPPED.get(family.name, family.name.split()[0])
    calls = CALLS[:1] if family.name in ONE_CALL else CALLS
    written = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    question: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    renderer = ChatRenderer(tokenizer)
    for answer in (
        {"role": "assistant", "content": "", "tool_calls": written},
        {"role": "assistant", "content": "No."},
    ):
        sampled = renderer.answered(question, answer, TOOLS)
        assert sampled is not None
        choice = make_choice(whole(sampled[1]), Call(question, TOOLS), tokenizer, "x", form)
        read = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in choice.calls]
        if "tool_calls" in answer:
            assert read == calls and "".join((choice.message["content"] or "").split()) in ("", "<think></think>")
        else:
            assert not read and str(choice.message["content"]).endswith("No.")
        # Without tools, nothing is a call.
        assert not make_choice(whole(sampled[1]), Call(question), tokenizer, "x", form).calls


def whole(ids: list[int]) -> Completion:
    return Completion(ids, [-0.5] * len(ids), "stop", [VersionSpan("e", 0, 0, len(ids))])


# Templates of formats that nothing here reads: Command A's, and one with an unusual mark.
UNREAD = {
    "command": """{{- '<|ACTION|>[{"tool_name": "' + c.name + '", "parameters": ' }}
        {{- (c.arguments | tojson) + '}]<|NOITCA|>' }}""",
    "own": "{{- '§' + c.name + '§' + (c.arguments | tojson) }}",
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_template_whose_calls_nothing_reads_is_refused_unless_a_parser_is_named(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(family(name, UNREAD[name], "<|im_end|>").write(tmp_path))
    with pytest.raises(UserError, match=r"writes calls of tools as .*look.* set environment.tool_parser"):
        refuse_unread_calls("auto", tokenizer)
    refuse_unread_calls("hermes", tokenizer)
    assert detect_format("auto", tokenizer) == "hermes"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_templates_of_known_families_are_not_refused(family: Family, tmp_path: Path) -> None:
    refuse_unread_calls("auto", Tokenizer(family.write(tmp_path)))


@pytest.mark.parametrize(("call", "form"), [(MINIMAX, "minimax_m2"), (UNREAD["own"], "")])
def test_a_template_that_opens_a_thought_shows_its_format_too(call: str, form: str, tmp_path: Path) -> None:
    """Where its prompt ends with <think>, an answer without a thought does not begin where the prompt ends."""
    thinking = family("thinking", call, "<|im_end|>")
    prompt_end = "assistant\\n"
    begin, _, end = thinking.template.rpartition(prompt_end)
    template = f"{begin}{prompt_end}<think>\\n{end}"
    tokenizer = Tokenizer(replace(thinking, template=template).write(tmp_path))
    assert tokenizer.render_chat([{"role": "user", "content": "?"}]).endswith("<think>\n")
    if form:
        assert detect_format("auto", tokenizer) == form
        refuse_unread_calls("auto", tokenizer)
    else:
        with pytest.raises(UserError, match="writes calls of tools as"):
            refuse_unread_calls("auto", tokenizer)


def test_a_template_shows_its_format_by_what_it_writes_not_by_what_it_mentions(tmp_path: Path) -> None:
    """The prompt of a model may speak of another format, as an instruction or a comment."""
    mentions = CODER.replace("{{-", "{#- not [TOOL_CALLS] as others #}{{-", 1)
    tokenizer = Tokenizer(family("qwen3_coder", mentions, "<|im_end|>").write(tmp_path))
    assert find_format("auto", tokenizer.template_source) == "mistral"
    assert detect_format("auto", tokenizer) == "qwen3_coder"
    refuse_unread_calls("auto", tokenizer)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen3_coder", "<tool_call>\nread_file\n</tool_call>"),
        ("glm", "<tool_call></tool_call>"),
        ("deepseek", "<｜tool▁call▁begin｜>read_file<｜tool▁sep｜>{broken<｜tool▁call▁end｜>"),
        ("mistral", "[TOOL_CALLS]read_file[ARGS]3"),
        ("minimax_m2", "<minimax:tool_call>\n<tool_name>f</tool_name>\n</minimax:tool_call>"),
        ("minimax_m2", '<invoke name="f"><parameter name="x">a'),
        ("granite", '<|tool_call|>{"name": 3}'),
        ("granite", "<|tool_call|>read_file"),
        ("granite", "<|tool_call|>[]"),
        ("phi4_mini", 'functools[{"name": "f", "arguments": "{}"}]'),
        ("phi4_mini", '[{"name": "f"}]<|/tool_call|>'),
        ("olmo3", "<function_calls>read_file</function_calls>"),
        ("olmo3", "read_file(path=1)</function_calls>"),
        ("olmo3", "<function_calls>f(1)</function_calls>"),
        ("olmo3", "<function_calls></function_calls>"),
        ("lfm2", "<|tool_call_start|>[f(x=g())]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x=1e999)]"),
        ("lfm2", '<|tool_call_start|>[f(x="a, y=1)]<|tool_call_end|>'),
        ("lfm2", "[f(x=1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x=1, x=2)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>f x<|tool_call_end|>"),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>3<|tool_call_end|>"),
        ("kimi_k2", '<|tool_call_begin|>functions.f:0{"x": 1}<|tool_call_end|>'),
        ("kimi_k2", "x<|tool_call_end|>"),
        ("mistral", "[TOOL_CALLS][3]"),
        ("harmony", "<|channel|>commentary to=functions.read_file<|message|>{"),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>{"half": "\\ud800"}'),
    ],
)
def test_broken_calls_are_told_to_the_policy(form: str, text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_tool_calls(text, form)


# How each registered format writes a call, and thoughts as its models write them.
WRITERS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "hermes": lambda name, arguments: (
        f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(arguments)}}}\n</tool_call>'
    ),
    "qwen3_coder": lambda name, arguments: (
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
    ),
    "glm": lambda name, arguments: (
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in arguments.items()
        )
        + "</tool_call>"
    ),
    "deepseek": lambda name, arguments: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "mistral": lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}",
    "minimax_m2": lambda name, arguments: (
        f'<minimax:tool_call>\n<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{as_text(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n</minimax:tool_call>"
    ),
    "granite": lambda name, arguments: f"<|tool_call|>{dumps([{'name': name, 'arguments': arguments}])}",
    "phi4_mini": lambda name, arguments: f"functools{dumps([{'name': name, 'arguments': arguments}])}",
    "olmo3": lambda name, arguments: f"<function_calls>{in_python(name, arguments)}</function_calls>",
    "lfm2": lambda name, arguments: f"<|tool_call_start|>[{in_python(name, arguments)}]<|tool_call_end|>",
    "kimi_k2": lambda name, arguments: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
        f"{dumps(arguments)}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "harmony": lambda name, arguments: (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
        f"<|message|>{dumps(arguments)}<|call|>"
    ),
}
THOUGHTS = {
    "mistral": [("[THINK]", "[/THINK]"), ("<think>", "</think>")],
    "harmony": [("<|channel|>analysis<|message|>", "<|end|>")],
}
# Text that a format might take for its own: all tags and marks, as they stand in code about agents.
AWKWARD = [
    "a </tool_call> b", "<tool_call>", "if x </parameter> y", "<function=f>", "</arg_value>x", "[TOOL_CALLS]g[ARGS]{}",
    "</invoke> x", '<invoke name="f">', "a </function_calls>", "x <|tool_call_end|>", "functools[1]", "f(x=1), g(y=2)",
    "<think>", "a </think> b", 'say "hi" \\ {}', "line\nbreak\n", "\n", "", "123", "true", "None", "日本 🙂", "}]}",
]  # fmt: skip


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_is_read_whatever_its_arguments_say(form: str) -> None:
    for text in AWKWARD:
        arguments = {"path": text, "depth": -7, "lines": [text, {"to": None}], "sure": True, "share": 0.5}
        called = WRITERS[form]("read_file", arguments)
        assert parse_tool_calls(called, form, TOOLS) == ("", [ToolCall("read_file", arguments)]), text
    if form != "harmony":  # which ends a turn with a call
        two = WRITERS[form]("read_file", {"path": "a"}) + "\n" + WRITERS[form]("list-all", {})
        assert parse_tool_calls(f"I look.\n{two}", form, TOOLS) == (
            "I look.", [ToolCall("read_file", {"path": "a"}), ToolCall("list-all", {})],
        )  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_in_a_thought_is_none(form: str) -> None:
    wanted, real = WRITERS[form]("read_file", {"depth": 1000}), WRITERS[form]("read_file", {"depth": 1})
    for opening, closing in THOUGHTS.get(form, [("<think>", "</think>")]):
        inside = f"I could {wanted.rpartition('<|message|>')[2].replace('<|call|>', '')}"
        assert parse_tool_calls(f"{opening}{inside}{closing}", form, TOOLS)[1] == []
        assert parse_tool_calls(f"{opening}{inside}", form, TOOLS)[1] == []
        (call,) = parse_tool_calls(f"{opening}{inside}{closing}{real}", form, TOOLS)[1]
        assert call.arguments == {"depth": 1}
        # The prompt has opened the thought.
        assert FORMATS[form].read(inside, opening, TOOLS).calls == []
        (call,) = FORMATS[form].read(f"{inside}{closing}{real}", opening, TOOLS).calls
        assert call.arguments == {"depth": 1}
        if form != "harmony":  # nothing shows that a thought began with the turn, but its end
            (call,) = parse_tool_calls(f"{inside}{closing}{real}", form, TOOLS)[1]
            assert call.arguments == {"depth": 1}


def test_a_call_from_the_channel_of_thoughts_is_none_or_is_told() -> None:
    in_thoughts = WRITERS["harmony"]("read_file", {"depth": 1000}).replace("commentary", "analysis")
    real = WRITERS["harmony"]("read_file", {"depth": 1})
    (call,) = parse_tool_calls(in_thoughts.replace("<|call|>", "<|end|>") + real, "harmony", TOOLS)[1]
    assert call.arguments == {"depth": 1}
    with pytest.raises(ValueError, match="must be in the channel commentary"):
        parse_tool_calls(in_thoughts, "harmony", TOOLS)


@pytest.mark.parametrize("form", FORMATS)
def test_text_without_a_call_stays_text(form: str) -> None:
    for text in ("", "No.", '{"answer": 3}', "a < b > c [1] {2}", "\n  x\n"):
        assert parse_tool_calls(text, form, TOOLS) == (text, [])


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_that_breaks_off_is_told_and_the_others_are_kept(form: str) -> None:
    whole = WRITERS[form]("read_file", {"path": "a b"})
    broken = whole.replace("a b", 'a "b').partition('b"')[0] if '"a b"' in whole else whole.partition("a b")[0] + "a"
    with pytest.raises(ValueError, match="must be"):
        parse_tool_calls(broken, form, TOOLS)
    calls = FORMATS[form].read(whole + broken, tools=TOOLS).calls
    assert calls[0] == ToolCall("read_file", {"path": "a b"}) and isinstance(calls[-1], UnreadableCall)


@pytest.mark.parametrize("form", FORMATS)
def test_a_template_shows_its_format(form: str) -> None:
    assert find_format("auto", f"{{{{ x }}}} {FORMATS[form].template_mark}") == form
    assert find_format(form, "") == form


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "123", "123"), ({"type": "string"}, "True", "True"), ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "3.0", 3), ({"type": "integer"}, "3.5", "3.5"), ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "60.0", 60.0), ({"type": "number"}, " 2 ", 2), ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"), ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False), ({"type": "boolean"}, "1", "1"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", "None"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "boolean"}, {"type": "array"}]}, "False", False), ({"type": ["integer", "null"]}, "3", 3),
        ({"type": "array"}, "[{'x': True}]", [{"x": True}]), ({"type": "array"}, '["a"]', ["a"]),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}), ({"type": "object"}, "[1]", "[1]"),
        ({"enum": [1, 2]}, "2", 2), ({"enum": ["a", 1]}, "a", "a"), ({"const": 5}, "5", 5),
        ({"type": "string", "enum": ["1", "2"]}, "1", "1"), ({"$ref": "#/$defs/Level"}, "4", 4),
        ({"allOf": [{"$ref": "#/$defs/Level"}]}, "4", 4), ({"$ref": "#/$defs/Loop"}, "4", "4"), ({}, "[1]", [1]),
        ({}, "word", "word"), (None, "5", "5"),
        # Schemas that are none.
        ({"anyOf": 5, "type": {"a": 1}}, "5", "5"), ([], "5", "5"), ({"type": ["integer", {}]}, "5", 5),
        ({"enum": 3, "type": "integer"}, "5", 5), ({"$ref": "#/$defs/no"}, "5", "5"),
        ({"$ref": "#/$defs/Many"}, "5", 5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["qwen3_coder", "glm"])
def test_arguments_have_the_types_of_the_schema(form: str, schema: Any, text: str, value: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {} if schema is None else {"x": schema},
        "$defs": {"Level": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}, "Many": MANY},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    (call,) = parse_tool_calls(WRITERS[form]("f", {"x": text}), form, tools)[1]
    assert call.arguments == {"x": value} and type(call.arguments["x"]) is type(value)


# Each reference is followed once.
MANY = {"anyOf": [{"type": "integer"}, *({"$ref": "#/$defs/Many"},) * 20]}
CODER_BEGIN, CODER_END = "<function=f>\n<parameter=", "</function>\n</tool_call>"
GLM_BEGIN = "f\n<arg_key>depth</arg_key>\n<arg_value>"


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        # Closing tags that a policy forgets.
        ("qwen3_coder", f"{CODER_BEGIN}depth>\n3\n{CODER_END}", {"depth": 3}),
        ("qwen3_coder", f"{CODER_BEGIN}depth>\n3\n<parameter=path>\nhi\n</parameter>\n{CODER_END}",
         {"depth": 3, "path": "hi"}),
        ("qwen3_coder", f"{CODER_BEGIN}path>\na\n</parameter>\n</tool_call>", {"path": "a"}),
        ("qwen3_coder", f"{CODER_BEGIN}path>\na\n</parameter>", {"path": "a"}),
        ("qwen3_coder", f"{CODER_BEGIN}depth>3<parameter=path>hi</parameter></function>", {"depth": 3, "path": "hi"}),
        ("qwen3_coder", f"{CODER_BEGIN}path>\na\n", None),
        ("qwen3_coder", f"{CODER_BEGIN}path>\na</parameter>\n<parameter=path>\nb\n</parameter>\n{CODER_END}", None),
        ("qwen3_coder", f"{CODER_BEGIN}path>\na</parameter>\n{CODER_END} b\n</parameter>\n{CODER_END}", None),
        ("qwen3_coder", '{"name": "f", "arguments": {}}</tool_call>', None),
        ("glm", f"{GLM_BEGIN}3\n<arg_key>path</arg_key>\n<arg_value>hi</arg_value>\n</tool_call>",
         {"depth": 3, "path": "hi"}),
        ("glm", f"{GLM_BEGIN}3\n</tool_call>", {"depth": 3}),
        ("glm", f"{GLM_BEGIN}3", None),
        ("hermes", '{"name": "f", "arguments": {"path": "line\nbreak"}}', {"path": "line\nbreak"}),
        ("hermes", '{"name": "f", "arguments": {"depth": NaN}}</tool_call>', None),
        ("hermes", '{"name": "f", "arguments": {"depth": 1e999}}</tool_call>', None),
        ("hermes", '{"name": "f", "arguments": {}}\n{"name": "f", "arguments": {}}</tool_call>', None),
        ("hermes", '{"name": "f", "arguments": "{}"}</tool_call>', None),
    ],
)  # fmt: skip
def test_calls_with_faults_are_read_or_told(form: str, text: str, arguments: dict[str, Any] | None) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    if arguments is None:
        with pytest.raises(ValueError, match="must be"):
            parse_tool_calls(f"<tool_call>{text}", form, tools)
    else:
        assert parse_tool_calls(f"<tool_call>{text}", form, tools) == ("", [ToolCall("f", arguments)])


@pytest.mark.parametrize("between", ["", " ", " \n"])
def test_a_blank_before_the_object_of_a_mistral_call_is_no_name(between: str) -> None:
    text = f'[TOOL_CALLS]{between}{{"name": "f", "arguments": {{"path": "a"}}}}'
    assert parse_tool_calls(text, "mistral", TOOLS) == ("", [ToolCall("f", {"path": "a"})])
    text = f'[TOOL_CALLS]{between}f{between}[ARGS]{{"path": "a"}}'
    assert parse_tool_calls(text, "mistral", TOOLS) == ("", [ToolCall("f", {"path": "a"})])


class Counting:
    """A pattern that counts the characters it is searched through."""

    def __init__(self, pattern: re.Pattern[str]):
        self.pattern, self.searched = pattern, 0

    def finditer(self, text: str, begin: int = 0) -> Iterator[re.Match[str]]:
        place = begin
        for found in self.pattern.finditer(text, begin):
            self.searched += found.end() - place
            place = found.end()
            yield found
        self.searched += len(text) - place


@pytest.mark.parametrize(
    ("first", "end", "read"),
    [
        ("a>\nx\n</function>\n</tool_call>", "", True),
        ("a>x</parameter> t </function></tool_call>", "", True),
        ("a>x</tool_call>", "", True),
        ("a>x</tool_call>", "</parameter><parameter=a>y", False),
    ],
)
def test_calls_without_closing_tags_take_linear_time(
    first: str, end: str, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMATS["qwen3_coder"]
    counting = Counting(form._bounds)  # type: ignore[attr-defined]
    monkeypatch.setattr(form, "_bounds", counting)
    text = f"<tool_call><function=f><parameter={first} text " * 100 + end
    calls = form.read(text).calls
    assert len(calls) == (100 if read else 1)
    assert all(isinstance(call, ToolCall) == read for call in calls)
    assert counting.searched <= 4 * len(text)


def test_a_value_without_a_closing_tag_ends_before_the_next_call() -> None:
    text = f"<tool_call>{CODER_BEGIN}path>\na\n{CODER_END}\nand\n<tool_call>{CODER_BEGIN}depth>\n3\n{CODER_END} done"
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    assert FORMATS["qwen3_coder"].read(text, tools=tools).calls == [
        ToolCall("f", {"path": "a"}), ToolCall("f", {"depth": 3})
    ]  # fmt: skip


def test_a_closing_tag_alone_is_told() -> None:
    for form in ("hermes", "qwen3_coder", "glm"):
        with pytest.raises(ValueError, match="must be"):
            parse_tool_calls('{"name": "f"}\n</tool_call>', form, TOOLS)


def test_text_that_spells_a_mark_is_no_mark(tmp_path: Path) -> None:
    """The tokens of `[TOOL_CALLS]` and `[THINK]` count, not a text with the same characters."""
    marks = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
    tokenizer = Tokenizer(family("mistral", MISTRAL, "</s>", marks).write(tmp_path))
    reader = TurnReader(tokenizer, "mistral")
    spelled = [token for letter in "[THINK]a[/THINK] [TOOL_CALLS]f[ARGS]{}" for token in tokenizer.encode(letter)]
    turn = reader.read([], spelled, TOOLS)
    assert (turn.calls, turn.thought) == ([], None)
    assert turn.shown(reader.hidden) == turn.final_text == "[THINK]a[/THINK] [TOOL_CALLS]f[ARGS]{}"
    called = [*tokenizer.encode('[TOOL_CALLS]f[ARGS]{"path": "'), *spelled, *tokenizer.encode('"}')]
    (call,) = reader.read([], called, TOOLS).calls
    assert call == ToolCall("f", {"path": "[THINK]a[/THINK] [TOOL_CALLS]f[ARGS]{}"})


ONE = ToolCall("f", {"path": "a"})


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"path": "a"}}, {"name": "f", "arguments": {"path'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"path": "a"}}, {"name": 3}]'),
        ("phi4_mini", 'functools[{"name": "f", "arguments": {"path": "a"}}, {"name": "f", "arguments": "{}"}]'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"path": "a"}}, {"name": "g"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"path": "a"}}</tool_call><tool_call>{"name": </tool_call>'),
        ("olmo3", "<function_calls>f(path='a')\nf(path=)\n</function_calls>"),
        ("lfm2", "<|tool_call_start|>[f(path='a'), f(path=x)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(path='a'), f(path='x]<|tool_call_end|>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="path">a</parameter></invoke>'
                       '<invoke nam="g"></invoke></minimax:tool_call>'),
        ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>'
                    '{"path": "a"}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"x"'
                    '<|tool_call_end|><|tool_calls_section_end|>'),
    ],
)  # fmt: skip
def test_of_two_calls_the_readable_one_is_kept_and_the_other_is_told(form: str, text: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    read, other = FORMATS[form].read(text, tools=tools).calls
    assert read == ONE and isinstance(other, UnreadableCall)


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("lfm2", """<|tool_call_start|>[f(a="x, y)", b='<|tool_call_end|>', c=[1, {"d": None}], e=-1.5)]""",
         {"a": "x, y)", "b": "<|tool_call_end|>", "c": [1, {"d": None}], "e": -1.5}),
        ("lfm2", "<|tool_call_start|>f(from=true, to=null)<|tool_call_end|>", {"from": True, "to": None}),
        ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": {"a": 1}}]<|tool_call_end|>', {"a": 1}),
        ("olmo3", '<function_calls>\nf(a="line\nbreak", b={"c": true})\n</function_calls>',
         {"a": "line\nbreak", "b": {"c": True}}),
        ("granite", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]', {"a": 1}),
        ("phi4_mini", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', {"a": 1}),
        ("kimi_k2", '<|tool_call_begin|>f:12<|tool_call_argument_begin|>{"a": 1}', {"a": 1}),
        ("kimi_k2", '<|tool_calls_section_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
                    "<|tool_calls_section_end|>", {"a": 1}),
        ("minimax_m2", '<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>', {"a": 1}),
    ],
)  # fmt: skip
def test_calls_are_read_in_the_other_ways_in_which_their_models_write_them(
    form: str, text: str, arguments: dict[str, Any]
) -> None:
    parameters = {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert parse_tool_calls(text, form, tools) == ("", [ToolCall("f", arguments)])


@pytest.mark.parametrize(
    ("form", "text", "call_id"),
    [
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "a1B2c3D4e"}]', "a1B2c3D4e"),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}", "a1B2c3D4e"),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]a b"[ARGS]{}', None),
        ("kimi_k2", "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>", "functions.f:7"),
    ],
)
def test_an_id_that_the_policy_wrote_is_that_of_its_call(form: str, text: str, call_id: str | None) -> None:
    (call,) = FORMATS[form].read(text, tools=TOOLS).calls
    assert call == ToolCall("f", {}) and getattr(call, "id", None) == call_id
