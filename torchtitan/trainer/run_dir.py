"""The run folder: a fresh one per launch or the one to go on in, its `latest` link, its configuration, its epochs."""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from torchtitan.config.job_config import JobConfig
from torchtitan.config.toml import config_to_toml
from torchtitan.errors import UserError
from torchtitan.trainer.checkpoint_folder import whole_steps
from torchtitan.utils.child_process import LAUNCH_VARIABLE, LOSS_VARIABLE
from torchtitan.utils.json_lines import JsonLines, read_json_lines

logger = logging.getLogger(__name__)

LATEST = "latest"
CONFIG_FILE = "config.toml"
EPOCHS_FILE = "epochs.jsonl"


NEWEST = -1


@dataclass(frozen=True)
class Start:
    """Where the ranks begin."""

    run_dir: str
    load_step: int | None = None
    """The checkpoint to begin with (NEWEST: the newest whole one), None without one"""
    lost: str = ""
    """Why these ranks were started again: not empty where this launch has started ranks before"""


def open_run_directory(config: JobConfig) -> Start:
    """The folder that this launch writes to (rank 0 calls this once). Writes config.toml and the `latest` link.

    A fresh `{dump_folder}/{name}-{time}`, or with checkpoint.resume the folder of that run, as it is; then the
    configuration of the earlier launch is kept as config-1.toml, config-2.toml, … Ranks that were started before, by
    the same launcher or in the same job of a cluster, go on in their own folder, from their own newest checkpoint.

    Raises:
        UserError: the folder cannot be written, there is no whole checkpoint to resume from, or ranks were started
            again that save none.
    """
    root = Path(config.job.dump_folder)
    checkpoint = config.checkpoint
    try:
        root.mkdir(parents=True, exist_ok=True)
        launch = os.environ.get(LAUNCH_VARIABLE)
        own = root / f".launch-{launch}" if launch else None
        if own is not None and own.exists():
            lost = os.environ.get(LOSS_VARIABLE, "the job was started again")
            if not checkpoint.enable:
                raise UserError(f"{lost}, and without checkpoint.enable = true there is nothing to go on from")
            saved = whole_steps(own / checkpoint.folder)
            start = Start(str(own.resolve()), NEWEST if saved else None, lost)
        elif checkpoint.resume:
            start = Start(str(find_resumed(config)), checkpoint.load_step)
        else:
            start = Start(str(_fresh(root, config.job.name).resolve()))
        _write_config(Path(start.run_dir), config)
        _link(root / LATEST, Path(start.run_dir))
        if own is not None:
            _link(own, Path(start.run_dir))
    except OSError as error:
        raise UserError(f"job.dump_folder = {config.job.dump_folder!r} cannot be written: {error}") from error
    return start


def find_resumed(config: JobConfig) -> Path:
    """The run folder that checkpoint.resume names, if it holds the checkpoint that is to be loaded; else UserError."""
    wanted, root = config.checkpoint.resume, Path(config.job.dump_folder)
    path = root / LATEST if wanted == LATEST else Path(wanted)
    if not path.is_dir():
        raise UserError(f"checkpoint.resume = {wanted!r}: there is no folder {path}. {_candidates(root, config)}")
    path = path.resolve()
    steps = whole_steps(path / config.checkpoint.folder)
    if not steps:
        raise UserError(
            f"checkpoint.resume = {wanted!r}: no whole checkpoint in {path / config.checkpoint.folder}. "
            + _candidates(root, config)
        )
    if config.checkpoint.load_step >= 0 and config.checkpoint.load_step not in steps:
        raise UserError(
            f"checkpoint.load_step = {config.checkpoint.load_step}: {path} has whole checkpoints of steps "
            f"{', '.join(map(str, steps))} only"
        )
    return path


def mint_epoch(run_dir: str | Path) -> str:
    """A new epoch identity "e{n}-{random}", written to epochs.jsonl and on the disk before this returns."""
    path = Path(run_dir) / EPOCHS_FILE
    number = len(read_json_lines(path)) + 1
    epoch = f"e{number}-{secrets.token_hex(4)}"
    with JsonLines(path, durable=True) as file:
        file.write({"epoch": epoch, "time": round(time.time(), 3), "pid": os.getpid()})
    return epoch


def _fresh(root: Path, name: str) -> Path:
    base = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        path = root / (base if number == 1 else f"{base}-{number}")
        try:
            path.mkdir(parents=True)  # fails where another launch of this second was first
        except FileExistsError:
            continue
        return path
    raise UserError(f"there are 999 run folders named {root / base}-… already")


def _write_config(run_dir: Path, config: JobConfig) -> None:
    path = run_dir / CONFIG_FILE
    if path.exists():
        number = 1
        while (kept := run_dir / f"config-{number}.toml").exists():
            number += 1
        path.rename(kept)
    path.write_text(config_to_toml(config), encoding="utf-8")


def _link(link: Path, run_dir: Path) -> None:
    if link.exists() and not link.is_symlink():
        logger.warning("%s is not a link: it is left alone", link)
        return
    temporary = link.with_name(f".link-{secrets.token_hex(4)}")
    temporary.symlink_to(os.path.relpath(run_dir.resolve(), link.parent.resolve()))
    os.replace(temporary, link)


def _candidates(root: Path, config: JobConfig) -> str:
    """What could be resumed instead, newest first."""
    found = []
    for path in root.iterdir() if root.is_dir() else []:
        steps = [] if path.is_symlink() else whole_steps(path / config.checkpoint.folder)
        if steps:
            found.append((path.stat().st_mtime, f"{path} (step {steps[-1]})"))
    if not found:
        return f"No run in {root} has a whole checkpoint; start a new run without checkpoint.resume."
    return "Runs with a whole checkpoint: " + ", ".join(text for _, text in sorted(found, reverse=True)[:5])
