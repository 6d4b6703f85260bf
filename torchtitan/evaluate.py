"""Evaluate checkpoints with the evaluation of a run: its held-out prompts, rewards and engine.

    python -m torchtitan.evaluate outputs/latest                         every whole checkpoint of a run
    python -m torchtitan.evaluate outputs/latest/checkpoint/step-20      one of them
    python -m torchtitan.evaluate outputs/latest/hf/step-60 --backend vllm --samples 16
    python -m torchtitan.evaluate path/to/model --config my.toml

What is evaluated comes first: run folders, trainer checkpoints, and Hugging Face directories. Those of a run have its
configuration unless --config names another; further options are keys, such as --eval.temperature 0.7. Nothing is
trained. The result is a table, and in {job.dump_folder}/evaluations evaluation.json, every completion with its reward
(completions.jsonl) and a report that shows them. For a model that needs several ranks:
torchrun --nproc-per-node N -m torchtitan.evaluate …
"""

from __future__ import annotations

import sys

from torchtitan.errors import another_package

if problem := another_package():
    sys.exit(problem)

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.config.engines import engine_names
from torchtitan.config.evaluations import EVAL_KEYS, eval_configs
from torchtitan.config.job_config import Eval, JobConfig
from torchtitan.config.reading import PLACE, read_command_line
from torchtitan.config.run_folders import CHECKPOINTS
from torchtitan.config.values import read_toml
from torchtitan.errors import ConfigError, UserError
from torchtitan.grpo_train import follow_commands
from torchtitan.models.shape.exports import newest_export, with_shipped
from torchtitan.preflight.hub import download, hub_model
from torchtitan.preflight.validate import ready
from torchtitan.report.curves import evaluation_table
from torchtitan.report.metrics import COMPLETIONS_FILE
from torchtitan.trainer.run_dir import CONFIG_FILE, MARKER, whole_steps
from torchtitan.utils.json_lines import read_json_lines, write_whole
from torchtitan.utils.machine import leave, sleep_between_regions
from torchtitan.utils.ranks import from_torchrun

RESULT_FILE = "evaluation.json"
# What an evaluation has no use for, or must not touch. Nothing waits for it, so it may take longer than in a run.
FIXED: dict[str, str] = {
    "checkpoint.enable": "false", "checkpoint.resume": "", "rollout.replay": "",
    "eval.stop_at": "0", "eval.timeout_s": "3600", "sft.epochs": "0", "grpo.kl_coefficient": "0",
    "metrics.loggers": "[]", "metrics.live_port": "0",
    "metrics.profile_freq": "0",
}  # fmt: skip
# Of a directory with whole weights: an export has the adapters merged.
OF_A_DIRECTORY = {
    "model.name": "auto", "model.flavor": "", "lora.rank": "0", "lora.adapter_path": "", "lora.base_bits": "16",
    "lora.modules_to_save": "[]",
}  # fmt: skip
# A student is evaluated without its teacher.
WITHOUT_TEACHER = {
    "job.stage": "grpo", "distill.teacher": "", "distill.server.url": "", "distill.add_rewards": "false",
    "distill.divergence": "sampled", "distill.hint": "",
}  # fmt: skip


@dataclass
class Evaluated:
    """What one start of the engines evaluates."""

    config_file: str
    place: Path
    """The folder of a run's checkpoints, or a Hugging Face directory"""
    steps: list[int] = field(default_factory=list)
    """The checkpoints in that folder; none for a directory"""


def find(path: str, config_file: str = "") -> Evaluated:
    """Return what a path names. config_file: replaces the configuration of its run.

    Raises UserError if there is nothing to evaluate, or no configuration that says on what.
    """
    model = hub_model(with_shipped(path))
    try:
        place = download(model, weights=True) if model else Path(with_shipped(path)).expanduser().resolve()
    except UserError as error:
        raise UserError(f"{path}: there is no such folder (looked in {Path.cwd()}), and {error}") from error
    run = next((folder for folder in (place, *place.parents[:2]) if (folder / CONFIG_FILE).is_file()), None)
    config_file = config_file or ("" if run is None else str(run / CONFIG_FILE))
    if not place.is_dir():
        raise UserError(f"{path}: there is no such folder (looked in {Path.cwd()})")
    if place == run:
        folder = run / CHECKPOINTS
        if steps := whole_steps(folder):
            return Evaluated(config_file, folder, steps)
        place = Path(newest_export(str(run)))
        if place == run:
            raise UserError(
                f"{path}: the run has no whole checkpoint (checkpoint.enable = true writes them) and no export in hf/ "
                "(checkpoint.last_save_in_hf = true)"
            )
    is_checkpoint = (place / MARKER).is_file()
    if not is_checkpoint and not (place / "config.json").is_file():
        raise UserError(
            f"{path} is no run folder ({CONFIG_FILE}), no whole checkpoint of one ({MARKER}) and no Hugging Face "
            "directory (config.json)"
        )
    if not config_file:
        raise UserError(
            f"{path} belongs to no run that says on what to evaluate it: add --config FILE, with the held-out prompts "
            "(eval.dataset, or rollout.dataset and rollout.held_out_fraction) and what judges them (rewards.functions "
            "or [environment]), such as --config train_configs/debug_cpu.toml"
        )
    if is_checkpoint:
        if not re.fullmatch(r"step-\d+", place.name):
            step = re.sub(r".*(step-\d+).*", r"\1", place.name)
            raise UserError(
                f"{path} is no checkpoint of its run any more, which went back to an earlier step: to evaluate it, "
                f"move it to a folder of its own as {step}, and name the run's {CONFIG_FILE} with --config"
            )
        return Evaluated(config_file, place.parent, [int(place.name.rpartition("-")[2])])
    return Evaluated(config_file, place)


def configure(evaluated: Evaluated, options: Sequence[str], sets: Sequence[str] = ()) -> JobConfig:
    """Return the validated configuration of an evaluation. options: words of the command line, which come last. sets:
    names of what to evaluate; empty for all.

    Raises ConfigError, or UserError for a set that the configuration does not have.
    """
    tables, _ = read_toml(evaluated.config_file)
    values = dict(FIXED)
    if not evaluated.steps:
        values |= OF_A_DIRECTORY | {"model.hf_assets_path": str(evaluated.place)}
    is_student = tables.get("job", {}).get("stage") == "distill"
    values |= WITHOUT_TEACHER if is_student else {}
    words = [word for key, value in values.items() for word in (f"--{key}", value)]
    draft, is_dry = read_command_line(["--job.config_file", evaluated.config_file, *words, *options])
    if is_dry:
        raise UserError(
            "--dry-run: an evaluation has no plan of its own; that of its configuration is printed by "
            f"python -m torchtitan.preflight --dry-run --job.config_file {evaluated.config_file}"
        )
    if is_student:
        draft.sources = [_without(source, _is_of_teacher) for source in draft.sources]
    folder = Path(draft.value("job.dump_folder"))
    # What the command line says is said for all sets.
    given = {key for key in EVAL_KEYS if draft.written.get(f"eval.{key}", ("",))[0] == PLACE}
    if draft.value("eval.num_prompts") == 0:
        if "num_prompts" in given:
            raise UserError("eval.num_prompts = 0 evaluates nothing: must be at least 1")
        draft.values["eval.num_prompts"] = Eval.num_prompts  # the run itself evaluates nothing

    def is_given(key: str) -> bool:
        return key.removeprefix("eval.") in given

    draft.values["eval.set"] = [_without(table, is_given) for table in draft.values.get("eval.set", [])]
    config = ready(draft)
    known = [name for name, _ in eval_configs(config) if name]
    if unknown := [name for name in sets if name not in known]:
        has = f"has the sets {', '.join(known)}" if known else "names none ([[eval.set]], [[source]])"
        raise UserError(f"--set {' '.join(unknown)}: {evaluated.config_file} {has}")
    tables_of_sets = {table["name"]: table for table in config.eval.set}
    config.eval.set = [tables_of_sets.get(name, {"name": name, "source": name}) for name in sets or tables_of_sets]
    config.job.dump_folder = str(folder / "evaluations")
    config.training.steps = 0  # which no file can ask for
    return config


def _without(table: Mapping[str, Any], is_left_out: Callable[[str], bool]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if not is_left_out(key)}


def _is_of_teacher(key: str) -> bool:
    return key.partition(".")[0] == "distill"


def evaluate(evaluated: Evaluated, config: JobConfig) -> tuple[Path, list[dict[str, Any]], list[str], int]:
    """Evaluate on this rank, with the ranks and engines of a run (collective).

    Returns the folder that was written, on rank 0 the figures of every checkpoint in their order, the checkpoints that
    were deleted before their turn, and the exit code: 0, or 128 + the signal that stopped it. Raises UserError if an
    evaluation is missing, or all checkpoints were deleted.
    """
    sleep_between_regions()  # before torch is imported
    from torchtitan.trainer.commands import Kind
    from torchtitan.trainer.job import TrainingJob

    with TrainingJob(config) as job:
        names, gone = list[str](), list[str]()
        steps: list[int | None] = [*evaluated.steps]
        for step in steps or [None]:
            name = str(evaluated.place if step is None else evaluated.place / f"step-{step}")
            if step is not None and not job.load(evaluated.place, step):
                gone.append(name)
                continue
            names.append(name)
            job.start()
            if follow_commands(job).kind is Kind.STOP:
                break
        if not names:
            raise UserError(f"{evaluated.place}: its run has deleted {', '.join(map(short_name, gone))} meanwhile")
        job.raise_failure()
        folder, code, is_first = job.run_dir, job.exit_code, job.controller is not None
    rows = [row for row in read_json_lines(folder / "metrics.jsonl") if "eval/version" in row] if is_first else []
    if is_first and not code and len(rows) < len(names):
        events = read_json_lines(folder / "events.jsonl")
        reasons = [event["reason"] for event in events if event["kind"] == "evaluation_missing"]
        raise UserError(f"an evaluation is missing: {'; '.join(reasons)} (logs in {folder})")
    return folder, [{"checkpoint": name, **row} for name, row in zip(names, rows, strict=False)], gone, code


def short_name(checkpoint: str) -> str:
    """Return the name of a checkpoint in tables."""
    return "/".join(Path(checkpoint).parts[-2:])


def show_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the figures, one line per checkpoint."""
    from rich.console import Console
    from rich.table import Table

    head, lines = evaluation_table([{**row, "step": short_name(row["checkpoint"])} for row in rows])
    shown = [number for number, name in enumerate(head) if name not in ("version", "time_s", "redone")]
    table = Table("checkpoint", *(head[number] for number in shown[1:]), box=None)
    for line in lines:
        table.add_row(*(_cell(line[number]) for number in shown))
    # A file or a pipe is as wide as it has to be.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _cell(value: str | float | None) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:.4g}"


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments and the words of further options, which are keys of the configuration."""
    # Options that are unknown here have values, which must not be taken for paths.
    first = next((number for number, word in enumerate(argv) if word.startswith("-")), len(argv))
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan.evaluate", usage="%(prog)s PATH [PATH …] [options] [--table.key value …]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--config", default="", metavar="FILE", help="TOML file that says on what to evaluate")
    parser.add_argument("--backend", help=f"for inference.backend: {' or '.join(engine_names())}")
    parser.add_argument("--samples", help="for eval.samples_per_prompt")
    parser.add_argument("--prompts", help="for eval.num_prompts")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME", help="of [[eval.set]] or [[source]]; else all")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"instead of {RESULT_FILE} in the folder")
    arguments, options = parser.parse_known_args(argv[first:])
    arguments.paths = list(argv[:first])
    if not arguments.paths:
        parser.error("name a run folder, a checkpoint or a Hugging Face directory first")
    for name, key in (
        ("backend", "inference.backend"),
        ("samples", "eval.samples_per_prompt"),
        ("prompts", "eval.num_prompts"),
    ):
        if (value := getattr(arguments, name)) is not None:
            options += [f"--{key}", value]
    return arguments, options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments, options = parse(sys.argv[1:] if argv is None else argv)
    rows: list[dict[str, Any]] = []
    gone: list[str] = []
    folders: list[Path] = []
    is_started = False
    try:
        jobs: dict[tuple[str, Path, bool], Evaluated] = {}
        for evaluated in [find(path, arguments.config) for path in arguments.paths]:
            same = jobs.setdefault((evaluated.config_file, evaluated.place, bool(evaluated.steps)), evaluated)
            same.steps = sorted({*same.steps, *evaluated.steps})
        # All of them before the first one starts: a mistake must not cost an evaluation.
        configs = [configure(evaluated, options, arguments.set) for evaluated in jobs.values()]
        is_started = True
        for evaluated, config in zip(jobs.values(), configs, strict=True):
            folder, figures, missed, code = evaluate(evaluated, config)
            rows += figures
            gone += missed
            folders.append(folder)
            if code:
                return code
        if from_torchrun("RANK", "0") == 0:
            show_table(rows)
            if gone:
                text = (
                    f"not evaluated, because their run has deleted them meanwhile: {', '.join(map(short_name, gone))}"
                )
                print(f"warning: {text}", file=sys.stderr, flush=True)
            output = arguments.output or folder / RESULT_FILE
            write_whole(output, json.dumps({"evaluations": rows, "deleted": gone}, indent=1) + "\n")
            print(output)
            print(*(folder / COMPLETIONS_FILE for folder in folders), sep="\n")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        # Before the start it is a mistake in what was asked for, as a configuration has it.
        return getattr(error, "exit_code", 1) if is_started else ConfigError.exit_code
    return 0


if __name__ == "__main__":
    leave(main())
