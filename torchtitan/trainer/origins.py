"""What a run goes on using that its checkpoints do not hold: a model's configuration and tokenizer, frozen weights.

Files at the same path may have other contents when a run is resumed. A checkpoint therefore describes what the run
refers to, and a run that would go on with something else is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from torchtitan.config.job_config import JobConfig
from torchtitan.config.teachers import frozen_weights, teacher_directories
from torchtitan.models.shape.checkpoint_files import fingerprint, read_json
from torchtitan.models.shape.checkpoint_shape import model_facts, read_args
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.trainer.run_dir import CONFIG_FILE

logger = logging.getLogger(__name__)

MODEL = "model.hf_assets_path"


class Origins:
    """Descriptions of what a run refers to, for its checkpoints.

    Weights are described by a digest of all their values. To read them takes as long as the disk does, so a checkpoint
    also names the sizes and times of their files: weights whose files have not been touched are not read again.
    """

    def __init__(self, config: JobConfig, args: ModelArgs, tokenizer: Tokenizer | None = None):
        """args: of the trained policy. tokenizer: where there is one."""
        self._random = f"random, of training.seed = {config.training.seed}"
        self._directories = frozen_weights(config)
        self._models = {MODEL: model_facts(args)}
        for key, directory in teacher_directories(config).items():
            self._models[key] = model_facts(read_args(directory, config.model.implementation))
        self._tokenizer = {} if tokenizer is None else _tokenizer_facts(tokenizer)
        self._weights: dict[str, dict[str, Any]] = {}
        """By directory, once they have been described"""

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint says of what the run refers to, as JSON can hold it. Raises UserError."""
        weights = {key: self._describe_weights(key) for key in self._directories}
        described = {"model": self._models, "weights": weights, "tokenizer": self._tokenizer}
        plain: dict[str, Any] = json.loads(json.dumps(described))
        return plain

    def problem(self, saved: Mapping[str, Any], run_dir: Path, evaluates: bool = False) -> str:
        """Return how what a checkpoint says differs from what the run refers to now, or an empty string.

        saved: what describe() returned for the checkpoint. run_dir: the folder of its run. evaluates: whether the
        checkpoint is only evaluated, for which prompts may be written in another way.
        """
        self._trust(saved.get("weights", {}))
        now, config_file = self.describe(), run_dir / CONFIG_FILE
        for key, facts in now["model"].items():
            if other := _differences(saved.get("model", {}).get(key, {}), facts):
                return f"the model in {key} is another one ({other}): restore its config.json, or start a new run"
        if not evaluates and (other := _differences(saved.get("tokenizer", {}), now["tokenizer"])):
            text = f"the tokenizer in {MODEL} is another one ({other})"
            return f"{text}: restore its files, or start a new run from an export"
        for key, weights in now["weights"].items():
            if (before := saved.get("weights", {}).get(key)) is None:
                logger.warning("the checkpoint does not say with which weights in %s its run began: not compared", key)
            elif before["digest"] != weights["digest"]:
                return (
                    f"the weights in {key} = {self._directories[key]!r} are not those that the run has used until now: "
                    f"put those back, or resume with {key} as it stands in {config_file}, or start a new run"
                )
        return ""

    def _trust(self, saved: Mapping[str, Any]) -> None:
        """Take over what a checkpoint says of weights whose files have not been touched since."""
        for key, directory in self._directories.items():
            files = saved.get(key, {}).get("files")
            if files and _are_untouched(files, _files_of(directory)):
                self._weights[directory] = saved[key]

    def _describe_weights(self, key: str) -> dict[str, Any]:
        directory = self._directories[key]
        if directory not in self._weights:
            files = _files_of(directory)
            if sum(size for _, size, *_ in files) > 1 << 30:
                logger.info("reading the weights in %s once, so that a resume knows them again", directory)
            digest = fingerprint(directory) if files else ""
            if not files and key == MODEL:
                digest = self._random
            self._weights[directory] = {"digest": digest, "files": files}
        return self._weights[directory]


def _files_of(directory: str) -> list[list[Any]]:
    """Of each file with weights: name, bytes, time of change, inode, links, time of the entry's change (ns)."""
    found = []
    for path in sorted(Path(directory).glob("*.safetensors")) if directory else []:
        facts = path.stat()
        about = [facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_nlink, facts.st_ctime_ns]
        found.append([path.name, *about])
    return found


def _are_untouched(before: list[list[Any]], now: list[list[Any]]) -> bool:
    """Whether these are the same files with the same content, as far as it is known without reading them. A copy may
    keep the time of its original, but not the time at which the entry was made. That one alone also changes where an
    export has linked the file (untrained_files.py), as the number of links then tells."""
    if len(before) != len(now):
        return False
    for (*old_facts, old_links, old_change), (*facts, links, change) in zip(before, now, strict=True):
        if old_facts != facts:
            return False
        if old_change != change and old_links == links:
            return False
    return True


def _tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what decides how text becomes tokens, and where a completion ends."""
    file = read_json(tokenizer.directory / "tokenizer.json") | {"padding": None, "truncation": None}
    return {
        "tokenizer.json": _digest(file),
        "chat template": _digest(tokenizer.templates.sources),
        "special tokens": tokenizer.special_tokens,
        "end tokens": tokenizer.eos_token_ids,
    }


def _digest(values: Mapping[str, Any]) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode()))


def _differences(before: Any, now: Any, name: str = "") -> str:
    """Name what has other values; what only one of the two knows is of another version of this program."""
    if isinstance(before, dict) and isinstance(now, dict):
        inner = [_differences(before[key], now[key], f"{name}.{key}".strip(".")) for key in now if key in before]
        return ", ".join(filter(None, inner))
    return f"{name} {before} -> {now}" if before != now else ""
