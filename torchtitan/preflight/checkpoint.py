"""Checks of the files in checkpoint directories, before anything is loaded: that they are whole, that something ends a
completion, and that the model has the tokens that its tokenizer writes. No torch here.
"""

from __future__ import annotations

import functools
from pathlib import Path

from torchtitan.config.job_config import JobConfig
from torchtitan.config.source_configs import source_configs
from torchtitan.config.values import show
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_files import pointer_problem, tensor_files
from torchtitan.preflight.check import Check
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.conversation.tool_detection import refuse_unread_calls
from torchtitan.rollout.data.demonstrations import DemonstrationMaker
from torchtitan.rollout.data.job_rows import load_datasets
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.data.rows import BUILT_IN
from torchtitan.rollout.data.unknown_text import refuse_surplus_tokens, vocabulary_of

KEY = "model.hf_assets_path"
# Endings of what is read.
READ = (".json", ".jinja", ".model", ".safetensors")


def check_checkpoint(check: Check) -> None:
    """Check the directories of model.hf_assets_path, of teachers and of adapters, as far as they exist."""
    config = check.config
    given = [(KEY, config.model.hf_assets_path), ("lora.adapter_path", config.lora.adapter_path)]
    teachers = {source_config.distill.teacher for _, source_config in source_configs(config)}
    given += [("distill.teacher", path) for path in sorted(teachers)]
    for key, path in given:
        if path and (problem := _broken(Path(path))):
            check.say(key, f"{key} = {show(path)}: {problem}")
    if not check.problems and (Path(config.model.hf_assets_path) / "tokenizer.json").is_file():
        _check_tool_formats(check)
    vocabulary = vocabulary_of(config)
    if vocabulary and not check.problems and (Path(config.model.hf_assets_path) / "tokenizer.json").is_file():
        try:
            _check_tokens(check, vocabulary)
        except UserError as error:
            check.say(KEY, f"{KEY} = {show(config.model.hf_assets_path)}: {error}")


def _check_tool_formats(check: Check) -> None:
    """Refuse a chat template that writes calls of tools in a form that nothing here reads. (The tools of a class are
    known once it is loaded, so rollouts.py looks at those.)"""
    for _, source_config in source_configs(check.config):
        environment = source_config.environment
        if not environment.agent and not environment.tools:
            continue
        try:
            refuse_unread_calls(environment.tool_parser, read_tokenizer(check.config))
        except UserError as error:
            check.say("environment.tool_parser", f"environment.tool_parser = {show(environment.tool_parser)}: {error}")


def _broken(directory: Path) -> str:
    """Return which file of a directory is not what its name says; empty if there is none, or no directory."""
    if not directory.is_dir():
        return ""
    # Who reads the shape names config.json.
    paths = sorted(path for path in directory.iterdir() if path.suffix in READ and path.name != "config.json")
    if pointers := [path.name for path in paths if pointer_problem(path)]:
        others = f" (and {len(pointers) - 1} others)" if len(pointers) > 1 else ""
        return f"{pointers[0]}{others}: {pointer_problem(directory / pointers[0])}"
    try:
        if any(path.suffix == ".safetensors" for path in paths):
            tensor_files(directory)
    except UserError as error:
        return str(error)
    return ""


def _check_tokens(check: Check, vocabulary: int) -> None:
    config = check.config
    tokenizer = read_tokenizer(config)
    if not _ends(config, tokenizer) and (named := tokenizer.special_tokens.get("eos_token")):
        check.say(
            KEY,
            f"{KEY} = {show(config.model.hf_assets_path)}: the tokenizer's eos_token {named!r} is not in its "
            "vocabulary, and no other token ends a completion: correct tokenizer_config.json or set "
            "rollout.stop_token_ids",
        )
    template: list[int] = []
    if any(_uses_template(source_config) for _, source_config in source_configs(config)):
        template = _written(tokenizer)
    for what, tokens in (("tokenizer ends completions with", tokenizer.eos_token_ids), ("template writes", template)):
        if outside := [token for token in tokens if token >= vocabulary]:
            shown = f"number {outside[0]} ({tokenizer.decode(outside[:1], skip_special=False)!r})"
            text = f"its {what} {shown}, but its model has {vocabulary} tokens: take files of one model"
            check.say(KEY, f"{KEY} = {show(config.model.hf_assets_path)}: {text}")
    if not check.planning or check.problems or tokenizer.vocab_size <= vocabulary:
        return  # a start reads the data itself
    for _, source_config in source_configs(config):
        local = source_config.rollout.dataset in BUILT_IN or Path(source_config.rollout.dataset).expanduser().is_file()
        if local and not source_config.environment.is_used:
            maker = (DemonstrationMaker if source_config.job.stage == "sft" else PromptMaker)(source_config, tokenizer)
            refuse_surplus_tokens(load_datasets(source_config)[0], maker, vocabulary)


def _uses_template(config: JobConfig) -> bool:
    return config.rollout.chat_template or config.environment.uses_gateway


def _written(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a short conversation; none if the template refuses it, which making the prompts explains."""
    ask, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "?"}
    try:
        return tokenizer.apply_chat_template([ask, answer, ask])
    except UserError:
        return []


def unusual_tokens(config: JobConfig) -> str:
    """Return what to say of a tokenizer with more tokens than the model, or with none that ends a completion; empty for
    others."""
    directory = Path(config.model.hf_assets_path)
    if not (directory / "tokenizer.json").is_file():
        return ""
    tokenizer, vocabulary = read_tokenizer(config), vocabulary_of(config)
    if not _ends(config, tokenizer):
        return (
            f"the files of {directory} name no token that ends a completion, so every one goes on to "
            "rollout.max_completion_tokens: set rollout.stop_token_ids if that is not meant"
        )
    if vocabulary is not None and tokenizer.vocab_size > vocabulary:
        return (
            f"the tokenizer of {directory} has {tokenizer.vocab_size} tokens, of which the model has the first "
            f"{vocabulary}: rows with others are refused"
        )
    return ""


def _ends(config: JobConfig, tokenizer: Tokenizer) -> list[int]:
    stops = [token for _, source_config in source_configs(config) for token in source_config.rollout.stop_token_ids]
    return [*tokenizer.eos_token_ids, *stops]


def read_tokenizer(config: JobConfig) -> Tokenizer:
    """Return the tokenizer of model.hf_assets_path, which is read once. Raises UserError."""
    path = Path(config.model.hf_assets_path)
    return _read_tokenizer(path, (path / "tokenizer.json").stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read_tokenizer(directory: Path, _changed: int) -> Tokenizer:
    return Tokenizer(directory)
