"""Models of the Hugging Face Hub: a name such as Qwen/Qwen3-0.6B becomes a folder in the cache of huggingface_hub.

A model is downloaded once: what the cache holds whole is used without asking the Hub, so that all ranks of a machine
use the revision that its first process has downloaded. The name of the folder ends in the commit, and the run's
config.toml has that folder.

huggingface_hub is imported only where a configuration names a model of the Hub.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torchtitan.config.job_config import JobConfig
from torchtitan.config.reading import Problem
from torchtitan.config.run_folders import LATEST, launch_link, resumed_folder
from torchtitan.config.teachers import teacher_directories
from torchtitan.config.values import read_toml, show
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_files import INDEX_FILE
from torchtitan.models.shape.exports import ASSET_FILES, SHIPPED, TEMPLATES_FOLDER
from torchtitan.preflight.memory import size_text

MAIN = "main"
SOURCES = "source."
_NAME = re.compile(r"([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?")
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})")
SMALL_FILES = ("config.json", INDEX_FILE, *ASSET_FILES, f"{TEMPLATES_FOLDER}/*.jinja")
WEIGHTS = "*.safetensors"
# The same weights in another layout, beside those that transformers loads.
DUPLICATES = ("*/*.safetensors", "consolidated*.safetensors")
# For how long a process waits for another one of this machine that downloads the same model.
WAIT_S = 24 * 3600.0


@dataclass(frozen=True)
class HubModel:
    """A model of the Hub."""

    name: str
    """owner/model"""
    revision: str = MAIN
    """A branch, a tag or a commit"""

    def __str__(self) -> str:
        return self.name if self.revision == MAIN else f"{self.name}@{self.revision}"


def hub_model(path: str) -> HubModel | None:
    """Return the model of the Hub that `path` names; None for an empty path and for one of this machine.

    owner/model names one where there is no folder `owner`, owner/model@revision always, and so does the folder of a
    snapshot that has gone from the cache. What exists here is never one, nor is a checkpoint of the package, nor the
    link to the newest run (outputs/latest).
    """
    if not path or Path(path).exists():
        return None
    if snapshot := _SNAPSHOT.search(path):
        owner, name, commit = snapshot.groups()
        return HubModel(f"{owner}/{name}", commit)
    named = _NAME.fullmatch(path)
    if named is None or path.startswith(".") or Path(path).name in (*SHIPPED, LATEST):
        return None
    name, revision = named.groups()
    if revision is None and Path(path).parent.is_dir():
        return None
    return HubModel(name, revision or MAIN)


def is_snapshot(folder: Path) -> bool:
    """Whether a folder is that of a revision in the cache of huggingface_hub."""
    return _SNAPSHOT.search(str(folder.absolute())) is not None


class HubFolders:
    """The folders of the models that a configuration names. First only their small files are downloaded, by which the
    configuration is checked, and then the weights."""

    def __init__(self, config: JobConfig):
        self.problems: list[Problem] = []
        self._has_names = False
        self._recorded = _recorded_commits(config)

    def find(self, key: str, path: str, asks: bool = True, of_source: bool = False) -> str:
        """Return the folder of the model if `path`, the value of `key`, names one of the Hub, else `path`. A run that
        goes on uses the revision that it began with. What fails becomes one of the problems. asks: if not, only the
        cache is looked at, and a model that it does not hold is no problem. of_source: the value is a source's."""
        model = hub_model(path)
        if model is None:
            return path
        if model.revision == MAIN:
            model = replace(model, revision=self._first_revision(SOURCES + key if of_source else key, model.name))
        if not asks:
            return str(_cached(model, weights=False) or path)
        self._has_names = True
        try:
            return str(download(model, weights=False))
        except UserError as error:
            text = f"{key} = {show(path)} is not a directory (looked in {Path.cwd()}), and {error}"
            self.problems.append(Problem(key, text))
            return path

    def _first_revision(self, key: str, name: str) -> str:
        """Return the revision of a model that the run began with. Two keys may name two of them: this key's counts, and
        that of other keys only if it is the only one."""
        for keys in ((key,), {recorded.key for recorded in self._recorded}):
            commits = {found.commit for found in self._recorded if found.name == name and found.key in keys}
            if len(commits) == 1:
                return commits.pop()
        return MAIN

    def lacking(self, config: JobConfig) -> dict[str, Lacking]:
        """Return what lacking_weights() does. Nothing is asked of huggingface_hub where find() was given no name."""
        return lacking_weights(config) if self._has_names else {}

    def download_weights(self, lacking: Mapping[str, Lacking]) -> None:
        """Download what lacking_weights() has returned. What fails becomes one of the problems."""
        for key, lack in lacking.items():
            try:
                download(lack.model, weights=True, size=lack.size)
            except UserError as error:
                self.problems.append(Problem(key, f"{key}: {error}"))


class Lacking(NamedTuple):
    """Weights that a run needs and the cache does not hold whole."""

    model: HubModel
    size: int
    """Bytes to download; 0 where the cache has no list of the files"""


def lacking_weights(config: JobConfig) -> dict[str, Lacking]:
    """Return the weights that the run needs and the cache of huggingface_hub does not hold whole, by the key that names
    the model."""
    found = {}
    for key, path in {"model.hf_assets_path": config.model.hf_assets_path, **teacher_directories(config)}.items():
        folder = Path(path).absolute()
        snapshot = _SNAPSHOT.search(str(folder))
        if snapshot is None or not _is_in_cache(folder):
            continue
        owner, name, commit = snapshot.groups()
        model = HubModel(f"{owner}/{name}", commit)
        if not _is_listed(model):
            is_whole = not _absent(folder, weights=True)
        else:
            is_whole = _cached(model, weights=True) is not None
        if not is_whole:
            found[key] = Lacking(model, _bytes_of_weights(model, folder))
    return found


def _is_in_cache(folder: Path) -> bool:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).resolve() in folder.resolve().parents


def download(model: HubModel, weights: bool, size: int = 0) -> Path:
    """Return the folder of a model, whose files are downloaded if the cache does not hold all of them.

    weights: whether its weights are needed, too. size: how many bytes they have, for what is printed.

    Raises:
        UserError: the Hub does not give it, the download broke off, or there is no network and it is not in the cache.
    """
    if (folder := _cached(model, weights)) is not None:
        return folder
    from huggingface_hub import constants, snapshot_download

    try:
        with _alone(model):
            if (folder := _cached(model, weights)) is not None:
                return folder  # another process has downloaded it meanwhile
            if not constants.HF_HUB_OFFLINE:
                what = f"{size_text(size)} of weights" if weights else "configuration and tokenizer"
                print(f"[hub] downloading {model} from {constants.ENDPOINT}: {what}", file=sys.stderr, flush=True)
            allowed, ignored = _patterns(weights)
            found = snapshot_download(
                model.name, revision=model.revision, allow_patterns=allowed, ignore_patterns=ignored
            )
    except (
        Exception
    ) as error:  # huggingface_hub raises those of its HTTP library, which is not the same in all versions
        raise UserError(_explain(model, error)) from error
    folder = Path(found)
    # Without the Hub's list of files, whatever the cache has of them was returned.
    if not _is_listed(model) and (absent := _absent(folder, weights)):
        raise UserError(f"{folder} has no {absent}, and {_how_to_fetch(model)}")
    if weights:
        print(f"[hub] {model} is in {folder}", file=sys.stderr, flush=True)
    return folder


def _patterns(weights: bool) -> tuple[list[str], list[str]]:
    return [*SMALL_FILES, *[WEIGHTS] * weights], [*DUPLICATES]


def _cached(model: HubModel, weights: bool) -> Path | None:
    """Return the folder of a model if the cache holds all its files, by the list that the Hub gave of them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    allowed, ignored = _patterns(weights)
    if not _is_listed(model):
        return None
    try:
        found = snapshot_download(
            model.name,
            revision=model.revision,
            allow_patterns=allowed,
            ignore_patterns=ignored,
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    return Path(found)


def _is_listed(model: HubModel) -> bool:
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        get_cached_repo_tree(model.name, revision=model.revision)
    except CachedRepoTreeNotFoundError:
        return False
    return True


def _bytes_of_weights(model: HubModel, folder: Path) -> int:
    from huggingface_hub import get_cached_repo_tree

    if not _is_listed(model):
        return 0
    sizes = {file.path: file.size for file in get_cached_repo_tree(model.name, revision=model.revision)}
    wanted = set(fnmatch.filter(sizes, WEIGHTS))
    for pattern in DUPLICATES:
        wanted -= set(fnmatch.filter(sizes, pattern))
    return sum(sizes[name] for name in wanted if not (folder / name).exists())


@contextlib.contextmanager
def _alone(model: HubModel) -> Iterator[None]:
    """Let one process of this machine download a model at a time. The others then find it in the cache."""
    from filelock import Timeout
    from huggingface_hub import constants
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        yield  # nothing is written, and the cache may be another user's
        return
    folder = Path(constants.HF_HUB_CACHE) / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = WeakFileLock(folder / f"torchtitan--{model.name.replace('/', '--')}.lock", timeout=WAIT_S)
    try:
        lock.__enter__()
    except Timeout as error:
        raise UserError(
            f"another process has been downloading {model} for {WAIT_S / 3600:.0f} hours: end it"
        ) from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def _absent(folder: Path, weights: bool) -> str:
    """Return what a folder lacks of a checkpoint; empty if it has everything that every checkpoint has."""
    names = ["config.json", "tokenizer.json"]
    if weights and (folder / INDEX_FILE).is_file():
        names += sorted(set(re.findall(r'"([^"/]+\.safetensors)"', (folder / INDEX_FILE).read_text())))
    absent = [name for name in names if not (folder / name).is_file()]
    if weights and not any(folder.glob(WEIGHTS)):
        absent.append(WEIGHTS)
    return ", ".join(absent)


def _explain(model: HubModel, error: Exception) -> str:
    """Return why a model could not be downloaded, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RevisionNotFoundError

    if isinstance(error, UserError):
        return str(error)
    if constants.HF_HUB_OFFLINE:
        return _how_to_fetch(model)
    cause: BaseException | None = error
    if isinstance(error, LocalEntryNotFoundError):
        cause = error.__cause__ or error
    hub, kept = constants.ENDPOINT, "start it again, files that have arrived are kept"
    if isinstance(cause, RevisionNotFoundError):
        return f"{model.name} has no revision {model.revision} on {hub}"
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        if status in (401, 403):
            return (
                f"{hub} answers {status} for {model.name}: there is no such model, or it is gated or private; for one "
                f"of those accept its terms on {hub}/{model.name} and set HF_TOKEN"
            )
        if status == 404:
            return f"{hub} answers 404: it has no model {model.name}, or not all of its files"
        return f"{hub} answers {status} for {model.name}: try again later, or set HF_ENDPOINT to another mirror"
    text = f"{type(cause).__name__}: {cause}"
    if isinstance(cause, OSError) and cause.errno is not None and cause.filename is not None:
        return f"the cache {constants.HF_HUB_CACHE} cannot be written ({text}): set HF_HOME to another folder"
    return f"the download of {model} from {hub} broke off ({text}): {kept}"


def _how_to_fetch(model: HubModel) -> str:
    from huggingface_hub import constants

    revision = "" if model.revision == MAIN else f" --revision {model.revision}"
    why = "with HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "without the Hub's list of its files"
    return (
        f"{why} it has to be whole in the cache {constants.HF_HUB_CACHE}: where there is a network, run "
        f"hf download {model.name}{revision}"
    )


class _Recorded(NamedTuple):
    """A model of the Hub in the configuration of a run. Keys of sources begin with SOURCES."""

    key: str
    name: str
    commit: str


def _recorded_commits(config: JobConfig) -> list[_Recorded]:
    """Return the models of the Hub that the run began with which this launch goes on with."""
    recorded: list[_Recorded] = []
    for folder in (launch_link(config), resumed_folder(config)):
        if folder is not None and (folder / "config.toml").is_file():
            tables, _ = read_toml(str(folder / "config.toml"))
            places = [("", tables), *((SOURCES, source) for source in tables.get("source", []))]
            for prefix, content in places:
                for table, values in content.items():
                    for key, value in values.items() if isinstance(values, dict) else ():
                        for owner, name, commit in _SNAPSHOT.findall(str(value)):
                            recorded.append(_Recorded(f"{prefix}{table}.{key}", f"{owner}/{name}", commit))
            break
    return recorded
