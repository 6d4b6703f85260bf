"""The model's shape before anything is loaded: from config.json or the table of flavors, checked against the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from torchtitan.config.fields import Problem, nearest, show
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.models.flavors import FLAVORS
from torchtitan.models.model_args import ModelArgs
from torchtitan.models.shape import BLOCK, is_missing_debug_checkpoint, quantized_projections, read_shape


def check_model(config: JobConfig, planning: bool) -> Iterator[Problem]:
    """Problems of [model] and of what must fit its shape. `planning`: no checkpoint files are needed."""
    model = config.model
    key = "model.hf_assets_path"
    directory = Path(model.hf_assets_path)
    if model.flavor:
        known = [name for family in FLAVORS if model.name in ("auto", family) for name in FLAVORS[family]]
        if model.flavor not in known:
            allowed = f"must be one of {', '.join(known)}{nearest(model.flavor, known)}"
            yield Problem("model.flavor", f"model.flavor = {show(model.flavor)} is not allowed: {allowed}")
            return
    if planning and (model.flavor or is_missing_debug_checkpoint(config)):
        pass
    elif not model.hf_assets_path:
        yield Problem(key, f'{key} = "": must be a Hugging Face checkpoint directory (config.json, tokenizer.json)')
        return
    elif not directory.is_dir():
        yield Problem(key, f"{key} = {show(model.hf_assets_path)} is no directory{_how_to_make(config)}")
        return
    else:
        problem = _missing_file(config, directory)
        if problem is not None:
            yield Problem(key, f"{key} = {show(model.hf_assets_path)}: {problem}")
            return
    try:
        args = read_shape(config)
    except UserError as error:
        yield Problem(key, str(error))
        return
    if args is not None:
        yield from _check_shape(config, args)


def _missing_file(config: JobConfig, directory: Path) -> str | None:
    starts_actors = not config.rollout.replay and not config.inference.servers
    needs_model = starts_actors or not config.model.flavor
    reason = ""
    if config.model.flavor:
        reason = (
            ", and actors start from a checkpoint, not from model.flavor: export one of this flavor first, or set "
            "model.hf_assets_path to one (only with rollout.replay or inference.servers no actor is started)"
        )
    if needs_model and not (directory / "config.json").is_file():
        return f"there is no config.json in it{reason}"
    if not (directory / "tokenizer.json").is_file():
        return "there is no tokenizer.json in it"
    if needs_model and not any(directory.glob("*.safetensors")):
        return f"there are no *.safetensors in it{reason}"
    return None


def _how_to_make(config: JobConfig) -> str:
    path = config.model.hf_assets_path
    if is_missing_debug_checkpoint(config):
        return f"; make it: python scripts/make_debug_checkpoint.py --output {path} (./run_grpo.sh does so by itself)"
    parent = Path(path).parent
    siblings = [other.name for other in parent.iterdir() if other.is_dir()] if parent.is_dir() else []
    return f" (looked in {Path.cwd()}){nearest(Path(path).name, siblings)}"


def _check_shape(config: JobConfig, args: ModelArgs) -> Iterator[Problem]:
    degree = config.parallelism.tensor_parallel_degree
    counts = {
        "attention heads": args.num_attention_heads,
        "key-value heads": args.num_key_value_heads,
        "feed-forward columns (intermediate_size)": args.intermediate_size,
    }
    undivided = [f"{count} {what}" for what, count in counts.items() if degree > 1 and count % degree]
    if undivided:
        common = math.gcd(*counts.values())
        allowed = ", ".join(str(number) for number in range(1, min(common, 64) + 1) if common % number == 0)
        text = f"must divide the model's {' and '.join(undivided)} (allowed: {allowed})"
        key = "parallelism.tensor_parallel_degree"
        yield Problem(key, f"{key} = {degree} is not allowed: {text}")
    if config.training.seq_len > args.max_position_embeddings:
        text = f"must be at most the model's max_position_embeddings = {args.max_position_embeddings}"
        yield Problem("training.seq_len", f"training.seq_len = {config.training.seq_len} is not allowed: {text}")
    lora = config.lora
    if lora.rank and args.tie_word_embeddings:
        for key, names in (("target_modules", lora.target_modules), ("modules_to_save", lora.modules_to_save)):
            if tied := [name for name in ("lm_head", "embed_tokens") if name in names]:
                text = f"this model ties lm_head and embed_tokens, which share one weight, so {tied[0]} cannot be one"
                yield Problem(f"lora.{key}", f"lora.{key} = {show(names)} is not allowed: {text}")
    if lora.rank:
        quantized = quantized_projections(config, args).items()
        if ragged := [f"{name} has {columns}" for name, (_, columns) in quantized if columns % BLOCK]:
            text = f"projections must have a multiple of {BLOCK} inputs; {', '.join(ragged)}"
            yield Problem("lora.base_bits", f"lora.base_bits = 4 is not allowed: {text}")
    outside = [token for token in config.rollout.stop_token_ids if not 0 <= token < args.vocab_size]
    if outside:
        text = f"must be 0 to {args.vocab_size - 1}, the model's vocabulary"
        yield Problem("rollout.stop_token_ids", f"rollout.stop_token_ids: {outside} is not allowed: {text}")
