"""Checkpoints that come with the package: how a configuration names one, and that they are what their page says."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.unit_tests.conftest import WriteConfig
from torchtitan.config.rollout_tables import Rollout
from torchtitan.errors import ConfigError
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.shape.exports import SHIPPED, SHIPPED_FOLDER
from torchtitan.preflight.validate import load_config
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.rows import arithmetic_rows, hold_out

ROOT = Path(__file__).resolve().parents[3]
PAGE = (SHIPPED_FOLDER / "README.md").read_text()
# What the supervised steps may end at: below it GRPO has little to reward, above it little to learn.
LEAST, MOST = 0.28, 0.45


def held_out_accuracy(directory: Path) -> float:
    """The mean probability of the right answer, with its end, to prompts on which no run trains."""
    _, held_out = hold_out(arithmetic_rows(), Rollout().held_out_fraction, "prompt")
    tokenizer = Tokenizer(directory)
    tokens = torch.tensor([[*tokenizer.encode(row["prompt"] + row["answer"]), 1] for row in held_out])
    prompt = len(tokenizer.encode(held_out[0]["prompt"]))
    with torch.no_grad():
        log_probs = load_policy(directory).logits(tokens[:, :-1]).log_softmax(-1)[:, prompt - 1 :]
    chosen = log_probs.gather(-1, tokens[:, prompt:, None])
    return float(chosen.sum((1, 2)).exp().mean())


def test_a_name_alone_is_the_packages_checkpoint_unless_there_is_a_folder_of_this_name(
    write_config: WriteConfig, tmp_path: Path
) -> None:
    arguments = [*write_config(), "--model.hf_assets_path"]
    config = load_config([*arguments, "debug_guess", "--rollout.dataset", "guess"])
    assert config.model.hf_assets_path == str(SHIPPED_FOLDER / "debug_guess")
    with pytest.raises(ConfigError, match="outputs/debug_guess.* is not a directory; to have .* give debug_guess"):
        load_config([*arguments, "outputs/debug_guess"])
    (tmp_path / "checkpoint").rename(tmp_path / "debug_guess")
    assert load_config([*arguments, "debug_guess"]).model.hf_assets_path == "debug_guess"


@pytest.mark.parametrize("name", SHIPPED)
def test_the_page_has_the_digest_and_the_command_of_every_checkpoint(name: str) -> None:
    digest = hashlib.sha256((SHIPPED_FOLDER / name / "model.safetensors").read_bytes()).hexdigest()
    assert re.search(rf"`{name}`.*`{digest}`", PAGE)
    assert f"python scripts/make_debug_checkpoint.py --output torchtitan/assets/{name}\n" in PAGE


def test_the_default_run_starts_where_samples_earn_rewards_and_much_is_left_to_learn() -> None:
    accuracy = held_out_accuracy(SHIPPED_FOLDER / "debug_arithmetic")
    assert LEAST <= accuracy <= MOST
    (claimed,) = re.findall(r"`debug_arithmetic` .*? (\.\d+) ", PAGE)
    assert accuracy == pytest.approx(float(claimed), abs=0.005)


@pytest.mark.exhaustive
@pytest.mark.timeout(24 * PATIENCE_S)
def test_the_checkpoint_of_the_default_run_made_anew_is_as_accurate(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_debug_checkpoint.py"), "--output"]
    made = tmp_path / "debug_arithmetic"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, str(made)], cwd=tmp_path, env=environment, check=True, timeout=20 * PATIENCE_S)
    assert LEAST <= held_out_accuracy(made) <= MOST
    assert (made / "tokenizer.json").read_bytes() == (SHIPPED_FOLDER / made.name / "tokenizer.json").read_bytes()
