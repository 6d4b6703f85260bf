"""Text that a tokenizer cannot represent: real tokenizers of four kinds, rows as users have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.demonstrations import Demonstrations
from torchtitan.rollout.data.unknown_text import check_unknown_text

LETTERS = ["<unk>", *"0123456789+= "]
VOCABULARY = {letter: number for number, letter in enumerate(LETTERS)}
KINDS = {
    "BPE": models.BPE(VOCABULARY, [], unk_token="<unk>"),
    "Unigram": models.Unigram([(letter, -1.0) for letter in LETTERS], unk_id=0),
    "byte fallback": models.BPE(
        VOCABULARY | {f"<0x{byte:02X}>": 20 + byte for byte in range(256)}, [], unk_token="<unk>", byte_fallback=True
    ),
}
SUM = {"prompt": "1+1=", "answer": "2"}


def make_tokenizer(folder: Path, kind: str) -> Tokenizer:
    FastTokenizer(KINDS[kind]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "="}))
    return Tokenizer(folder)


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_a_text_that_is_unknown_is_refused_and_a_share_of_it_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    config, tokenizer = JobConfig(), make_tokenizer(tmp_path, kind)

    def check(*rows: dict[str, Any]) -> str:
        caplog.clear()
        check_unknown_text(rows, config, tokenizer)
        return caplog.text

    config.rewards.functions = ["format"]
    assert check(*[SUM] * 100, {"prompt": "1+x=", "answer": "x"}) == ""
    assert "5.0 % of the dataset's tokens" in check(*[SUM] * 4, {"prompt": "1+x="}) and "'1+x='" in caplog.text
    for prompt in ("x", [{"role": "user", "content": "x"}]):
        with pytest.raises(UserError, match="knows no part of 'x' .column 'prompt'"):
            check(SUM, {"prompt": prompt})
    config.rewards.functions = ["format", "exact_match"]
    with pytest.raises(UserError, match="column 'answer'"):
        check(SUM, {"prompt": "1+1=", "answer": "two"})


def test_a_tokenizer_that_spells_bytes_knows_all(tmp_path: Path) -> None:
    check_unknown_text([{"prompt": "x"}], JobConfig(), make_tokenizer(tmp_path, "byte fallback"))


def test_demonstrations_of_unknown_text_are_refused(tmp_path: Path) -> None:
    config = JobConfig()
    config.job.stage, config.rollout.dataset = "sft", str(tmp_path / "rows.jsonl")
    rows = [{"prompt": f"{number}+1=", "completion": "two"} for number in range(9)]
    Path(config.rollout.dataset).write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match="column 'completion'"):
        Demonstrations(config, make_tokenizer(tmp_path, "BPE"), 1)
