"""The run folder: a fresh one per launch or the one to go on in, its configuration, its epochs, its checkpoints.

A checkpoint is the folder `step-N` with a marker file; anything else is the remains of a save that was interrupted. A
save writes `step-N.tmp`, puts the marker in last and renames the folder, so that no reader takes a half for a whole.
The marker holds the size and the checksum of every file, and its own checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from torchtitan.config.job_config import JobConfig, config_to_toml, table_types, value_at, with_values
from torchtitan.config.run_folders import CHECKPOINTS, LATEST, NEWEST, launch_link, resumed_folder, resumed_step
from torchtitan.config.sources import flat
from torchtitan.config.values import read_toml, show
from torchtitan.errors import ConfigError, UserError
from torchtitan.models.shape.exports import EXPORT_FOLDERS, clean_exports, set_aside, steps_in
from torchtitan.rollout.data.rows import FILE_ENDINGS
from torchtitan.utils.child_process import LOSS_VARIABLE
from torchtitan.utils.files import file_checksum, sync_folder, write_file
from torchtitan.utils.json_lines import JsonLines, read_json_lines, write_whole

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.toml"
DATASETS = ("rollout.dataset", "eval.dataset")
# Keys whose values may be paths from the working folder.
PATHS = (
    *("job.dump_folder", "model.hf_assets_path", "lora.adapter_path", "distill.teacher", "rollout.replay"),
    *DATASETS,
)
EPOCHS_FILE = "epochs.jsonl"
LOCK_FILE = ".lock"
# Keys that say how a launch begins, not what the run is.
OF_THE_LAUNCH = ("job.config_file", "checkpoint.resume")

# Of checkpoints.
MARKER = "complete.json"
FORMAT = 2
_WHOLE_NAME = re.compile(r"step-(\d+)")
_LEFTOVER_NAME = re.compile(r"step-\d+(\.tmp|\.removed)?")


@dataclass(frozen=True)
class Start:
    """Where the ranks begin."""

    run_dir: str
    load_step: int | None = None
    """The checkpoint to begin with (NEWEST: the newest whole one), None without one"""
    lost: str = ""
    """Why these ranks were started again: not empty where this launch has started ranks before"""


def open_run_directory(config: JobConfig) -> Start:
    """The folder that this launch writes to (rank 0 calls this once).

    A fresh `{dump_folder}/{name}-{time}` with its configuration, or with checkpoint.resume the folder of that run, as
    it is. Either is claimed when nothing can be refused any more. Ranks that were started before, by the same launcher
    or in the same job of a cluster, go on in their own folder, from their own newest checkpoint.

    Raises:
        UserError: the folder cannot be written, there is no whole checkpoint to resume from, or ranks were started
            again that save none.
    """
    root = Path(config.job.dump_folder)
    checkpoint = config.checkpoint
    try:
        root.mkdir(parents=True, exist_ok=True)
        link = launch_link(config)
        if link is not None and link.exists():
            lost = os.environ.get(LOSS_VARIABLE, "the job was started again")
            if not checkpoint.enable:
                raise UserError(f"{lost}, and without checkpoint.enable = true there is no checkpoint to resume from")
            saved = whole_steps(link / CHECKPOINTS)
            start = Start(str(link.resolve()), NEWEST if saved else None, lost)
        elif checkpoint.resume:
            start = Start(str(find_resumed(config)), resumed_step(config))
        else:
            start = Start(str(_fresh(root, config.job.name).resolve()))
            _take(config, Path(start.run_dir))
    except OSError as error:
        raise ConfigError([f"job.dump_folder = {config.job.dump_folder!r} cannot be written: {error}"]) from error
    return start


def claim(config: JobConfig, run_dir: str | Path) -> dict[str, str]:
    """Make the folder this launch's: its config.toml, the `latest` link, and where ranks that this launch starts again
    go on, from the newest checkpoint. Twice is once.

    A run claims it when nothing can be refused any more, and what is newer than its checkpoint is out of the way. The
    configuration of the launch before is then kept as config-1.toml, config-2.toml, …

    Returns the keys whose values are others than that launch's -> both values.
    """
    changed = _take(config, Path(run_dir))
    _link(Path(config.job.dump_folder) / LATEST, Path(run_dir))
    return changed


def _take(config: JobConfig, run_dir: Path) -> dict[str, str]:
    """Write the configuration, and the link by which ranks find the folder that this launch starts again."""
    changed = _write_config(run_dir, config)
    if (link := launch_link(config)) is not None:
        _link(link, run_dir)
    return changed


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """While a run writes to its folder no other one may: each would replace the other's checkpoints, cut its record and
    take its metrics. Ends with the process at the latest. Raises UserError where another run has the folder."""
    with (run_dir / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run writes to {run_dir}: resume when that run has ended") from None
        except OSError as error:  # not every file system can do that
            logger.warning("%s cannot be locked (%s): do not resume this run before it has ended", run_dir, error)
        yield


def find_resumed(config: JobConfig) -> Path:
    """The run folder that checkpoint.resume names, if it holds the checkpoint that is to be loaded; else UserError."""
    wanted, root = config.checkpoint.resume, Path(config.job.dump_folder)
    path = resumed_folder(config)
    if path is None or not path.is_dir():
        raise UserError(f"checkpoint.resume = {wanted!r}: there is no folder {path}. {_candidates(root, config)}")
    path = path.resolve()
    steps = whole_steps(path / CHECKPOINTS)
    if not steps:
        raise UserError(
            f"checkpoint.resume = {wanted!r}: no whole checkpoint in {path / CHECKPOINTS}. " + _candidates(root, config)
        )
    if resumed_step(config) not in (NEWEST, *steps):
        raise UserError(
            f"checkpoint.resume = {wanted!r}: {path} has whole checkpoints of steps {', '.join(map(str, steps))} only"
        )
    return path


def new_epoch(run_dir: str | Path) -> str:
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


def _unused(paths: Iterable[Path]) -> Path:
    return next(path for path in paths if not path.exists())


def _write_config(run_dir: Path, config: JobConfig) -> dict[str, str]:
    config = with_absolute_paths(config)
    path, text = run_dir / CONFIG_FILE, config_to_toml(config)
    before = read_toml(str(path))[0]
    if path.exists() and path.read_text(encoding="utf-8") != text:
        path.rename(_unused(run_dir / f"config-{number}.toml" for number in itertools.count(1)))
    write_whole(path, text)
    return changed_keys(before, config)


def with_absolute_paths(config: JobConfig) -> JobConfig:
    """Return the configuration with absolute paths of files and folders that exist, so that what reads it later, such
    as an evaluation, may stand elsewhere."""
    changed = with_values(config, _all_absolute({key: value_at(config, key) for key in PATHS}))
    changed.source = [replace(source, values=_all_absolute(source.values)) for source in config.source]
    return with_values(changed, {"eval.set": [_all_absolute(values) for values in config.eval.set]})


def _all_absolute(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _absolute(key, value) for key, value in values.items()}


def _absolute(key: str, value: Any) -> Any:
    is_name = key in DATASETS and not str(value).endswith(FILE_ENDINGS)
    is_path = key in PATHS and value and not is_name and os.path.exists(value)
    return os.path.abspath(value) if is_path else value


def tables_of(config: JobConfig) -> dict[str, Any]:
    """The tables of a configuration, as a file has them."""
    return {**asdict(config), "source": [source.given() for source in config.source]}


def changed_keys(before: Mapping[str, Any], config: JobConfig) -> dict[str, str]:
    """The keys that have other values in `config` than in these tables -> both values; how a launch begins is none of
    them."""
    now = _by_key(tables_of(config))
    changed: dict[str, str] = {}
    for key, value in _by_key(before).items():
        if key not in OF_THE_LAUNCH and now.get(key, value) != value:
            changed[key] = f"{show(value)} -> {show(now[key])}"
    return changed


def _by_key(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The values of tables by the whole names of their keys, also in sources and evaluation sets, however a file has
    them."""
    values = dict(flat(tables, table_types()))
    values["source"] = [dict(flat(source, table_types())) for source in tables.get("source", [])]
    values["eval.set"] = []
    for evaluation_set in tables.get("eval", {}).get("set", []):
        of_set = flat(evaluation_set, table_types())
        values["eval.set"].append({key.removeprefix("eval."): value for key, value in of_set})
    return values


def _link(link: Path, run_dir: Path) -> None:
    if link.exists() and not link.is_symlink():
        logger.warning("%s is not a link, and stays as it is", link)
        return
    temporary = link.with_name(f".link-{secrets.token_hex(4)}")
    temporary.symlink_to(os.path.relpath(run_dir.resolve(), link.parent.resolve()))
    os.replace(temporary, link)


def _candidates(root: Path, config: JobConfig) -> str:
    """What could be resumed instead, newest first."""
    found = []
    for path in root.iterdir() if root.is_dir() else []:
        steps = [] if path.is_symlink() else whole_steps(path / CHECKPOINTS)
        if steps:
            found.append((path.stat().st_mtime, f"{path} (step {steps[-1]})"))
    if not found:
        return f"No run in {root} has a whole checkpoint; start a new run without checkpoint.resume."
    return "Runs with a whole checkpoint: " + ", ".join(text for _, text in sorted(found, reverse=True)[:5])


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def whole_steps(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [(_WHOLE_NAME.fullmatch(entry.name), entry) for entry in folder.iterdir()]
    return sorted(int(match[1]) for match, entry in found if match and (entry / MARKER).is_file())


def begin_checkpoint(folder: Path, step: int) -> Path:
    """The empty folder that a save of this step writes into."""
    path = folder / f"step-{step}.tmp"
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def describe_file(path: Path) -> dict[str, Any]:
    """Return the size and the checksum of a file, for the marker. Raises OSError."""
    return {"bytes": path.stat().st_size, "xxh3_128": file_checksum(path)}


def finish_checkpoint(folder: Path, step: int, files: Mapping[str, Any], **facts: Any) -> None:
    """Make the folder of begin_checkpoint() whole: marker, then rename, each on the disk before the next.

    files: describe_file() of each, by name.
    """
    temporary, final = folder / f"step-{step}.tmp", checkpoint_path(folder, step)
    write_file(temporary / MARKER, encode_marker({"format": FORMAT, "step": step, **facts, "files": files}))
    sync_folder(temporary)
    if final.exists():  # without a marker: whole ones are not saved again
        shutil.rmtree(final)
    temporary.rename(final)
    sync_folder(folder)


def encode_marker(facts: Mapping[str, Any]) -> bytes:
    """Return the content of a marker file: these facts and their checksum."""
    facts = {name: value for name, value in facts.items() if name != "checksum"}
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())
    return json.dumps(facts | {"checksum": checksum}, indent=1).encode()


def damage(path: Path, part: int = 0, parts: int = 1) -> str:
    """Return what is wrong with a whole checkpoint's files (every `parts`-th, from `part` on), or an empty string."""
    try:
        data = (path / MARKER).read_bytes()
        marker = json.loads(data)
        intact = encode_marker(marker) == data
        if marker["format"] != FORMAT and (intact or "checksum" not in marker):
            return (
                f"has checkpoint format {marker['format']}, which only the version reads that wrote it; this version "
                f"reads format {FORMAT}"
            )
        if not intact:
            return f"is damaged: {MARKER} is not as it was written"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"is damaged: {MARKER} cannot be read ({error!r})"
    for name, written in sorted(marker["files"].items())[part::parts]:
        try:
            found = describe_file(path / name)
        except OSError as error:
            return f"is damaged: {name} cannot be read ({error.strerror})"
        if found["bytes"] != written["bytes"]:
            return f"is damaged: {name} has {found['bytes']} of {written['bytes']} bytes. Was it copied only in part?"
        if found != written:
            return f"is damaged: {name} is not as it was written (its checksum differs)"
    return ""


def other_checkpoint(folder: Path, step: int) -> str:
    """Return what to do if the checkpoint of `step` cannot be loaded: which other one, whose files were read, can."""
    for other in reversed(whole_steps(folder)):
        if other != step and not damage(checkpoint_path(folder, other)):
            return (
                f"resume from step {other}, which is whole, with checkpoint.resume = {checkpoint_path(folder, other)}"
            )
    return f"{folder} has no other checkpoint that can be read: start a new run"


def go_back_to(run_dir: Path, step: int) -> None:
    """Delete what interrupted saves, deletions and exports left behind, and rename the checkpoints and exports after
    `step`, from which a run goes on: nothing may take them for the run's newest any more.
    """
    checkpoints = run_dir / CHECKPOINTS
    for entry in checkpoints.iterdir() if checkpoints.is_dir() else []:
        if _LEFTOVER_NAME.fullmatch(entry.name) and not (
            _WHOLE_NAME.fullmatch(entry.name) and (entry / MARKER).is_file()
        ):
            logger.info("removing the incomplete checkpoint %s", entry)
            shutil.rmtree(entry)
    for name in EXPORT_FOLDERS:
        clean_exports(run_dir / name)
    for place in (checkpoints, *(run_dir / name for name in EXPORT_FOLDERS)):
        for later, path in steps_in(place).items():
            if later > step:
                logger.info("step %d is being resumed: the later %s is now %s", step, path, set_aside(path).name)


def prune_checkpoints(folder: Path, keep_latest_k: int) -> None:
    """Delete all but the newest whole checkpoints; 0 keeps all. The last whole one always stays."""
    for step in whole_steps(folder)[:-keep_latest_k] if keep_latest_k > 0 else []:
        removed = folder / f"step-{step}.removed"
        checkpoint_path(folder, step).rename(removed)  # never a whole-looking half while files go
        shutil.rmtree(removed)
