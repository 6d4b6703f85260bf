"""Folders of exports in a run's folder: hf/step-N (whole checkpoints) and adapter/step-N (adapters alone); what an
export has besides weights; and checkpoints that come with the package.

An export is written to a hidden folder beside its place and then renamed, so that `step-N` is whole or not there.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchtitan.models.shape.checkpoint_files import read_json
from torchtitan.models.shape.composite import text_config

logger = logging.getLogger(__name__)

WHOLE, ADAPTERS = "hf", "adapter"
EXPORT_FOLDERS = (WHOLE, ADAPTERS)
# The folder of a run that has its checkpoints.
# Before the names of exports and checkpoints of steps that their run has gone back behind.
ABANDONED = "abandoned-"
# What an export copies of the checkpoint that the policy began with, if it exists.
ASSET_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
    # Those of a composite's images, videos and sound.
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
# Named chat templates besides the default one: tool_use.jinja, for example.
TEMPLATES_FOLDER = "additional_chat_templates"
# Policies of the built-in tasks (assets/README.md); a configuration gives the name alone.
SHIPPED_FOLDER = Path(__file__).resolve().parents[2] / "assets"
SHIPPED = tuple(f"debug_{task}" for task in ("arithmetic", "arithmetic_moe", "calculator", "guess", "mix", "random"))
_STEP = re.compile(r"step-(\d+)")
# What staging_folder() and publish_folder() make for the time of an export.
_STAGED = re.compile(r"\.(step-\d+)-[0-9a-f]{8}")
_REPLACED = re.compile(r"\.(step-\d+)-old-\w+")


def export_path(run_dir: Path, kind: str, step: int) -> Path:
    """The folder of the export after a step. kind: WHOLE or ADAPTERS."""
    return run_dir / kind / f"step-{step}"


def steps_in(folder: Path) -> dict[int, Path]:
    """The folders `step-N` in a folder, by step, oldest first."""
    entries = folder.iterdir() if folder.is_dir() else []
    found: dict[int, Path] = {}
    for entry in entries:
        match = _STEP.fullmatch(entry.name)
        if match and entry.is_dir():
            found[int(match[1])] = entry
    return dict(sorted(found.items()))


def set_aside(path: Path) -> Path:
    """Rename a folder, so that nothing takes it for its run's newest any more. Returns its new path."""
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    names = (path.with_name(f"{ABANDONED}{path.name}{ending}") for ending in endings)
    return path.rename(next(name for name in names if not name.exists()))


def aside_text(path: Path) -> str:
    """Return where an export has gone that is not there, or nothing."""
    found = sorted(path.parent.glob(f"{ABANDONED}{path.name}*")) if path.name and not path.exists() else []
    return f"; its run went back to an earlier step, and the export is now {found[-1]}" if found else ""


def newest_export(path: str) -> str:
    """Return the run's last exported checkpoint if `path` is a run's folder, and the package's checkpoint if `path` is
    its name and there is nothing of this name here; else `path`. Links are resolved."""
    path = with_shipped(path)
    exports = [entry for entry in steps_in(Path(path) / WHOLE).values() if (entry / "config.json").is_file()]
    return without_links(str(exports[-1]) if exports else path)


def with_shipped(path: str) -> str:
    """Return the folder of the package's checkpoint if `path` is its name and nothing here has it, else `path`."""
    return str(SHIPPED_FOLDER / path) if path in SHIPPED and not os.path.exists(path) else path


def without_links(path: str) -> str:
    """Resolve links, because `latest` will point to this very run. A path without a link, or to nothing, is kept."""
    real = os.path.realpath(path)
    return real if os.path.exists(path) and real != os.path.abspath(path) else path


def copy_assets(source: Path, target: Path) -> None:
    """Copy what belongs to a policy besides its weights: tokenizer, chat templates, settings of generation."""
    for name in ASSET_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if (source / TEMPLATES_FOLDER).is_dir():
        shutil.copytree(source / TEMPLATES_FOLDER, target / TEMPLATES_FOLDER, dirs_exist_ok=True)


def name_end_tokens(directory: Path, end_token_ids: Sequence[int]) -> None:
    """Write these tokens, besides those that stand there, as ends of a completion into the generation_config.json of
    a checkpoint directory, which is what engines and transformers obey."""
    path = directory / "generation_config.json"
    model = text_config(read_json(directory / "config.json"))
    # Without the file transformers takes these from config.json.
    start = {key: model[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if model.get(key) is not None}
    settings = read_json(path) if path.is_file() else start
    before = settings.get("eos_token_id")
    if before is None:
        before = []
    elif not isinstance(before, list):
        before = [before]
    ends = list(dict.fromkeys([*before, *end_token_ids]))
    if ends != before:
        settings["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        path.write_text(json.dumps(settings, indent=2) + "\n")


def staging_folder(directory: Path) -> Path:
    """Make a hidden folder beside `directory`, for `publish_folder`."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = directory.parent.resolve() / f".{directory.name}-{secrets.token_hex(4)}"
    staging.mkdir()  # tempfile's would be its owner's alone, whatever the umask
    return staging


def publish_folder(staging: Path, directory: Path) -> None:
    """Move the finished folder into place; an older one is set aside first and removed last."""
    if not directory.exists():
        os.rename(staging, directory)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}-old-", dir=staging.parent))
    os.rename(directory, aside)
    try:
        os.rename(staging, directory)
    except OSError:
        os.rename(aside, directory)
        raise
    shutil.rmtree(aside)


def clean_exports(folder: Path) -> None:
    """Remove what exports that were killed have left in their folder. The export that one of them was about to replace
    gets its name back."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        replaced = _REPLACED.fullmatch(entry.name)
        if replaced and any(entry.iterdir()) and not (folder / replaced[1]).exists():
            logger.info("the export %s was about to be replaced and is there again", folder / replaced[1])
            entry.rename(folder / replaced[1])
        elif replaced or _STAGED.fullmatch(entry.name):
            logger.info("removing the incomplete export %s", entry)
            shutil.rmtree(entry)
