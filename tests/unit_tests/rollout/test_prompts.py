"""Rows, held-out shares and the resumable stream of prompts."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.rollout.data.job_rows import load_datasets
from torchtitan.rollout.data.prompt_stream import PromptStream
from torchtitan.rollout.data.prompts import PromptMaker, first_held_out
from torchtitan.rollout.data.rows import arithmetic_rows, hold_out, load_rows


class Characters:
    """A tokenizer of characters; chats become text with role marks."""

    eos_token_ids = [1]
    unknown_id = None
    has_chat_template = True
    added_tokens: dict[str, int] = {}
    unseen_texts: frozenset[str] = frozenset()
    shield = staticmethod(str)

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_prompt(self, text: str) -> list[int]:
        return [2, *self.encode(text)]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(chr(i) for i in ids if not (skip_special and i < 9))

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))


def make_config(**rollout: Any) -> JobConfig:
    config = JobConfig()
    config.rollout.max_completion_tokens = 8
    config.training.seq_len = 40
    vars(config.rollout).update(rollout)
    return config


def write_jsonl(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_arithmetic_is_right_and_complete() -> None:
    rows = arithmetic_rows()
    assert len(rows) == len({row["prompt"] for row in rows}) == 5050
    assert {"prompt": "12+34=", "answer": "640"} in rows
    for row in rows:
        a, b = row["prompt"].rstrip("=").split("+")
        assert len(a) == len(b) == 2 and int(a) <= int(b)
        assert len(row["answer"]) == 3 and int(row["answer"][::-1]) == int(a) + int(b)


@given(st.integers(0, 5), st.floats(0, 1), st.lists(st.sampled_from("abcdefg\ud83d"), min_size=1, max_size=30))
@settings(max_examples=50)
def test_held_out_prompts_never_occur_in_training(seed: int, fraction: float, letters: list[str]) -> None:
    rows = [{"prompt": letter, "number": i} for i, letter in enumerate(letters)]
    train, held_out = hold_out(rows, fraction, seed=seed)
    assert sorted(train + held_out, key=lambda row: row["number"]) == rows
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert len({row["prompt"] for row in held_out}) == round(fraction * len(set(letters)))
    assert (train, held_out) == hold_out(rows, fraction, seed=seed)


def test_chats_with_what_json_cannot_hold_are_split(tmp_path: Path) -> None:
    """Parquet files have dates and bytes."""
    rows = [{"prompt": [{"role": "user", "content": "x", "at": date(2024, 1, day), "b": b"x"}]} for day in range(1, 5)]
    train, held_out = hold_out(rows, 0.5)
    assert len(train) == len(held_out) == 2 and hold_out(rows, 0.5) == (train, held_out)


def test_the_split_of_the_arithmetic_task_does_not_depend_on_the_training_seed() -> None:
    config = make_config()
    first = load_datasets(config)
    config.training.seed = 7
    assert load_datasets(config) == first
    assert (len(first[0]), len(first[1])) == (4545, 505)
    assert hold_out(arithmetic_rows(), 0.1, seed=1) != hold_out(arithmetic_rows(), 0.1)


def test_files_of_both_kinds_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": str(i), "level": i} for i in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert load_rows(str(tmp_path / "rows.parquet")) == rows
    assert load_rows(write_jsonl(tmp_path / "rows.jsonl", *rows)) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not valid JSON"),
        ('{"prompt": "a"}\n\n[1]\n', "line 3: expected a JSON object, found list"),
        ("", "has no rows"),
        ('{"prompt": "a", "answer": "1"}\n{"question": "b", "answer": "2"}\n', "row 2: no column 'prompt'.*'question'"),
        ('{"prompt": "a", "gold": "1"}\n', "no column 'answer' .rewards.answer_column.; there are 'prompt', 'gold'"),
        ('{"prompt": 3, "answer": "1"}\n', "text or a list of chat messages, found int"),
        ('{"prompt": "", "answer": "1"}\n', "the prompt is empty"),
        ('{"prompt": [{"role": "user"}], "answer": "1"}\n', "'role' and 'content'"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}\n', "must be text"),
        (
            '{"prompt": [{"role": "assistant", "content": "1"}], "answer": "1"}\n',
            "row 1: the chat ends with the assist",
        ),
    ],
)
def test_bad_files_are_told_apart(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        load_datasets(make_config(dataset=str(tmp_path / "rows.jsonl")))


def test_missing_and_damaged_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_rows(str(tmp_path / "none.jsonl"))
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        load_rows(str(tmp_path / "bad.parquet"))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "café"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match="line 1: not valid JSON.*utf-8"):
        load_rows(str(tmp_path / "latin.jsonl"))
    (tmp_path / "rows.txt").write_text("[]")
    with pytest.raises(UserError, match="rows.txt must end with .jsonl or .parquet"):
        load_rows(str(tmp_path / "rows.txt"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="'some/name'.*cannot be loaded: .*datasets"):
        load_rows("some/name")


def test_a_function_gives_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
def good():
    for i in range(3):
        yield {"prompt": f"{i}", "answer": f"{i}"}
def empty():
    return []
def texts():
    return ["01+02="]
def fails():
    raise OSError("no disk")
def breaks_off():
    yield {"prompt": "1", "answer": "1"}
    raise KeyError("question")
def nothing():
    pass
"""
    (tmp_path / "rows_of_a_user.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_rows("rows_of_a_user:good") == [{"prompt": f"{i}", "answer": f"{i}"} for i in range(3)]
    for name in ("empty", "texts", "nothing"):
        with pytest.raises(UserError, match=f"'rows_of_a_user:{name}' must return rows, each a dict"):
            load_rows(f"rows_of_a_user:{name}")
    with pytest.raises(UserError, match="'rows_of_a_user:fails' raised OSError: no disk .*rows_of_a_user.py, line 10"):
        load_rows("rows_of_a_user:fails")
    with pytest.raises(UserError, match="'rows_of_a_user:breaks_off' raised KeyError: 'question' .*_user.py, line 13"):
        load_rows("rows_of_a_user:breaks_off")


def test_hugging_face_names_go_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def load_dataset(name: str, subset: str | None, split: str) -> list[dict[str, str]]:
            if name == "no/such":
                raise FileNotFoundError("not on the hub")
            return [{"prompt": f"{name} {subset} {split}", "answer": "1"}]

    monkeypatch.setitem(sys.modules, "datasets", Library)
    assert load_rows("openai/gsm8k[train]", "test") == [{"prompt": "openai/gsm8k None train", "answer": "1"}]
    assert load_rows("openai/gsm8k:main[test]") == [{"prompt": "openai/gsm8k main test", "answer": "1"}]
    assert load_rows("openai/gsm8k:main", "test") == [{"prompt": "openai/gsm8k main test", "answer": "1"}]
    with pytest.raises(UserError, match="not on the hub"):
        load_rows("no/such")
    # The evaluation has a split of its own.
    config = make_config(dataset="some/name")
    config.eval.dataset = "some/name"
    train, held_out = load_datasets(config)
    assert (train[0]["prompt"], held_out[0]["prompt"]) == ("some/name None train", "some/name None test")


def test_an_evaluation_dataset_leaves_the_training_data_whole(tmp_path: Path) -> None:
    config = make_config(dataset=write_jsonl(tmp_path / "a.jsonl", {"prompt": "a", "answer": "1"}))
    config.eval.dataset = write_jsonl(tmp_path / "b.jsonl", {"prompt": "b", "answer": "2"})
    train, held_out = load_datasets(config)
    assert (train[0]["prompt"], held_out[0]["prompt"]) == ("a", "b")


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_beside_a_prompt_are_said_to_be_unseen_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, column: str
) -> None:
    rows = [{"prompt": text, "answer": text, column: images} for text, images in (("a", None), ("b", []))]
    config = make_config(dataset=write_jsonl(tmp_path / "a.jsonl", *rows))
    load_datasets(config)
    assert not caplog.records
    rows += [{"prompt": text, "answer": text, column: ["x.png"]} for text in "cd"]
    config.rollout.dataset = write_jsonl(tmp_path / "a.jsonl", *rows)
    load_datasets(config)
    (record,) = caplog.records
    assert f"row 3: the policy does not see column '{column}'" in record.getMessage()
    # An environment gets them.
    config.environment.factory = "torchtitan.rollout.environments.builtin_environments:Calculator"
    load_datasets(config)
    assert len(caplog.records) == 1


def test_the_reward_of_the_evaluation_needs_its_column_too(tmp_path: Path) -> None:
    config = make_config(dataset=write_jsonl(tmp_path / "a.jsonl", *({"prompt": text} for text in "abcdefghij")))
    config.rewards.functions = ["format"]
    load_datasets(config)
    config.eval.reward_function = "exact_match"
    with pytest.raises(UserError, match="rollout.dataset.*no column 'answer'"):
        load_datasets(config)
    config.eval.num_prompts = 0
    load_datasets(config)
    config.eval.num_prompts, config.eval.dataset = 1, write_jsonl(tmp_path / "b.jsonl", {"prompt": "c"})
    with pytest.raises(UserError, match="eval.dataset.*no column 'answer'"):
        load_datasets(config)
    config.eval.dataset = write_jsonl(tmp_path / "b.jsonl", {"prompt": "c", "answer": "1"})
    assert len(load_datasets(config)[0]) == 10


def test_prompts_keep_their_form_and_columns() -> None:
    config = make_config(prompt_column="question", chat_template=True, system_prompt="be brief")
    config.rewards.answer_column = "gold"
    row = {"question": "2+2", "gold": "4", "level": 3}
    prompt = PromptMaker(config, Characters()).make(row, 5)
    assert (prompt.index, prompt.text) == (5, "2+2")
    assert prompt.columns == {"gold": "4", "answer": "4", "level": 3}
    assert Characters().decode(prompt.token_ids) == "<system>be brief<user>2+2"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompt = PromptMaker(config, Characters()).make({"question": chat}, 0)
    assert prompt.text == chat
    assert Characters().decode(prompt.token_ids) == "<system>s<user>u"


@pytest.mark.parametrize(
    ("text", "prefill"),
    [
        ("2+2<assistant>\n<think>\n", "<think>\n"),
        ("<assistant><think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("<think>so</think>2+2<assistant>", ""),
        ("2+2", ""),
    ],
)
def test_a_thought_that_the_template_opens_belongs_to_the_answer(text: str, prefill: str) -> None:
    assert PromptMaker(make_config(), Characters()).make({"prompt": text}, 0).prefill == prefill


def test_a_missing_chat_template_is_an_error() -> None:
    tokenizer = Characters()
    tokenizer.has_chat_template = False
    with pytest.raises(UserError, match="chat template"):
        PromptMaker(make_config(chat_template=True), tokenizer)


def make_stream(texts: Sequence[str], seed: int = 0, **rollout: Any) -> PromptStream:
    maker = PromptMaker(make_config(**rollout), Characters())
    return PromptStream([{"prompt": text} for text in texts], maker, seed)


def test_every_pass_has_every_prompt_once_in_an_order_of_its_own() -> None:
    texts = [f"p{i}" for i in range(40)]
    stream = make_stream(texts)
    passes = [[stream.next() for _ in texts] for _ in range(2)]
    assert [prompt.index for part in passes for prompt in part] == list(range(80))
    orders = [[prompt.text for prompt in part] for part in passes]
    assert [sorted(order) for order in orders] == [sorted(texts)] * 2
    assert orders[0] != orders[1] != texts
    again = make_stream(texts)
    assert [again.next().text for _ in range(80)] == orders[0] + orders[1]
    other = make_stream(texts, seed=1)
    assert [other.next().text for _ in texts] != orders[0]


def test_prompts_that_are_too_long_are_left_out_and_counted() -> None:
    texts = ["short", "x" * 31, "y" * 32, "z" * 100]  # and a token in front of each
    stream = make_stream(texts)
    seen = Counter(stream.next().text for _ in range(6))
    assert seen == {"short": 3, "x" * 31: 3}
    assert stream.dropped >= 4
    with pytest.raises(UserError, match="none of the 1 prompts .* raise training.seq_len"):
        make_stream(["y" * 33]).next()
    maker = PromptMaker(make_config(), Characters())
    held_out = first_held_out([{"prompt": text} for text in texts], maker, 9)
    assert sorted(str(prompt.text) for prompt in held_out) == texts[:2]
    with pytest.raises(UserError, match="none of the 1 held-out prompts .* raise training.seq_len"):
        first_held_out([{"prompt": "y" * 33}], maker, 9)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("fitting", [1, 2])
def test_a_prompt_that_fits_comes_once_in_every_pass_however_few_fit(rows: int, fitting: int) -> None:
    """It may be the first of a pass and the last of the next one, with almost two passes between."""
    texts = (["a", "b"][:fitting] + ["x" * 100] * rows)[:rows]
    fit = texts[:fitting]
    for seed in range(20):
        stream = make_stream(texts, seed)
        drawn = [stream.next() for _ in range(20 * len(fit))]
        assert Counter((prompt.index // rows, prompt.text) for prompt in drawn) == {
            (number, text): 1 for number in range(20) for text in fit
        }


@pytest.mark.parametrize("begin", [0, 1, 4])
def test_rows_of_which_none_fits_are_refused_after_one_whole_pass(begin: int) -> None:
    stream = make_stream(["x" * 100] * 5)
    stream.load_state_dict({**stream.state_dict(), "position": begin})
    with pytest.raises(UserError, match="none of the 5 prompts"):
        stream.next()
    assert stream.position == (5 if begin == 0 else 10)


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 3))
@settings(max_examples=60)
def test_a_resumed_stream_goes_on_as_the_unbroken_one(rows: int, before: int, seed: int) -> None:
    texts = ["p" * (3 * i + 1) for i in range(rows)]  # some of them are too long
    unbroken = make_stream(texts, seed)
    expected = [unbroken.next() for _ in range(before + 15)]
    first = make_stream(texts, seed)
    for _ in range(before):
        first.next()
    resumed = make_stream(texts, seed)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [resumed.next() for _ in range(15)] == expected[before:]
    assert resumed.dropped == unbroken.dropped
    assert all(resumed.prompt_at(prompt.index) == prompt for prompt in expected)


def test_other_data_cannot_be_resumed() -> None:
    state = make_stream(["a", "b"]).state_dict()
    for stream in (make_stream(["a", "c"]), make_stream(["a", "b"], seed=1)):
        with pytest.raises(UserError, match="not those of the checkpoint"):
            stream.load_state_dict(state)


def test_data_with_objects_in_it_can_be_resumed() -> None:
    """Two lives of a run never find an image at the same address."""
    maker, first, later = PromptMaker(make_config(), Characters()), object(), object()
    state = PromptStream([{"prompt": "a", "image": first}], maker, seed=0).state_dict()
    PromptStream([{"prompt": "a", "image": later}], maker, seed=0).load_state_dict(state)
