"""The tokenizer against transformers' AutoTokenizer on a small BPE trained here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from torchtitan.errors import UserError
from torchtitan.rollout.conversation.tokenizer import ChatRenderer, Tokenizer

TEMPLATE = (
    "{%- if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{% for message in messages %}\n"
    "<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{{ eos_token }}"
    "{%- if message.extra is defined %}{{ message.extra | tojson }}"
    "{{ message.extra | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}{% continue %}{% endif %}\n"
    "{% endfor %}\n"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["The quick brown fox jumps over 13 lazy dogs.", "What is 12 + 30? It is 42.", "x = y * (a - b)\n\tdone"]
MESSAGES = [{"role": "system", "content": " be short "}, {"role": "user", "content": "What is 1 + 2?"}]


def write_tokenizer(directory: Path, **settings: object) -> Path:
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    transformers = pytest.importorskip("transformers")
    directory = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer(directory), transformers.AutoTokenizer.from_pretrained(str(directory))


@settings(max_examples=60)
@given(text=st.text(max_size=60) | st.sampled_from([*TEXTS, "a<|im_end|>b", "<|im_start|>user\nhé 数"]))
def test_encode_and_decode_agree_with_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, reference = pair
    ids = ours.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert ours.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [MESSAGES, [{**MESSAGES[1], "extra": {"b": "<é>", "a": [1]}}, MESSAGES[1]]])
def test_chat_template_agrees_with_transformers(
    pair: tuple[Tokenizer, Any], messages: list[Any], add_generation_prompt: bool
) -> None:
    ours, reference = pair
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert ours.render_chat(messages, add_generation_prompt) == expected
    if add_generation_prompt:
        assert ours.apply_chat_template(messages) == reference.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_plain_text_begins_as_transformers_has_it(in_file: bool, settings: dict[str, bool], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, bos_token="<|endoftext|>", **settings)
    if in_file:
        file = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
        ends = [("<|endoftext|>", 0), ("<|im_end|>", 2)]
        file.post_processor = processors.TemplateProcessing("<|endoftext|> $A <|im_end|>", special_tokens=ends)
        file.save(str(tmp_path / "tokenizer.json"))
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ours = Tokenizer(tmp_path)
    for text in TEXTS:
        expected = reference.encode(text)
        assert ours.encode_prompt(text) == (expected[:-1] if expected[-1] == 2 else expected)
        assert ours.encode_prompt(f"<|endoftext|>{text}") == [0, *ours.encode(text)]


THINKS = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


def test_variables_of_the_template_reach_every_prompt(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = TEMPLATE.replace("assistant\n{% endif %}", f"assistant\n{THINKS}{{% endif %}}")
    write_tokenizer(tmp_path, chat_template=template)
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for values, ends in (({}, "assistant\n"), ({"enable_thinking": False}, "</think>\n\n")):
        ours = Tokenizer(tmp_path, values)
        expected = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False, **values)
        assert ours.apply_chat_template(MESSAGES) == ChatRenderer(ours).render_prompt(MESSAGES, []) == expected
        follows = ChatRenderer(ours).following([2], MESSAGES[1:])
        for tokens in (expected, follows):
            assert ours.decode(tokens, skip_special=False).endswith(ends)
    with pytest.raises(UserError, match="names enable_thinkin, which the chat template of .* reads add_gen"):
        Tokenizer(tmp_path, {"enable_thinkin": False})


def test_vocabulary_and_unknown_ids(pair: tuple[Tokenizer, Any]) -> None:
    ours, reference = pair
    assert ours.vocab_size == len(reference)
    assert "vocab_size" in vars(ours), "it is counted once: a large vocabulary takes a tenth of a second"
    assert ours.decode([*ours.encode("What"), ours.vocab_size + 7]) == "What"


def test_end_tokens_come_from_all_files(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert Tokenizer(tmp_path).eos_token_ids == [2]
    for config in ('{"text_config": {"eos_token_id": 0}}', '{"eos_token_id": 0}'):  # a composite's, and another's
        (tmp_path / "config.json").write_text(config)
        assert Tokenizer(tmp_path).eos_token_ids == [0, 2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert Tokenizer(tmp_path).eos_token_ids == [2, 0]


def test_template_file_and_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D{{ bos_token }}"}]
    assert Tokenizer(write_tokenizer(tmp_path / "a", chat_template=named)).render_chat(MESSAGES) == "D"
    directory = write_tokenizer(tmp_path / "b")
    (directory / "chat_template.jinja").write_text("{% generation %}F{% endgeneration %}{{ strftime_now('%%') }}")
    assert Tokenizer(directory).render_chat(MESSAGES) == "F%"


@pytest.mark.parametrize("template", ["{{ messages.__class__.__mro__[1].__subclasses__() }}", "{{ 1 // 0 }}"])
def test_templates_run_in_a_sandbox(tmp_path: Path, template: str) -> None:
    with pytest.raises(UserError, match="chat template of .* failed"):
        Tokenizer(write_tokenizer(tmp_path, chat_template=template)).render_chat(MESSAGES)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer.json in"):
        Tokenizer(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(UserError, match="no tools here"):
        Tokenizer(tmp_path).render_chat([{"role": "tool", "content": ""}])
    (tmp_path / "tokenizer_config.json").write_text("{}")
    plain = Tokenizer(tmp_path)
    assert not plain.has_chat_template
    with pytest.raises(UserError, match="has no chat template"):
        plain.apply_chat_template(MESSAGES)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="not readable JSON"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        Tokenizer(tmp_path)
