"""Low-rank adapters in and out, as directories that PEFT reads and writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from torchtitan.config.job_config import Lora
from torchtitan.distributed.placement import Place, copy_full_, full_tensor, held_part, part_of
from torchtitan.errors import UserError
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import Written, publish_folder, staging_folder
from torchtitan.models.lora import adapted_modules
from torchtitan.models.low_rank import FACTOR_A

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# With other values of these options PEFT's adapters compute something else than ours do.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    # What PEFT makes of experts with transformers 5: one adapter of gate and up.
    "target_parameters": ([], None),
    "lora_bias": (False, None),
}


def _places(policy: Decoder) -> list[tuple[nn.Parameter, bool, list[tuple[str, Place]]]]:
    """Every trained parameter, whether it is transposed in PEFT's files, and its names there with the part of it that
    each is: experts have factors of their own, as in the checkpoints for which PEFT converts them."""
    # PEFT looks up in an embedding's first factor [rank, V] and widens with the second [H, rank].
    embeddings = {name for name, module, _ in adapted_modules(policy) if isinstance(module, nn.Embedding)}
    places: list[tuple[nn.Parameter, bool, list[tuple[str, Place]]]] = []
    for name, parameter in policy.named_parameters():
        module, _, factor = name.rpartition(".lora_")
        names: list[tuple[str, Place]] = [*policy.args.names_in_files(name)]
        if module in embeddings:
            names = [(f"{module}.lora_embedding_{'A' if factor[0] == 'B' else 'B'}", None)]
        if parameter.requires_grad:
            places.append((parameter, module in embeddings, [(PREFIX + part, place) for part, place in names]))
    return places


def save_adapter(policy: Decoder, directory: str | Path, base_model: str = "") -> None:
    """Write the adapters of `policy`, and modules_to_save, so that PEFT loads them; an older directory is replaced.

    A collective where parameters are sharded. Raises UserError on all ranks where it cannot be written.
    """
    assert policy.lora is not None
    directory = Path(directory)
    places = _places(policy)
    written = Written(parameter for parameter, _, _ in places)
    tensors = {}
    for parameter, transposed, names in places:
        full = full_tensor(parameter.detach())
        for name, place in names if written.going else []:
            one = held_part(part_of(full, place))[1]
            assert one is not None, "it is whole"
            tensors[name] = (one.t() if transposed else one).cpu().contiguous()
    written.step(lambda: _write(directory, tensors, _config(policy, base_model)))
    written.end(f"{directory}: the adapters could not be written")


def _config(policy: Decoder, base_model: str) -> dict[str, Any]:
    lora = policy.lora
    assert lora is not None
    # PEFT takes all modules whose names end so: "norm" alone would be every norm.
    saved = [name for name, _ in policy.named_modules() if name.rpartition(".")[2] in lora.modules_to_save]
    adapted = [policy.args.names_in_files(f"{name}.{FACTOR_A}")[0][0] for name, _, _ in adapted_modules(policy)]
    targets = dict.fromkeys(name.removesuffix(f".{FACTOR_A}").rpartition(".")[2] for name in adapted)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": [*targets],
        "modules_to_save": saved or None,
    }


def _write(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    staging = staging_folder(directory)
    try:
        (staging / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        publish_folder(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def load_adapter(policy: Decoder, directory: str | Path) -> None:
    """Fill the adapters of `policy`, and modules_to_save, from a directory that PEFT or `save_adapter` wrote.

    Raises UserError where files, options, names or shapes do not fit [lora] and the model.
    """
    assert policy.lora is not None
    directory = Path(directory)
    _check_config(directory / CONFIG_FILE, policy.lora)
    places = _places(policy)
    path = directory / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            # PEFT may put the embedding's own weight beside its factors: that is the base model's.
            names = {name for name in handle.keys() if ".base_layer." not in name}  # noqa: SIM118
            known = {name for _, _, own in places for name, _ in own}
            for what, some in (("lacks", known - names), ("has", names - known)):
                if some:
                    text = f"{path} {what} {min(some)}, of {len(some)} tensors in all"
                    raise UserError(f"{text}: lora.target_modules and lora.modules_to_save must name the same modules")
            for parameter, transposed, own in places:
                for name, place in own:
                    tensor, target = handle.get_tensor(name), part_of(parameter, place)
                    tensor = tensor.t() if transposed else tensor
                    if tensor.shape != target.shape:
                        found, expected = list(tensor.shape), list(target.shape)
                        raise UserError(f"{path}: {name} has shape {found}, but the model asks for {expected}")
                    copy_full_(target, tensor)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error


def _check_config(path: Path, lora: Lora) -> None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not an adapter's configuration ({type(error).__name__}: {error})") from error
    for option, allowed in _PLAIN.items():
        if option in config and config[option] not in allowed:
            raise UserError(f"{path}: {option} = {config[option]!r} is not supported")
    if (rank, alpha) != (lora.rank, lora.alpha):
        text = f"set lora.rank = {rank} and lora.alpha = {alpha:g} (they are {lora.rank} and {lora.alpha:g})"
        raise UserError(f"{path}: this adapter has another shape: {text}")
