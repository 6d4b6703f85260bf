"""docs/adding_an_engine.md, done as it says in a copy of the package: its engine passes the contract and samples."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "torchtitan/inference/engines/unigram"
STAND_INS = "tests/contracts/stand_ins.py"
# The end of a list in the message of a wrong backend.
REFUSAL = "must be colocated or embedded or sglang or vllm"
RUN = """
import json, sys
from pathlib import Path

import torch

from tests.integration_tests.test_actors import make_config, running
from torchtitan.preflight.check import Check
from torchtitan.preflight.inference import check_inference

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    config, policy = make_config(folder / "checkpoint")
    column = policy.get_parameter("model.embed_tokens.weight").detach()[:, 0].double()
    config.inference.backend, config.inference.num_actors = "unigram", 1
    config.inference.engine.python, config.weight_sync.verify = sys.executable, "off"
    with running(config, policy, folder / "run") as run:
        run.steps_until(lambda: run.version >= 3)
    samples = [sample for batch in run.batches for sample in batch.samples]
    furthest, versions = 0.0, set()
    for sample in samples:
        for span in sample.spans:
            expected = torch.log_softmax(column * 1.001**span.version, 0)
            versions.add(span.version)
            for place in range(span.start, span.end):
                token = sample.completion_ids[place]
                furthest = max(furthest, abs(sample.log_probs[place] - float(expected[token])))
    config.rollout.top_p, config.inference.update_mode = 0.9, "drain"
    check = Check(config, 1, planning=True)
    check_inference(check)
    refused = sorted(problem.key for problem in check.problems)
    print(json.dumps({"versions": sorted(versions), "furthest": furthest, "refused": refused}))
"""


def blocks_of_page() -> dict[str, str]:
    """The page's files, by their paths."""
    page = (ROOT / "docs" / "adding_an_engine.md").read_text()
    files: dict[str, str] = {}
    for text in re.findall(r"```(?:python|toml)\n(.*?)```", page, re.DOTALL):
        name = re.match(r"# (\S+)\n", text)
        assert name is not None, "each block begins with the path of its file"
        files[name[1]] = text
    return files


@pytest.mark.slow
def test_the_engine_of_the_page_passes_the_contract_and_samples(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("torchtitan", "tests", "docs", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=10 * PATIENCE_S, check=False,
        )  # fmt: skip

    choose = ("-c", "import torchtitan.config.rollout_tables as t; t.Inference(backend='unigram')")
    refused = run(*choose)
    assert refused.returncode and REFUSAL in refused.stderr

    files = blocks_of_page()
    stand_in = files.pop(STAND_INS)
    assert {path.rpartition("/")[0] for path in files} == {FOLDER}
    (tmp_path / FOLDER).mkdir()
    for path, text in files.items():
        (tmp_path / path).write_text(text)
    with (tmp_path / STAND_INS).open("a") as file:
        file.write(stand_in)
    assert run(*choose).returncode == 0
    assert "unigram (one distribution for all tokens)" in run("-m", "torchtitan.config.reference").stdout

    # The contract misses the engine's column in the page of engines until it is there.
    contract = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contracts/test_engines.py", "-k", "unigram")
    done = run(*contract)
    failed = set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE))
    assert failed == {"test_the_pages_that_list_engines_are_up_to_date"}, done.stdout[-4000:]
    page = tmp_path / "docs" / "engines.md"
    table = run("-m", "torchtitan.inference.engines.documentation").stdout
    before = subprocess.run(
        [sys.executable, "-m", "torchtitan.inference.engines.documentation"], cwd=ROOT, capture_output=True, text=True,
        timeout=PATIENCE_S, check=True,
    ).stdout  # fmt: skip
    assert before in page.read_text() and "`unigram`" in table
    page.write_text(page.read_text().replace(before, table))
    done = run(*contract)
    # It gives no likeliest tokens, so it cannot teach a whole vocabulary: one test is not for it.
    skipped = re.findall(r"^SKIPPED \[(\d+)\] .*: (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and skipped == [("1", "it gives none")], done.stdout[-4000:]

    # Its own server, beside an agent, in a run: each token has the log-prob of the version that it is tagged with.
    (tmp_path / "run_it.py").write_text(RUN)
    done = run("run_it.py", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert len(answer["versions"]) >= 2 and answer["furthest"] < 1e-5
    assert answer["refused"] == ["inference.update_mode", "rollout.top_p"]
