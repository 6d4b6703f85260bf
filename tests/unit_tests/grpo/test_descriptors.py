"""What is known of objectives besides their formulas: against the formulas, the documents, and what a recipe adds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchtitan
from tests.patience import PATIENCE_S
from tests.unit_tests.conftest import WriteConfig
from torchtitan.config.job_config import GRPO
from torchtitan.config.objectives import OBJECTIVES, TEACHER_DIVERGENCES
from torchtitan.grpo.loss import loss_settings
from torchtitan.grpo.objectives import Sequences, takes_sequences

DOCS = Path(__file__).parents[3] / "docs"


def weights(grpo: GRPO, log_ratio: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """|gradient| of the loss of tokens [N] by their log-probs, whichever sign of the advantage makes it larger."""
    settings, found = loss_settings(grpo), []
    for advantage in (1.0, -1.0):
        log_probs = (log_ratio - 30).requires_grad_()
        level = settings.objective.ratio_of(log_probs + 30, sequences)
        advantages = torch.full_like(log_ratio, advantage)
        settings.objective.loss_of(log_probs, level, advantages, settings.options, sequences).loss.sum().backward()
        assert log_probs.grad is not None
        found.append(log_probs.grad.abs())
    return torch.maximum(*found)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_token_whose_weight_is_bounded_has_no_larger_gradient(name: str) -> None:
    grpo = GRPO(loss_type=name)
    log_ratio = torch.linspace(-15, 15, 6001, dtype=torch.float64)
    largest = weights(grpo, log_ratio, Sequences(torch.arange(len(log_ratio)), len(log_ratio))).max().item()
    key, bound = grpo.largest_weight
    if bound < float("inf"):
        assert bound / 2 < largest <= bound * (1 + 1e-9), key
    else:
        assert name in ("gmpo", "dppo") and key == "loss_type" and largest > 1e3
    assert OBJECTIVES[name].separable != takes_sequences(loss_settings(grpo).objective.token_loss)
    if not OBJECTIVES[name].separable:
        # Neither the last token's own ratio nor the geometric mean of the three, both 1, bounds its weight.
        three = torch.tensor([15.0, -15.0, 0.0], dtype=torch.float64)
        assert not grpo.has_sequence_ratios and weights(grpo, three, Sequences(torch.zeros(3).long(), 1))[2] > 10


def test_the_table_of_objectives_is_that_of_the_descriptors() -> None:
    by_weight = {"1/N": "token", "1/(sequences · length)": "sequence", "1/(sequences · longest completion)": "constant"}
    rows = re.findall(r"^\| `(\w+)`.*?\|.*\| (?:`(.*?)` )?\| (.*?) \|$", (DOCS / "algorithms.md").read_text(), re.M)
    table = {name: (weight, source) for name, weight, source in rows if name in OBJECTIVES}
    assert table.keys() == OBJECTIVES.keys()
    for name, (weight, source) in table.items():
        known = OBJECTIVES[name]
        assert source.partition(";")[0] == known.source
        assert by_weight.get(weight) == (None if known.local else known.normalizer), name
    assert {name: source for name, _, source in rows if name in TEACHER_DIVERGENCES} == TEACHER_DIVERGENCES


START = """
from torchtitan.errors import ConfigError
from torchtitan.preflight.validate import load_config
try:
    load_config(["--job.config_file", "job.toml", "--grpo.loss_type", "mine"])
except ConfigError as error:
    raise SystemExit(str(error))
import torch
from torchtitan.config.job_config import GRPO
from torchtitan.grpo.loss import loss_settings
settings = loss_settings(GRPO(loss_type="mine"))
one, five = torch.ones(2), torch.tensor([1.0, 5.0])
print(settings.objective.loss_of(-one, five.log(), one, settings.options, None).loss.tolist())
"""


@pytest.mark.slow
def test_the_recipe_is_refused_in_asynchronous_mode_until_it_names_its_bound(
    tmp_path: Path, write_config: WriteConfig
) -> None:
    write_config()
    text = (DOCS / "adding_an_objective.md").read_text().partition("## As part of the program")[2]
    function, loss, unbounded, bounded = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    package = Path(torchtitan.__file__).parent
    shutil.copytree(package, tmp_path / "torchtitan", ignore=shutil.ignore_patterns("__pycache__"))
    formulas, facts = (tmp_path / "torchtitan" / name / "objectives.py" for name in ("grpo", "config"))

    def insert(file: Path, text: str, line: str, before: str = "") -> None:
        old = file.read_text()
        assert old.count(line) == 1
        file.write_text(old.replace(line, before + line + text))

    def start() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-B", "-c", START]
        environment = {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    insert(formulas, loss, "TOKEN_LOSSES: dict[str, TokenLossFunction] = {\n", before=f"{function}\n\n")
    original = facts.read_text()
    insert(facts, unbounded, "OBJECTIVES: dict[str, Descriptor] = {\n")
    refused = start()
    assert refused.returncode == 1 and 'grpo.loss_type = "mine"' in refused.stderr, refused.stderr
    assert "an off-policy token may count more than 10 times" in refused.stderr
    facts.write_text(original)
    insert(facts, bounded, "OBJECTIVES: dict[str, Descriptor] = {\n")
    accepted = start()
    assert (accepted.returncode, accepted.stdout) == (0, "[-1.0, -2.0]\n"), accepted.stderr
