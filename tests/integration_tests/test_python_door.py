"""A run from Python: a script, a notebook's cell, twice in one process, and what it leaves of the process."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.patience import PATIENCE_S
from tests.unit_tests.preflight.test_packaging import build_wheel

ROOT = Path(__file__).resolve().parents[2]

# Not one line is guarded by `if __name__ == "__main__"`: workers must not run it again.
SCRIPT = """
from torchtitan import train
SMALL = {"grpo.allow_uncorrected": True, "training.steps": 2,
         "training.global_batch_size": 64, "inference.num_actors": 1, "eval.num_prompts": 0,
         "checkpoint.enable": False, "checkpoint.last_save_in_hf": False, "metrics.log_freq": 1}
def digits(completions, **kwargs):
    return [sum(map(str.isdigit, text)) * POINTS for text in completions]
POINTS = 0.25
def saturates(log_probs, log_ratio, advantages, options, sequences):
    return -(1 + sequences.spread(sequences.means(log_ratio)).tanh()) * advantages
def best(rewards, tokens):
    return [one - one.median() for one in rewards]
def short(ratio, options):
    return ratio.clamp(max=options.cap) * (ratio < 2 * CAP)
CAP = 3.0
def whole(group):
    return len(group.samples) > 2
def unknown(means, variances, groups, typical):
    return groups < 0.1
HOOKS = {"loss": saturates, "advantage": best, "correction": short, "group_filter": whole, "sampler": unknown}
rows = [{"prompt": f"{a}+{b}=", "answer": f"{a + b}"} for a in range(10, 30) for b in range(10, 30)]
run = train("debug_cpu", SMALL, rewards=[digits, "arithmetic"], dataset=rows, **HOOKS)
assert [row["step"] for row in run.history] == [1, 2], run.history
print("trained", run.version, run.exit_code, run.metrics["step"])
"""

NOTEBOOK = """
import asyncio, linecache, logging, os, signal, sys
def cell(number, source):
    name = f"<ipython-input-{number}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), sys.modules["__main__"].__dict__)
del __file__
async def kernel():
    before = dict(os.environ), list(sys.path), signal.getsignal(signal.SIGINT), logging.getLogger().handlers
    cell(1, SCRIPT)
    cell(2, "run = train('debug_cpu', SMALL | {'training.steps': 3}, rewards=digits); print('again', run.version)")
    cell(3, "import torch; print('intact', torch.distributed.is_initialized())")
    after = dict(os.environ), list(sys.path), signal.getsignal(signal.SIGINT), logging.getLogger().handlers
    assert after == before, (after, before)
logging.basicConfig(format="mine: %(message)s")
asyncio.run(kernel())
logging.warning("still mine")
"""

SWEEP = """
import os, signal, sys, threading, time
from pathlib import Path
from torchtitan import train
NUMBER = signal.Signals[sys.argv[1]]
def interrupt():
    while not list(Path(sys.argv[1]).glob("*/metrics.jsonl")):
        time.sleep(0.05)
    os.kill(os.getpid(), NUMBER)
threading.Thread(target=interrupt, daemon=True).start()
try:
    for begun in range(2):
        train("debug_cpu", SMALL | {"training.steps": 10**6, "checkpoint.enable": True, "job.dump_folder": NUMBER.name})
except (KeyboardInterrupt, SystemExit) as stopped:
    run = stopped.run
    print(type(stopped).__name__, begun, run.exit_code, (run.folder / f"checkpoint/step-{run.version}").is_dir())
    raise
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are."""
    return tmp_path_factory.mktemp("door")


def execute(folder: Path, name: str, source: str) -> subprocess.CompletedProcess[str]:
    (folder / name).write_text(source)
    return run(folder, name)


def run(folder: Path, *command: str, code: int = 0, package: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "TORCHTITAN_DEVICE": "cpu"}
    # A tokenizer sets it; whoever has imported one here would hide that from the notebook's test.
    environment.pop("TOKENIZERS_PARALLELISM", None)
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=12 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_ten_lines_of_a_script_train(folder: Path) -> None:
    done = execute(folder, "script.py", SCRIPT)
    assert done.stdout.startswith("trained 2 0 ") and done.stdout.count("\n") == 1, done.stdout


def test_a_notebook_trains_twice_and_keeps_its_process(folder: Path) -> None:
    done = execute(folder, "notebook.py", f"SCRIPT = {SCRIPT!r}\n{NOTEBOOK}")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["trained", "again", "intact"]
    assert "again 3\nintact False" in done.stdout
    assert done.stderr.rstrip().endswith("mine: still mine")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "raised", "code"),
    [("SIGINT", "KeyboardInterrupt", -signal.SIGINT), ("SIGTERM", "SystemExit", 128 + signal.SIGTERM)],
)
def test_a_signal_ends_a_loop_of_runs_once_the_first_is_saved(folder: Path, name: str, raised: str, code: int) -> None:
    small = SCRIPT[SCRIPT.index("SMALL") : SCRIPT.index("def digits")]
    (folder / "sweep.py").write_text(small + SWEEP)
    done = run(folder, "sweep.py", name, code=code)
    assert done.stdout.splitlines() == [f"{raised} 0 {128 + signal.Signals[name]} True"]


# Runs programs one after the other, with runs that are smaller than they ask for; writes what each has printed, or why
# it failed. One process: starting a dozen would take longer than what they do.
SMALLER = """
import contextlib, io, json, runpy, sys, traceback, torchtitan
train, smaller = torchtitan.train, {
    "training.global_batch_size": 64, "eval.num_prompts": 16, "inference.num_actors": 1,
}
torchtitan.train = lambda config, changes, **others: train(config, smaller | changes, **others)
found = {}
for path, *arguments in json.loads(sys.argv[1]):
    output = io.StringIO()
    sys.argv = [path, *arguments]
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(path, run_name="__main__")
        found[path] = [output.getvalue(), ""]
    except BaseException:
        found[path] = [output.getvalue(), traceback.format_exc()]
json.dump(found, open("found.json", "w"))
"""
# The real model's evaluations alone take a minute each on an idle machine: tests/integration_tests/test_real_model.py.
# The judge asks a server: tests/unit_tests/rollout/test_judge.py. The reader of versions is a module for others.
OTHERS = ("real_model.py", "own_judge.py", "version_folder.py")
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in OTHERS)
BLOCK = re.compile(r"^```python\n(.*?)^```\n(.*?)(?=^```|^#|\Z)", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [(page.name, *block) for page in PAGES for block in BLOCK.findall(page.read_text())]


def tree_of(source: str) -> ast.Module:
    return ast.parse(f"{{{source}}}" if source.startswith(" ") else source)  # rows of a table, or lines


def trains(source: str) -> bool:
    """Whether it is a whole program, and not a part for one of the reader's."""
    calls = (node for node in ast.walk(tree_of(source)) if isinstance(node, ast.Call))
    return any(getattr(call.func, "id", "") == "train" for call in calls)


PROGRAMS = {f"page-{i}.py": source for i, (_, source, _) in enumerate(BLOCKS) if trains(source)}


@pytest.fixture(scope="module")
def outputs(folder: Path) -> dict[str, str]:
    """What every example and every page's program has printed; none has failed."""
    return outputs_of(folder, ROOT)


def outputs_of(folder: Path, package: Path) -> dict[str, str]:
    commands = [[str(path), "1"] for path in EXAMPLES]
    for name, source in PROGRAMS.items():
        (folder / name).write_text(re.sub(r'"training.steps": \d+', '"training.steps": 2', source))
        commands.append([name])
    run(folder, "-c", SMALLER, json.dumps(commands), package=package)
    found = json.loads((folder / "found.json").read_text())
    failures = [f"{path}:\n{failure}" for path, (_, failure) in found.items() if failure]
    assert not failures, "\n".join(failures)
    return {Path(path).name: output for path, (output, _) in found.items()}


@pytest.mark.parametrize("name", [path.name for path in EXAMPLES])
def test_an_example_trains(outputs: dict[str, str], name: str) -> None:
    assert outputs[name].splitlines()[-1].endswith("after 1 steps")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pages_program_prints_what_it_has_reached(outputs: dict[str, str], name: str) -> None:
    assert outputs[name]


@pytest.mark.exhaustive
def test_examples_and_the_pages_programs_train_with_an_installed_wheel(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    with ZipFile(build_wheel(tmp_path)) as file:
        file.extractall(installed)
    found = run(tmp_path, "-c", "import torchtitan; print(torchtitan.__file__)", package=installed).stdout
    assert Path(found.strip()) == installed / "torchtitan" / "__init__.py"
    assert len(outputs_of(tmp_path, installed)) == len(EXAMPLES) + len(PROGRAMS)


# What a page has its reader write, with the name of the file in its first line.
WRITTEN = {match[1] for _, source, _ in BLOCKS if (match := re.match(r"# (\S+\.py)\n", source))}


@pytest.mark.parametrize(
    "source", [source for _, source, _ in BLOCKS], ids=[f"{page}-{i}" for i, (page, *_) in enumerate(BLOCKS)]
)
def test_what_a_page_imports_is_there_or_is_written_on_a_page(source: str) -> None:
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.ImportFrom) and f"{str(node.module).replace('.', '/')}.py" not in WRITTEN:
            module = importlib.import_module(str(node.module))
            names = [name.name for name in node.names if not hasattr(module, name.name)]
            assert all(importlib.util.find_spec(f"{node.module}.{name}") for name in names)


@pytest.mark.benchmark
def test_the_first_pages_program_reaches_what_the_page_says(folder: Path) -> None:
    """The others' programs are like it."""
    ((_, source, says),) = (block for block in BLOCKS if block[0] == "README.md" and trains(block[1]))
    done = execute(folder, "program.py", source)
    rows = [json.loads(line) for line in (Path(done.stdout.split()[0]) / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    claimed = re.search(r"mean reward rises from (\.\d+) to (\.\d+) \(first and last five steps", says)
    assert claimed, "README.md does not say what the program reaches"
    least, most = map(float, claimed.groups())
    began, ended = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert ended > (least + most) / 2 and ended - began > (most - least) / 2, (began, ended)
