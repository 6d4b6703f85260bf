"""Every command of README.md and docs/: what it configures is planned, and what a laptop can run is run, from an
installed wheel in a folder outside of the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.page_commands import PAGES, ROOT, Command, commands_of, files_of
from tests.patience import PATIENCE_S
from tests.processes import free_ports
from tests.unit_tests.preflight.test_packaging import build_wheel
from torchtitan.models.shape.exports import SHIPPED_FOLDER

# Commands that no test runs -> why. A command that neither stands here nor is run fails the test.
NOT_RUN = {
    r"(pip|npm) install|uv pip|bin/pip install|hf download": "downloads from a network",
    r"^\S*scripts/(setup_env|install_engine)\.sh|TORCH_BACKEND=auto": "installs packages: test_setup_env, the engines",
    r"^\S*benchmarks/peers/setup\.sh": "installs other trainers",
    r"make_smollm2_checkpoint|examples\.cli_agents\.checkpoints|examples\.coding\.tasks": "needs a downloaded model",
    r"make_gsm8k_checkpoint": "needs a downloaded data set",
    r"lm-eval|lm_eval|vllm\.entrypoints": "another program's environment",
    r"^docker |sbatch |verify_gpu\.sh|fake_cuda\.sh": "needs Docker, Slurm, a GPU or torch's CUDA build",
    r"run_tests\.sh": "is this suite",
    r"^python -m build$": "downloads build tools: test_packaging builds a wheel",
    r"^(python )?benchmarks/|benchmarks\.weight_sync|scripts/mutate\.py": "takes minutes to hours: test_benchmarks",
    r"test_whole_runs crowd": "takes hours; the suite runs a few of its seeds",
    r"^export ": "sets what the commands under it read",
    r"engines\.(embedded|sidecar) ": "serves until it is stopped: test_joining",
    r"report --serve|openenv/server\.py|OPENENV_URL": "serves until it is stopped, or asks what does",
    r"launch --nnodes|^python -m torchtitan\.utils\.launch$": "needs several machines: test_three_hosts",
    r"^torchrun |evaluate …|^python -m torchtitan\.evaluate$|config_file \.\.\.|\.unigram\.": "is a part of a command",
    r"^python = ": "is a key of a table",
    r"outputs/assets/smollm2 ": "needs a downloaded model",
}
# There is no plan without what comes before -> where they run.
NOT_PLANNED = {
    r"hf_assets_path Qwen/": "downloads from a network",
    r"checkpoint\.resume": "goes on from a run: runs with its page",
    r"weight_sync\.transport spool": "needs the class that the page adds to the package: test_adding_a_transport",
}
# These are planned by every run of the suite, but not run -> why.
PLANNED = {
    r"smollm2|claude_code|codex|coding_cpu|gsm8k|qwen|gpt_oss|llama": "needs a downloaded model or data set",
    r"vllm|sglang": "needs an engine of its own",
    r"TORCHTITAN_DEVICE=cuda": "needs a GPU",
    r"spool": "needs the class that the page adds to the package: test_adding_a_transport",
    r"TORCHTITAN_WEIGHT_SYNC_HOOK": "kills its actors: test_kills",
}
# A page's placeholders -> what stands there for them.
STANDS_FOR = {
    r"/path/to/checkout/": "./",
    r"\bRUN_DIR\b|\bRUN_A\b": "outputs/latest",
    r"\bRUN_B\b": "outputs/latest",
    r"RUN… --labels …": "outputs/latest",
    r"outputs/real/\*/smollm2_cpu-\*": "outputs/latest",
    r"\bSEED\b": "1",
    r"\bTASK\b": "guess_cpu",
    r"true\|false": "true",
    r"\bnum_minibatches N\b": "num_minibatches 1",
    r"path/to/model": "outputs/latest",
    r"\bFOLDER\b": "debug_arithmetic",
    r"--backend vllm": "--backend embedded",
    r"> docs/config\.md": "> config.md",
    r"--output docs/images/\w+\.png": "--output figure.png",
    r'PYTHON="[^"]+" |EXTRAS=\w+ ': "",
}
# What earlier commands have made or downloaded; for a plan, any checkpoint with a vocabulary of that size will do.
MADE_BEFORE = (
    "outputs/assets/smollm2", "outputs/assets/smollm2_tools", "outputs/assets/gsm8k_small", "outputs/sft/latest",
    "outputs/grpo/latest",
)  # fmt: skip
# On the end of a run's command, so that two CPU cores need seconds for it.
SHORT = "--training.global_batch_size 64 --eval.num_prompts 16 --inference.num_actors 1"
SHORT_SIMULATION = "--hours 0.05 --ranks 2 --actors 2"


def run(line: str, folder: Path, python: Path) -> subprocess.CompletedProcess[str]:
    """Run a line in a reader's folder, with this Python as theirs."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PYTHON": str(python), "OMP_NUM_THREADS": "1", "PATH": f"{python.parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=4 * PATIENCE_S, check=False,
    )  # fmt: skip


def reason(command: Command, reasons: dict[str, str]) -> str:
    return next((why for pattern, why in reasons.items() if re.search(pattern, command.text)), "")


def is_training(command: Command) -> bool:
    return bool(re.search(r"run_grpo\.sh|torchtitan-grpo --job|-m torchtitan\.grpo_train", command.text))


def runs_elsewhere(line: str) -> str:
    """The line for a folder outside of the checkout, with what stands for its placeholders."""
    for pattern, instead in STANDS_FOR.items():
        line = re.sub(pattern, instead, line)
    line = line.replace(".venv/bin/python", "python")
    line = re.sub(r"(?<![\w/.-])\./(?=run_grpo\.sh)", f"{ROOT}/", line)
    return re.sub(r"(?<![\w/.-])(scripts|train_configs|examples)/", rf"{ROOT}/\1/", line)


def at_end(line: str, options: str) -> str:
    """The command of a line, or of a loop, with further options."""
    return line.replace(" done", f" {options}; done", 1) if line.startswith("for ") else f"{line} {options}"


def write_files(page: Path, folder: Path) -> None:
    """Write what the page has its reader write."""
    for name, content in files_of(page).items():
        if "/" not in name:  # others are a change of the package, with tests of their own
            (folder / name).write_text(content, encoding="utf-8")
    (folder / "my.toml").write_text((ROOT / "train_configs" / "debug_cpu.toml").read_text(encoding="utf-8"))
    (folder / "scenario.toml").write_text("actors = 3\n")


def write_what_was_made_before(folder: Path) -> None:
    """Write MADE_BEFORE, and a data set."""
    shipped = SHIPPED_FOLDER / "debug_arithmetic"
    for name in MADE_BEFORE:
        (folder / name).mkdir(parents=True)
        for file in shipped.iterdir():
            if file.name != "config.json":
                (folder / name / file.name).symlink_to(file)
        sizes = {} if "latest" in name else {"vocab_size": 49152, "max_position_embeddings": 8192}
        config = json.loads((shipped / "config.json").read_text()) | sizes
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "gsm8k_train.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n' * 64)


def is_another_program(command: Command) -> bool:
    """Whether it is one of those that read a run, or need none."""
    modules = r"torchtitan\.(report|evaluate|config\.reference|inference\.engines\.documentation)|tests\.simulator"
    return bool(re.match(rf"python -m ({modules})|python scripts/compare_runs\.py|printf ", command.text))


TRAINING = [(page, command) for page in PAGES for command in commands_of(page) if is_training(command)]
TO_PLAN = {
    command.text[:90]: (page, command) for page, command in TRAINING if not reason(command, NOT_RUN | NOT_PLANNED)
}


def test_a_command_of_a_page_is_run_or_has_a_reason_not_to() -> None:
    commands = [command for page in PAGES for command in commands_of(page)]
    unknown = [
        str(command)
        for command in commands
        if not is_training(command) and not reason(command, NOT_RUN) and not is_another_program(command)
    ]
    assert not unknown
    texts = [command.text for command in commands]
    unused = [
        pattern for pattern in NOT_RUN | NOT_PLANNED | PLANNED if not any(re.search(pattern, text) for text in texts)
    ]
    assert not unused and len(TO_PLAN) > 25


@pytest.mark.parametrize("page, command", TO_PLAN.values(), ids=TO_PLAN)
def test_a_run_that_a_page_starts_can_be_planned(page: Path, command: Command, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    write_what_was_made_before(tmp_path)
    done = run(at_end(runs_elsewhere(command.text), "--dry-run"), tmp_path, Path(sys.executable))
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, and from this one what the wheel requires."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True,
        timeout=PATIENCE_S, check=True,
    ).stdout.strip()  # fmt: skip
    # A path file of a path file is not read: the checkout, which is installed here, is not found there.
    Path(packages, "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # With the checkout on the path, its metadata would do as this version.
    options = ["--quiet", "--no-deps", "--no-index", "--force-reinstall"]
    install = ["-m", "pip", "--python", str(python), "install", *options]
    subprocess.run(
        [sys.executable, *install, str(build_wheel(folder))], timeout=PATIENCE_S, check=True, capture_output=True
    )
    return python


def from_the_wheel(line: str) -> str:
    """A run's command with the wheel's program in place of run_grpo.sh, which only a checkout has."""
    config = re.search(r"CONFIG_FILE=(\S+) ", line)
    file = config[1] if config else "debug_cpu"
    name = Path(file).stem if "train_configs/" in file else file
    return re.sub(r"(?:CONFIG_FILE=\S+ )?\S*run_grpo\.sh", f"torchtitan-grpo --job.config_file {name}", line)


def short(line: str, steps: int) -> str:
    """The line with options that shorten it. A run has more steps than those before it, from which it may go on."""
    if re.search("--dry-run|--help", line):
        return line
    if "tests.simulator" in line:
        return at_end(line, SHORT_SIMULATION)
    if re.search(r"run_grpo\.sh|torchtitan-grpo --job", line):
        return at_end(re.sub(r"live_port \d+", f"live_port {free_ports(1)}", line), f"--training.steps {steps} {SHORT}")
    return line


def newest_step(line: str, folder: Path) -> str:
    """The line with the newest step in place of the page's."""

    def newest(found: re.Match[str]) -> str:
        steps = (folder / found[1]).glob("step-*")
        return f"{found[1]}/{max(steps, key=lambda step: int(step.name.partition('-')[2])).name}"

    return re.sub(r"(outputs/latest/(?:checkpoint|hf))/step-\d+", newest, line)


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.stem)
def test_commands_of_a_page_run_with_an_installed_wheel(page: Path, installed: Path, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    where = run("python -c 'import torchtitan; print(torchtitan.__file__)'", tmp_path, installed).stdout.strip()
    assert Path(where).is_relative_to(installed.parents[1])
    lines = [runs_elsewhere(command.text) for command in commands_of(page) if not reason(command, NOT_RUN | PLANNED)]
    if any("outputs/latest" in line for line in lines):
        lines.insert(0, f"{ROOT}/run_grpo.sh --checkpoint.enable true --checkpoint.last_save_in_hf true")
    failures = []
    for number, line in enumerate(lines, start=1):
        is_of_checkout = re.search(r"NGPU=|scripts/|tests\.", line)
        line = newest_step(line, tmp_path) if is_of_checkout else from_the_wheel(newest_step(line, tmp_path))
        line = short(line, 4 + number)
        if is_of_checkout:
            done = run(f"export PYTHONPATH={ROOT}; {line}", tmp_path, Path(sys.executable))
        else:
            done = run(line, tmp_path, installed)
        if done.returncode or "Traceback" in done.stderr:
            failures.append(f"{line}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    assert not failures, "\n\n".join(failures)
