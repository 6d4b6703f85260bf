"""Rules for the folders and files that a run reads and writes, and for the packages of its loggers."""

from __future__ import annotations

import os
from pathlib import Path

from torchtitan.config.run_folders import CHECKPOINTS, resumed_folder
from torchtitan.config.values import read_toml
from torchtitan.preflight.check import Check
from torchtitan.utils.definitions import is_installed


def check_files(check: Check) -> None:
    """Check folders that are read or written."""
    config, refuse = check.config, check.refuse
    dump_folder = Path(config.job.dump_folder)
    if problem := _folder_problem(dump_folder):
        refuse("job.dump_folder", True, problem)
    replay, folder = config.rollout.replay, resumed_folder(config)
    missing = replay and not (Path(replay) / "journal.jsonl").is_file()
    refuse("rollout.replay", missing, "must be a run folder with a journal.jsonl")
    if replay and not missing:
        tables, _ = read_toml(str(Path(replay) / "config.toml"))
        recorded = tables.get("rollout", {}).get("temperature")
        # The trainer would score the samples at another temperature than they were sampled with.
        other = recorded is not None and recorded != config.rollout.temperature
        refuse("rollout.temperature", other, f"must be {recorded}, as of the samples of rollout.replay = {replay}")
    if folder is not None:
        checkpoints = folder / CHECKPOINTS
        if not any(checkpoints.glob("step-*")):
            what = f"there is no checkpoint in {checkpoints}"
            if not folder.is_dir():
                what = f"{folder} is a link to nothing" if folder.is_symlink() else f"there is no run folder {folder}"
            # A folder of thousands of runs takes long to look through.
            runs = [run for run in dump_folder.glob("*") if not run.is_symlink()]
            found = sorted(str(run) for run in runs if any((run / CHECKPOINTS).glob("step-*")))
            others = f"; runs with checkpoints: {', '.join(found[-5:]) or 'none in job.dump_folder'}"
            refuse("checkpoint.resume", True, what + others)
    no_wandb = "wandb" in config.metrics.loggers and not is_installed("wandb")
    text = "needs the package wandb: EXTRAS=wandb in front of ./run_grpo.sh installs it"
    refuse("metrics.loggers", no_wandb, text)


def _folder_problem(folder: Path) -> str:
    """Return why files cannot be written to this folder, which may be made first; empty if they can."""
    existing = next((path for path in (folder, *folder.absolute().parents) if os.path.lexists(path)), Path("/"))
    if not existing.is_dir():
        return f"must be a folder, or a path where one can be made: {existing} is not a folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"must be a folder that can be written: {existing.absolute()} cannot"
    return ""
