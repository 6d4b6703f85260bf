"""What of a row is said to the policy, and what it is to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chat_families import GLM4MOE, QWEN3
from tests.chat_models import CHAT_TEMPLATE, write_chat_tokenizer
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.demonstrations import Demonstration, DemonstrationMaker, Demonstrations
from torchtitan.rollout.data.job_rows import load_datasets
from torchtitan.rollout.data.rows import load_rows

ASK = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
HI, YES, MORE = (
    {"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Yes"), ("user", "?"))
)
# As Qwen3's: of what was said before the last question, the thoughts are left out.
FORGETS = "if '</think>' in said and not loop.last"


def make(folder: Path, row: dict[str, Any], template: str = CHAT_TEMPLATE, **sft: Any) -> list[list[tuple[str, bool]]]:
    """Of every branch, its parts and whether they are trained."""
    tokenizer = Tokenizer(write_chat_tokenizer(folder, template))
    config = JobConfig()
    config.rollout.prompt_column = "messages" if "messages" in row else "prompt"
    vars(config.sft).update(sft)
    made: Demonstration = DemonstrationMaker(config, tokenizer).make(row, 0)
    branches = made.branches
    for branch in branches:
        assert all(len(completion.log_probs) == len(completion.token_ids) for completion in branch.sampled)
    return [
        [(tokenizer.decode(part.token_ids, skip_special=False), part in branch.sampled) for part in branch.segments]
        for branch in branches
    ]


def test_text_ends_with_the_end_token_and_prompts_are_given(tmp_path: Path) -> None:
    row = {"prompt": "2+2=", "completion": "4"}
    assert make(tmp_path, row) == [[("2+2=", False), ("4<|im_end|>", True)]]
    assert make(tmp_path, row, loss_on="all") == [[("2", False), ("+2=4<|im_end|>", True)]]


@pytest.mark.parametrize("completion", ["Yes", [YES]])
def test_of_a_chat_with_a_completion_that_is_trained(tmp_path: Path, completion: Any) -> None:
    row = {"prompt": [HI, YES, MORE], "completion": completion}
    ((given, answer),) = make(tmp_path, row)
    assert given == (ASK + "Yes<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n", False)
    assert answer == ("Yes<|im_end|>", True)


def test_of_a_conversation_all_that_the_assistant_says_is_trained(tmp_path: Path) -> None:
    between = "\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    expected = [(ASK, False), ("Yes<|im_end|>", True), (between, False), ("Yes<|im_end|>", True)]
    assert make(tmp_path, {"messages": [HI, YES, MORE, YES, MORE]}) == [expected]


def test_a_greeting_is_given(tmp_path: Path) -> None:
    """Templates need not be able to write the prompt of a first answer, which has no message."""
    ((given, answer),) = make(tmp_path, {"messages": [YES, HI, YES]}, "{{- messages[0].role }}" + CHAT_TEMPLATE)
    assert given[0].count("Yes") == 1 and answer == ("Yes<|im_end|>", True)


def test_other_forms_of_the_same_conversation(tmp_path: Path) -> None:
    """As the OpenAI API and parquet files have them; a template prints what it is given."""
    call = {"name": "look", "arguments": {"at": "é"}}
    plain: list[Any] = [HI, {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}, MORE, YES]
    other: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "tool_calls": None, "name": None},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {**call, "arguments": '{"at": "é"}'}}]},
        {**MORE, "tool_calls": []},
        YES,
    ]
    # As in Llama 3's, the key alone makes a call.
    template = "{% if messages[-1].tool_calls is defined %}{{ raise_exception('a call') }}{% endif %}" + CHAT_TEMPLATE
    expected = make(tmp_path, {"messages": plain})
    assert expected[0][1][0] == f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call><|im_end|>"
    assert make(tmp_path, {"messages": other}) == expected
    assert make(tmp_path, {"prompt": other[:3], "completion": other[3:]}, template)[0][-1] == expected[0][-1]
    config = JobConfig()
    config.job.stage = "sft"
    config.rollout.dataset = config.eval.dataset = str(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": other[:3], "completion": other[3:]}))
    assert len(load_datasets(config)[0]) == 1


@pytest.mark.parametrize("stage", ["sft", "grpo"])
@pytest.mark.parametrize("row", [{"prompt": [HI, YES, MORE], "completion": [YES]}, {"prompt": [HI], "completion": "a"}])
def test_messages_may_be_json_text_as_tools_may(tmp_path: Path, row: dict[str, Any], stage: str) -> None:
    config = JobConfig()
    config.job.stage, config.rewards.functions = stage, []
    loaded = []
    for form in (lambda value: value, json.dumps, lambda value: [json.dumps(message) for message in value]):
        texts = {column: form(value) if isinstance(value, list) else value for column, value in row.items()}
        config.rollout.dataset = config.eval.dataset = str(tmp_path / "rows.jsonl")
        (tmp_path / "rows.jsonl").write_text(json.dumps(texts))
        loaded += load_datasets(config)
    prompts = [rows[0]["prompt"] for rows in loaded]
    assert prompts == [row["prompt"]] * 6
    if stage == "sft":
        assert [rows[0]["completion"] for rows in loaded] == [row["completion"]] * 6


@pytest.mark.parametrize("form", ["objects", "texts", "text"])
def test_tools_and_arguments_as_a_parquet_file_has_them(tmp_path: Path, form: str) -> None:
    """An arrow column has one schema: of all rows' keys, those that a row lacks are null there."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    talks, tools = [], []
    for name, arguments in (("look", {"at": "é"}), ("wait", {"seconds": 3})):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        talks.append([HI, {"role": "assistant", "content": "", "tool_calls": [call]}])
        properties = {argument: {"type": "string"} for argument in arguments}
        tools.append([{"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}])
    forms: dict[str, Any] = {"objects": tools, "texts": [[json.dumps(tool_list[0])] for tool_list in tools]}
    column = forms.get(form) or [json.dumps(tool_list) for tool_list in tools]
    parquet.write_table(pyarrow.table({"messages": talks, "tools": column}), tmp_path / "rows.parquet")
    transformers = pytest.importorskip("transformers")
    for row, messages, given in zip(load_rows(str(tmp_path / "rows.parquet")), talks, tools, strict=True):
        (parts,) = make(tmp_path, row)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        whole = tokenizer.apply_chat_template(messages, tools=given, tokenize=False)
        assert "".join(text for text, _ in parts) == whole.removesuffix("\n")


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": "{}"}])
def test_calls_of_tools_without_parameters(tmp_path: Path, arguments: dict[str, Any]) -> None:
    call = {"type": "function", "function": {"name": "look", **arguments}}
    (parts,) = make(tmp_path, {"messages": [HI, {"role": "assistant", "tool_calls": [call]}]})
    assert parts[1][0] == '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
    del call["function"]["name"]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="with a name and arguments"):
        make(tmp_path, {"messages": [HI, {"role": "assistant", "tool_calls": [call]}]})


def test_turns_whose_past_the_template_rewrites_are_branches(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE.replace("if '</think>' in said", FORGETS)
    thought = {"role": "assistant", "content": "<think>so</think>Yes"}
    first, second = make(tmp_path, {"messages": [HI, thought, MORE, thought]}, template)
    assert first == [(ASK, False), ("<think>so</think>Yes<|im_end|>", True)]
    assert second[0][0].startswith(ASK + "Yes<|im_end|>") and second[1] == ("<think>so</think>Yes<|im_end|>", True)


def test_a_template_that_opens_a_thought_must_find_one(tmp_path: Path) -> None:
    opens = CHAT_TEMPLATE.replace("{{- '<|im_start|>assistant\\n' }}{%- endif %}", "{{- '<|im_start|>A' }}{%- endif %}")
    with pytest.raises(UserError, match=r"demonstration 0: the chat template .*<\|im_start\|>A"):
        make(tmp_path, {"messages": [HI, YES]}, opens)


# As SmolLM2's and Llama 3's, which know neither thoughts nor tools; as Llama 3.1's, which write a call or a text; as
# DeepSeek R1's, which drop a thought before they write the text.
SIMPLE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EITHER = SIMPLE.replace("m.content", "m.tool_calls[0].function.arguments.x if m.tool_calls else m.content | trim")
NAMED_CALLS = SIMPLE.replace("m.content", "m.tool_calls[0].function.name if m.tool_calls else m.content")
FORGETFUL = SIMPLE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
EARLY_END = SIMPLE.replace("{{ m.content }}", "{{ m.reasoning_content }}<|im_end|>{{ m.content }}")
CALL = {"type": "function", "function": {"name": "look", "arguments": {"x": 1}}}


def answer(content: Any = "Yes", **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


@pytest.mark.parametrize(
    ("template", "message", "problem"),
    [
        (SIMPLE, answer(reasoning_content="so"), r"does not write the thought \(reasoning_content, .* of an answer"),
        (SIMPLE, answer(reasoning="so"), "does not write the thought"),
        (SIMPLE, answer(thinking="so"), "does not write the thought"),
        (SIMPLE, answer([{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "Yes"}]), "the thought"),
        (SIMPLE, answer("", tool_calls=[CALL]), r"does not write the call number 1 \(tool_calls\)"),
        (SIMPLE, answer(None, function_call=CALL["function"]), "does not write the call number 1"),
        (SIMPLE, answer("Let me see.", tool_calls=[CALL], reasoning="so"), "the thought .* and the call number 1"),
        (NAMED_CALLS, answer("", tool_calls=[CALL]), "does not write the call number 1"),
        (CHAT_TEMPLATE, answer("", tool_calls=[CALL], thinking="so"), "does not write the thought"),
        (EITHER.replace("arguments.x", "arguments"), answer(tool_calls=[CALL]), "does not write the content"),
        (EITHER.replace("arguments.x", "arguments"), answer("", tool_calls=[CALL, CALL]), "the call number 2"),
        (FORGETFUL, answer("<think>so</think>Yes"), "does not write the thought in the content"),
        (FORGETFUL.replace("</think>", "[/THINK]"), answer("[THINK]so[/THINK]Yes"), "the thought in the content"),
        (EARLY_END, answer(reasoning="so"), r"writes '<\|im_end\|>', which ends a turn, before the end of an answer"),
        (SIMPLE, answer("Yes<|im_end|> no"), "text of an answer goes on behind a token that ends a turn: 'no'"),
    ],
)
def test_an_answer_that_would_be_trained_in_part_is_refused(
    tmp_path: Path, template: str, message: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=f"demonstration 0: .*{problem}"):
        make(tmp_path, {"messages": [HI, message]}, template)


@pytest.mark.parametrize(
    ("template", "message", "text"),
    [
        (SIMPLE, answer(reasoning=None, thinking="", tool_calls=[], function_call=None), "Yes"),
        (SIMPLE, answer("Yes <|im_end|>\n"), "Yes <|im_end|>"),
        (EITHER, answer(" Yes\n"), "Yes"),
        (FORGETFUL, answer("<think>\n\n</think>Yes"), "Yes"),
        (
            CHAT_TEMPLATE,
            answer(tool_calls=[CALL]),
            'Yes\n<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>',
        ),
        (QWEN3, answer(reasoning="so"), "<think>\nso\n</think>\n\nYes"),
        (QWEN3, answer("<think>so</think>Yes"), "<think>\nso\n</think>\n\nYes"),
        (GLM4MOE, answer("", thinking="so", tool_calls=[CALL]), "\n<think>so</think>\n<tool_call>look\n<arg_key>x"),
    ],
)
def test_an_answer_that_the_template_writes_is_trained(
    tmp_path: Path, template: str, message: dict[str, Any], text: str
) -> None:
    (parts,) = make(tmp_path, {"messages": [HI, message]}, template)
    assert parts[-1][1] and parts[-1][0].startswith(text)


def test_a_text_that_goes_on_behind_its_end_token_is_refused(tmp_path: Path) -> None:
    ((_, trained),) = make(tmp_path, {"prompt": "2+2=", "completion": "4<|im_end|>5<|im_end|>\n"})
    assert trained == ("4<|im_end|>5<|im_end|>", True)
    with pytest.raises(UserError, match="demonstration 0: the completion goes on behind the last token .*: 'more'"):
        make(tmp_path, {"prompt": "2+2=", "completion": "4<|im_end|> more"})


@pytest.mark.parametrize("flag", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": 1, "train": False}])
def test_flags_exclude_an_answer(tmp_path: Path, flag: dict[str, Any]) -> None:
    first, last = answer("No", **flag), answer(weight=1, train=True)
    (parts,) = make(tmp_path, {"messages": [HI | {"weight": 0}, first, MORE, last]})
    assert [text for text, trained in parts if trained] == ["Yes<|im_end|>"] and "No<|im_end|>" in parts[0][0]
    with pytest.raises(UserError, match="demonstration 0: weight = 0 or train = false excludes every answer"):
        make(tmp_path, {"messages": [HI, first]})
    with pytest.raises(UserError, match='excludes an answer, but sft.loss_on = "all"'):
        make(tmp_path, {"messages": [HI, first, MORE, last]}, loss_on="all")


@pytest.mark.parametrize("flag", [{"weight": 0.5}, {"weight": "0"}, {"train": "false"}])
def test_flags_that_mean_something_else_are_refused(tmp_path: Path, flag: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"demonstration 0: {next(iter(flag))} = .* must be 0 or 1, false or true"):
        make(tmp_path, {"messages": [HI, answer(**flag)]})


def test_keys_that_no_template_reads_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read = SIMPLE.replace("{{ m.role }}", "{{ m.role }}{% if loop.last %}{{ m.get('name') }}{{ m['mood'] }}{% endif %}")
    tokenizer = Tokenizer(write_chat_tokenizer(tmp_path, read))
    config = JobConfig()
    config.job.stage, config.rollout.prompt_column = "sft", "messages"
    config.rollout.dataset = config.eval.dataset = str(tmp_path / "rows.jsonl")
    keys = {"name": "Bob", "mood": "glad", "metadata": {"a": 1}, "id": 7, "nothing": None, "none": "", "empty": []}
    rows = [[HI, YES], [HI | keys, YES | {"weight": 1}], [HI, YES | keys | {"id": 8}], [HI | keys, YES]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    load_datasets(config, DemonstrationMaker(config, tokenizer).renderer)
    (text,) = [record.getMessage() for record in caplog.records if "does not read" in record.getMessage()]
    assert text.endswith("so the policy does not see them: 'metadata' (row 2), 'id' (row 2)")


def test_every_row_is_checked_before_the_first_is_trained(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_chat_tokenizer(tmp_path, SIMPLE))
    config = JobConfig()
    config.job.stage, config.rollout.prompt_column, config.eval.dataset = "sft", "messages", ""
    config.rollout.dataset, config.rollout.held_out_fraction = str(tmp_path / "rows.jsonl"), 0.0
    rows = [[{"role": "user", "content": str(number)}, YES] for number in range(9)]
    rows.append([HI, answer(reasoning="so")])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    with pytest.raises(UserError, match="demonstration 9: the chat template of .* does not write the thought"):
        Demonstrations(config, tokenizer, 1)


def test_an_answer_behind_nothing_is_refused(tmp_path: Path) -> None:
    """Packed, the last token of the sequence before it would be trained to say how it begins."""
    with pytest.raises(UserError, match="demonstration 0: no token stands before the answer"):
        template = "{% for one in messages if one.role == 'assistant' %}{{ one.content }}<|im_end|>{% endfor %}"
        make(tmp_path, {"messages": [HI, YES]}, template)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a"}, "row 1: no column 'completion' .sft.completion_column.*there are 'prompt'"),
        ({"prompt": "a", "completion": ""}, "row 1: column 'completion': it is empty"),
        ({"prompt": "a", "completion": 3}, "a completion must be text or a list of chat messages, found int"),
        ({"prompt": [HI]}, "no chat with answers in it"),
        ({"prompt": []}, "row 1, column 'prompt': the prompt is empty"),
        ({"prompt": [HI, YES], "tools": ["look"]}, "row 1: tools must be a list of JSON schemas: .'look'."),
        ({"prompt": [HI, YES], "tools": 3}, "row 1: tools must be a list of JSON schemas: 3"),
        ({"prompt": [HI, YES], "completion": [YES]}, "row 1: the chat ends with the assistant's .*'completion' begins"),
        ({"prompt": [HI, YES], "completion": "Yes"}, "row 1: the chat ends with the assistant's answer"),
        ({"prompt": json.dumps([HI, YES]), "completion": "Yes"}, "row 1: the chat ends with the assistant's answer"),
        ({"prompt": str([HI]), "completion": "Yes"}, "row 1, column 'prompt': text that looks like chat messages"),
        ({"prompt": [HI], "completion": str([YES])}, "row 1, column 'completion': text that looks like chat messages"),
    ],
)
def test_rows_without_a_demonstration_are_named(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    config = JobConfig()
    config.job.stage = "sft"
    config.rollout.dataset, config.eval.dataset = str(tmp_path / "rows.jsonl"), "arithmetic"
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=problem):
        load_datasets(config)
