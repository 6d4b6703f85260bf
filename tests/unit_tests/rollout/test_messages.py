"""Messages and chat templates as checkpoints and datasets have them, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chat_families import GLM4MOE, QWEN3, Family
from torchtitan.errors import UserError
from torchtitan.rollout.conversation.messages import THOUGHTS, plain_message, read_chat, read_message
from torchtitan.rollout.conversation.tokenizer import ChatRenderer, Tokenizer

ASK: dict[str, Any] = {"role": "user", "content": "2+2?"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# As gpt-oss', which reads `thinking`, and Gemma 4's and Magistral's, which read two keys and parts of the content.
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and m.content and m.tool_calls %}"
    "{{ raise_exception('one or the other') }}{% endif %}{% if 'thinking' in m and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TWO_KEYS = PLAIN.replace("{{ m.content }}", "{{ m.get('reasoning') or m.get('reasoning_content') }}|{{ m.content }}")
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif"
    " %}</s>{% endfor %}"
)


def tokenizer_of(folder: Path, template: str) -> Tokenizer:
    return Tokenizer(Family("", template, ("<|im_end|>",), "<|im_end|>").write(folder))


@pytest.mark.parametrize("key", THOUGHTS)
@pytest.mark.parametrize("template", [GPT_OSS, QWEN3, GLM4MOE, TWO_KEYS], ids=["gpt_oss", "qwen3", "glm4_moe", "both"])
def test_a_thought_is_rendered_as_transformers_does(tmp_path: Path, template: str, key: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    messages = [ASK, {"role": "assistant", "content": "4", key: "two and two"}]
    text = tokenizer_of(tmp_path, template).render_chat([plain_message(message) for message in messages], False)
    assert text.count("two and two") == 1
    assert text == transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("key", THOUGHTS)
def test_a_thought_becomes_a_part_where_the_template_reads_parts(tmp_path: Path, key: str) -> None:
    message = plain_message({"role": "assistant", "content": "4", key: "so"})
    text = tokenizer_of(tmp_path, PARTS).render_chat([ASK, message])
    assert text == "[user]2+2?</s>[assistant][THINK]so[/THINK]4</s>"


@pytest.mark.parametrize("form", ["settings", "files"])
def test_a_named_template_is_chosen_as_transformers_does(tmp_path: Path, form: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer_of(tmp_path, "unread")
    named = {"default": PLAIN, "tool_use": "{{ tools | tojson }}{{ citations }}" + PLAIN, "rag": "R"}
    if form == "settings":
        (tmp_path / "chat_template.jinja").unlink()
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    else:
        (tmp_path / "chat_template.jinja").write_text(named.pop("default"))
        (tmp_path / "additional_chat_templates").mkdir()
        for name, text in named.items():
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    ours, reference = Tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for tools in ([], [TOOL]):
        expected = reference.apply_chat_template([ASK], tools=tools or None, tokenize=False)
        assert ours.decode(ChatRenderer(ours).render_prompt([ASK], tools), skip_special=False) == expected
    assert ours.template_source.startswith("{{ tools"), "tool calls have the format of the template that writes tools"
    Tokenizer(tmp_path, {"citations": "on"})
    with pytest.raises(UserError, match="names other, which the chat template .* it reads citations, messages, tools"):
        Tokenizer(tmp_path, {"other": 1})


def test_templates_without_a_default_are_named(tmp_path: Path) -> None:
    tokenizer_of(tmp_path, "")
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("rag", "tool_use"):
        (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(PLAIN)
    ours = Tokenizer(tmp_path)
    assert ours.has_chat_template and ours.render_chat([ASK], tools=[TOOL])
    with pytest.raises(UserError, match="has the chat templates rag, tool_use, but none is called default: write the"):
        ours.render_chat([ASK])


CALL = {"name": "add", "arguments": {"a": 1}}
SO = {"type": "thinking", "thinking": "so"}


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        ({"content": "4", "reasoning": "so", "thinking": None}, {"content": "4", "reasoning_content": "so"}),
        ({"content": "4", "reasoning": "so", "thinking": "so\n"}, {"content": "4", "reasoning_content": "so"}),
        ({"content": "4", "thinking": ""}, {"content": "4", "reasoning_content": ""}),
        ({"content": "4", "thinking": True}, {"content": "4", "thinking": True}),
        ({"content": [SO, {"type": "text", "text": "4"}]}, {"content": "4", "reasoning_content": "so"}),
        ({"content": [{"type": "reasoning", "text": "so"}, "4"]}, {"content": "4", "reasoning_content": "so"}),
        (
            {"content": [SO | {"thinking": [{"text": "so"}]}]},
            {"content": "", "reasoning_content": "so"},
        ),
        ({"content": None, "function_call": CALL}, {"content": "", "tool_calls": [CALL]}),
        ({"content": "", "tool_calls": json.dumps([CALL])}, {"content": "", "tool_calls": [CALL]}),
        ({"content": "4", "function_call": None, "tool_calls": []}, {"content": "4"}),
    ],
)
def test_other_spellings_of_a_message(message: dict[str, Any], plain: dict[str, Any]) -> None:
    assert plain_message({"role": "assistant", **message}) == {"role": "assistant", **plain}


def test_a_null_in_a_call_is_dropped_from_a_data_set_and_kept_from_a_program() -> None:
    calls = [{"id": None, "function": {"name": "f", "arguments": {"a": None, "b": [{"c": None}]}}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls, "name": None}
    for read, arguments in ((plain_message, {"b": [{}]}), (read_message, calls[0]["function"]["arguments"])):
        function = {"name": "f", "arguments": arguments}
        assert read(message) == {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": "4", "reasoning": "so", "thinking": "not so"}, "thoughts that differ, in reasoning, thinking"),
        ({"content": [SO], "reasoning_content": "no"}, "thoughts that differ"),
        ({"content": "4", "reasoning": {"summary": "so"}}, "reasoning must be text"),
        (
            {"content": [{"type": "image", "image": "x"}]},
            "text only: .* content must be text, but a part is of type 'image'",
        ),
        ({"content": {"text": "4"}}, "content must be text"),
        ({"content": "", "tool_calls": [CALL], "function_call": CALL}, "keep one"),
        ({"content": [SO], "role": "user"}, "role 'user' has a thought"),
        ({"content": "4", "role": None}, "needs the keys 'role' and 'content'"),
    ],
)
def test_messages_that_cannot_be_read(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        plain_message({"role": "assistant", **message})


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (json.dumps([ASK]), [ASK]),
        (json.dumps([{"content": "x", "role": "user"}], indent=1), [{"content": "x", "role": "user"}]),
        ([json.dumps(ASK)], [ASK]),
        ([ASK], [ASK]),
        ("[1, 2]", "[1, 2]"),
        ('[{"a": 1}] is JSON', '[{"a": 1}] is JSON'),
        ("What is [{role}]?", "What is [{role}]?"),
        (None, None),
    ],
)
def test_messages_that_are_stored_as_json_text(value: Any, read: Any) -> None:
    assert read_chat(value) == read


@pytest.mark.parametrize("text", [str([ASK]), json.dumps([ASK])[:-1]])
def test_text_that_is_nearly_chat_messages_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="text that looks like chat messages is no JSON"):
        read_chat(text)
