"""Reads and writes checkpoint directories, one tensor at a time: Hugging Face's for a policy, PEFT's for its adapters.

Loading reads only the part of each tensor that this rank holds; exporting gathers one parameter at a time. Neither ever
holds the whole model in one place.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from torchtitan.config.job_config import Lora
from torchtitan.distributed.placement import (
    Place,
    StackPart,
    copy_full_,
    full_tensor,
    held_part,
    is_distributed,
    part_of,
)
from torchtitan.errors import UserError
from torchtitan.models.adapter_math import FACTOR_A
from torchtitan.models.decoder import Decoder
from torchtitan.models.export_plan import ExportPlan, find_beside, plan_files, stack_experts
from torchtitan.models.lora import QuantizedLinear, adapted_modules, base_parameters, whole_weights
from torchtitan.models.shape.checkpoint_files import INDEX_FILE, is_redundant, open_tensors, tensor_digest, tensor_files
from torchtitan.models.shape.exports import copy_assets, name_end_tokens, publish_folder, staging_folder
from torchtitan.models.shape.model_args import read_model_args
from torchtitan.models.shape.stacked_experts import StackedExperts
from torchtitan.models.shape.untrained_files import write_untrained
from torchtitan.utils.dtypes import DTYPES

logger = logging.getLogger(__name__)

# Size of one file of an export; further parameters go to the next file.
MAX_FILE_BYTES = 4 * 1024**3
# How safetensors names the types whose values are the weights; those of quantised ones mean nothing without scales.
FLOATS = ("BF16", "F16", "F32", "F64")


def load_policy(directory: str | Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Load the policy of a Hugging Face checkpoint directory, whole, on the CPU of this process.

    Raises UserError if files or tensors are missing or do not fit config.json.
    """
    args = read_model_args(directory)
    with torch.device("meta"):
        policy = Decoder(args).to(dtype)
    # As to_empty("cpu") does, which imports sympy to find the strides of tensors that are all contiguous.
    policy._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    policy.tie_weights()
    load_into(policy, directory)
    return policy


@torch.no_grad()
def load_into(policy: Decoder, directory: str | Path) -> None:
    """Fill the parameters of `policy` from the safetensors in `directory`, cast to each parameter's type or quantised.
    Adapters are left as they are.

    For a sharded parameter (DTensor), only this rank's part is read from disk. Raises UserError for a missing file or
    tensor, a tensor of another shape, and tensors that the model does not have.
    """
    directory = Path(directory)
    parameters = {
        part: parameter if isinstance(parameter, QuantizedLinear) else part_of(parameter, place)
        for name, parameter in base_parameters(policy).items()
        for part, place in policy.names_in_files(name)
    }
    files = tensor_files(directory)
    stored = {name: policy.args.stored_name(name) for name in parameters}
    missing = sorted({*stored.values()} - set(files))
    if missing:
        raise UserError(f"{directory}: the safetensors lack {_some(missing)}, which config.json asks for")
    unknown = sorted(
        name
        for name in set(files) - {*stored.values()}
        if not is_redundant(name, policy.args.tie_word_embeddings) and not policy.args.is_untrained(name)
    )
    if unknown:
        raise UserError(f"{directory}: the safetensors hold {_some(unknown)}, which the model of config.json lacks")
    handles = {path: open_tensors(path) for path in {*files.values()}}
    ((head, _),) = policy.names_in_files("lm_head.weight")
    if head in files.keys() - parameters.keys():
        shared = {
            name: parameter for name, parameter in base_parameters(policy).items() if parameter is policy.lm_head.weight
        }
        embeddings = [part for name in shared for part, _ in policy.names_in_files(name)]
        for embedding in embeddings:
            if _digest(handles, files, head) != _digest(handles, files, embedding):
                # transformers computes with both tensors, engines with one.
                text = f"config.json ties {head} and {embedding}, but here they are two"
                raise UserError(f"{files[head]}: {text}: set tie_word_embeddings to false, or remove the first")
    for name, parameter in parameters.items():
        path = files[stored[name]]
        _load_tensor(handles[path], path, name, parameter, policy.args.stacked_experts)


def _digest(handles: dict[Path, Any], files: dict[str, Path], name: str) -> str:
    return tensor_digest(handles[files[name]], name)


def _load_tensor(
    handle: Any,
    path: Path,
    name: str,
    parameter: torch.Tensor | StackPart | QuantizedLinear,
    stacked: StackedExperts | None,
) -> None:
    matrix = None if stacked is None else stacked.find(name)
    stored = handle.get_slice(name if matrix is None else matrix.name)
    if stored.get_dtype() not in FLOATS:
        raise UserError(
            f"{path}: tensor {name} is stored as {stored.get_dtype()}. Quantised weights are not read: take the "
            "model's checkpoint in bfloat16 or float32 (lora.base_bits = 4 quantises it here)"
        )
    found, expected = list(stored.get_shape()), list(parameter.shape)
    if stacked is not None and matrix is not None:
        found = stacked.matrix_shape(matrix, found)
    if found != expected:
        raise UserError(f"{path}: tensor {name} has shape {found}, but config.json asks for {expected}")
    local: torch.Tensor | QuantizedLinear | None
    if isinstance(parameter, QuantizedLinear):
        region, local = parameter.region(), parameter
    else:
        region, local = held_part(parameter)
    if local is None or any(part.start == part.stop for part in region):
        return
    if stacked is not None and matrix is not None:
        local.copy_(stacked.read(stored, matrix, region))
    else:
        local.copy_(_read(stored, region))


def _read(stored: Any, region: tuple[slice, ...]) -> torch.Tensor:
    """Read one region of a stored tensor from disk, without the rest."""
    return stored[region]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def checkpoint_dtype(policy: Decoder) -> torch.dtype | None:
    """Return the type of the policy's source checkpoint; None if its config.json names none that can be exported."""
    config = json.loads(policy.args.source or "{}")
    return DTYPES.get(config.get("dtype") or config.get("torch_dtype"))


def export_policy(
    policy: Decoder,
    directory: str | Path,
    assets_from: str | Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    dtype: torch.dtype | None = None,
    end_token_ids: Sequence[int] = (),
) -> None:
    """Write `policy` as a Hugging Face checkpoint directory that transformers can load.

    With sharded parameters this is a collective: all ranks call it, and rank 0 writes. The directory appears whole or
    not at all. An older one of the same name is replaced, but its other files (such as a tokenizer) are kept.

    Args:
        directory: where to write; replaced only if it is empty or holds a config.json.
        assets_from: the checkpoint directory that the policy began with. Its tokenizer's and processor's files are
            copied, and its tensors that are not trained (vision tower, multi-token prediction) are kept as they are.
        max_file_bytes: tensors beyond this size go to further files, with an index.
        dtype: of the weights in the files (buffers keep their own); None: the types in the policy. float32 in place of
            float16 if that does not hold them, which a warning says.
        end_token_ids: tokens that end a completion of this policy, for generation_config.json; none: as assets_from
            has it.
    """
    directory = Path(directory)
    written = Written(policy.parameters())
    if dtype is torch.float16 and (lost := _lost_in_float16(policy)):
        logger.warning("float16 cannot hold the values of %s: %s is in float32", _some(lost), directory)
        dtype = torch.float32
    if assets_from is None and policy.args.composite is not None:
        raise UserError(f"{directory}: the export of a composite needs the checkpoint directory that it began with")
    types = _types(policy, dtype)
    untrained = None if assets_from is None else written.step(lambda: find_beside(policy, Path(assets_from)))
    plan = plan_files(policy, types, max_file_bytes, untrained or [])
    staging = written.step(lambda: _stage(policy, directory, assets_from, plan, types, end_token_ids))
    for file_name, kept in plan.untrained.items():
        written.step(functools.partial(write_untrained, kept, staging, file_name))
    for file_name, names in plan.trained.items():
        # Other ranks are in the middle of gathering, so after a failure rank 0 keeps taking part to the end.
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            for part, tensor in whole_weights(policy, [name], types[name]):
                if written.going:
                    tensors[part] = tensor.cpu().contiguous()
        tensors = stack_experts(policy.args, tensors)
        written.step(functools.partial(_save, tensors, staging, file_name))
    written.step(lambda: publish_folder(staging, directory))
    if staging is not None and staging.exists():
        shutil.rmtree(staging)
    written.end(f"{directory}: the export failed")


def _save(tensors: dict[str, torch.Tensor], folder: Path, name: str) -> None:
    path = folder / name
    path.touch()  # save_file replaces it by a file that only its owner can read
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(stat.S_IMODE(mode))


@torch.no_grad()
def _lost_in_float16(policy: Decoder) -> list[str]:
    """Name the weights, adapters merged, that float16 does not hold (a collective if they are sharded): values beyond
    its range, or a whole tensor so small that its rounding is coarser than that of normal numbers."""
    lost = []
    buffers = dict(policy.named_buffers())
    for name in (name for name in base_parameters(policy) if name not in buffers):
        for part, tensor in whole_weights(policy, [name]):
            error = torch.linalg.vector_norm(tensor - tensor.half(), dtype=torch.float64)
            size = torch.linalg.vector_norm(tensor, dtype=torch.float64)
            # Of normal numbers it is at most 2^-11; it is infinite or not a number where a value is out of range.
            if not error <= 2**-10 * size:
                lost.append(part)
    return lost


def _types(policy: Decoder, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the type in the files of every parameter and buffer."""
    buffers = dict(policy.named_buffers())
    types: dict[str, torch.dtype] = {}
    for name, parameter in base_parameters(policy).items():
        types[name] = parameter.dtype
        if dtype is not None and name not in buffers:
            types[name] = dtype
    return types


def _stage(
    policy: Decoder,
    directory: Path,
    assets_from: str | Path | None,
    plan: ExportPlan,
    types: dict[str, torch.dtype],
    end_token_ids: Sequence[int],
) -> Path:
    """Prepare a hidden folder beside `directory` with everything but the weights."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory}: is a file; an export needs a directory")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / "config.json").is_file():
        raise UserError(f"{directory}: holds files but no config.json; an export replaces only a checkpoint directory")
    if assets_from is not None and not Path(assets_from).is_dir():
        raise UserError(f"{assets_from}: no such directory to copy tokenizer files from")
    staging = staging_folder(directory)
    try:
        if directory.is_dir():
            for entry in directory.iterdir():
                if entry.suffix == ".safetensors" or entry.name in ("config.json", INDEX_FILE):
                    continue
                if entry.is_dir():
                    shutil.copytree(entry, staging / entry.name, symlinks=True)
                else:
                    shutil.copy2(entry, staging / entry.name)
        names = {dtype: name for name, dtype in DTYPES.items()}
        config = policy.args.to_hf_config(names[next(iter(types.values()))])
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if assets_from is not None:
            copy_assets(Path(assets_from), staging)
        if end_token_ids:
            name_end_tokens(staging, end_token_ids)
        if len(plan.trained) + len(plan.untrained) > 1:
            total = sum(kept.data_bytes for kept in plan.untrained.values())
            for name, parameter in base_parameters(policy).items():
                total += math.prod(parameter.shape) * types[name].itemsize
            weight_map: dict[str, str] = {}
            for file, parameter_names in plan.trained.items():
                for name in parameter_names:
                    weight_map |= {policy.args.stored_name(part): file for part, _ in policy.names_in_files(name)}
            for file, kept in plan.untrained.items():
                weight_map |= dict.fromkeys(kept.names, file)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (staging / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    except BaseException:
        shutil.rmtree(staging)
        raise
    return staging


class Written:
    """Steps in which rank 0 writes these tensors. It takes none after a failure; at the end all ranks know of it."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self._shared = any(is_distributed(tensor) for tensor in tensors)
        self.going = not self._shared or torch.distributed.get_rank() == 0
        """Whether this rank takes steps"""
        self._error: Exception | None = None

    def step(self, write: Callable[[], Any]) -> Any:
        """Return the result of write(); None if no step is taken or this one fails."""
        try:
            return write() if self.going else None
        except (OSError, SafetensorError, UserError) as error:
            self.going, self._error = False, error

    def end(self, failed: str) -> None:
        """Raise UserError on all ranks if a step has failed (a collective if tensors are sharded)."""
        from torchtitan.distributed.collectives import all_reduce_sum

        error = self._error
        failures = all_reduce_sum(torch.tensor([float(error is not None)])) if self._shared else torch.zeros(1)
        if error is None and failures.item() > 0:
            raise UserError("the export failed on rank 0; its message says why")
        if isinstance(error, UserError):
            raise error
        if error is not None:
            raise UserError(f"{failed}: {error}") from error


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# As transformers describes a base that bitsandbytes holds in four bits, see adapter_math.py.
QUANTIZATION = "quantization_config"
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
PEFT_PREFIX = "base_model.model."
MERGE_FIRST = (
    "merge it into its base with PEFT (merge_and_unload, then save_pretrained), and give the result as "
    "model.hf_assets_path"
)
# With other values of these options, PEFT's adapters compute something else than this project's.
_PLAIN_ADAPTERS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None, [], {}),
    # With transformers 5, PEFT gives experts one adapter for gate and up together.
    "target_parameters": ([], None),
    "lora_bias": (False, None),
    # The others (pissa, olora, corda, loftq, lora_ga) derive their initial values from the base model's weights.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    # Adapters that act only after certain tokens, or with further factors.
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config"), (None,)),
    **dict.fromkeys(("use_bdlora", "use_qalora"), (False, None)),
}


def _adapter_places(policy: Decoder) -> list[tuple[nn.Parameter, bool, list[tuple[str, Place]]]]:
    """List every trained parameter, whether it is transposed in PEFT's files, and its names there with the part that
    each denotes. Experts have separate factors, as in the checkpoints for which PEFT converts them."""
    # PEFT looks tokens up in an embedding's first factor [rank, V] and multiplies by the second [H, rank].
    embeddings = {name for name, module, _ in adapted_modules(policy) if isinstance(module, nn.Embedding)}
    places: list[tuple[nn.Parameter, bool, list[tuple[str, Place]]]] = []
    for name, parameter in policy.named_parameters():
        module, _, factor = name.rpartition(".lora_")
        names: list[tuple[str, Place]] = [*policy.args.names_of_modules(name)]
        if module in embeddings:
            ((module_name, _),) = policy.args.names_of_modules(module)
            names = [(f"{module_name}.lora_embedding_{'A' if factor[0] == 'B' else 'B'}", None)]
        if parameter.requires_grad:
            places.append((parameter, module in embeddings, [(PEFT_PREFIX + part, place) for part, place in names]))
    return places


def save_adapter(policy: Decoder, directory: str | Path, base_model: str = "") -> None:
    """Write the adapters of `policy`, and modules_to_save, so that PEFT can load them; an older directory is replaced.

    A collective if parameters are sharded. Raises UserError on all ranks if the directory cannot be written.
    """
    assert policy.lora is not None
    directory = Path(directory)
    places = _adapter_places(policy)
    written = Written(parameter for parameter, _, _ in places)
    tensors = {}
    for parameter, transposed, names in places:
        full = full_tensor(parameter.detach())
        for name, place in names if written.going else []:
            factor = held_part(part_of(full, place))[1]
            assert factor is not None, "it is whole"
            tensors[name] = (factor.t() if transposed else factor).cpu().contiguous()
    written.step(lambda: _write_adapter(directory, tensors, _adapter_config(policy, base_model)))
    written.end(f"{directory}: the adapters could not be written")


def _adapter_config(policy: Decoder, base_model: str) -> dict[str, Any]:
    lora = policy.lora
    assert lora is not None
    # PEFT matches the ends of module names: "norm" alone would match every norm.
    named = [name for name, _ in policy.named_modules() if name.rpartition(".")[2] in lora.modules_to_save]
    saved = [part for name in named for part, _ in policy.args.names_of_modules(name)]
    adapted = [policy.args.names_of_modules(f"{name}.{FACTOR_A}")[0][0] for name, _, _ in adapted_modules(policy)]
    targets = dict.fromkeys(name.removesuffix(f".{FACTOR_A}").rpartition(".")[2] for name in adapted)
    # PEFT takes a string for a regular expression. A vision tower may have modules with the same endings.
    in_composite = rf"(.*language_model\.(.*\.)?)?({'|'.join(targets)})"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        # A relative path would be looked for from wherever the adapter is used.
        "base_model_name_or_path": os.path.realpath(base_model) if base_model else None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": [*targets] if policy.args.composite is None else in_composite,
        "modules_to_save": saved or None,
        # PEFT does not read this: its own adapters say in their model card on which base they were trained.
        **({QUANTIZATION: NF4} if lora.base_bits == 4 else {}),
    }


def _write_adapter(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    staging = staging_folder(directory)
    try:
        (staging / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _save(tensors, staging, ADAPTER_WEIGHTS)
        publish_folder(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def load_adapter(policy: Decoder, directory: str | Path) -> None:
    """Fill the adapters of `policy`, and modules_to_save, from a directory that PEFT or `save_adapter` wrote.

    Raises UserError if files, options, names or shapes do not fit [lora] and the model.
    """
    assert policy.lora is not None
    directory = Path(directory)
    _check_adapter_config(directory / ADAPTER_CONFIG, policy.lora)
    places = _adapter_places(policy)
    path = directory / ADAPTER_WEIGHTS
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            # PEFT may store the embedding's own weight beside its factors; that weight belongs to the base model.
            names = {name for name in handle.keys() if ".base_layer." not in name}  # noqa: SIM118
            known = {name for _, _, named_places in places for name, _ in named_places}
            if known != names:
                raise UserError(f"{path} {_other_modules(known, names)}")
            for parameter, transposed, named_places in places:
                for name, place in named_places:
                    tensor, target = handle.get_tensor(name), part_of(parameter, place)
                    tensor = tensor.t() if transposed else tensor
                    if tensor.shape != target.shape:
                        found, expected = list(tensor.shape), list(target.shape)
                        raise UserError(f"{path}: {name} has shape {found}, but the model asks for {expected}")
                    copy_full_(target, tensor)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error


def _other_modules(known: set[str], names: set[str]) -> str:
    """Say how the tensors of an adapter's file differ from those that [lora] asks for, and what to do."""
    lacking, further = known - names, names - known
    found, asked = Counter(map(_adapted_module, names)), Counter(map(_adapted_module, known))
    partly = sorted(module for module, count in found.items() if module and 0 < count < asked[module])
    if partly:
        text = f"adapts {_some(partly)} in some layers only (layers_to_transform), which is not supported"
        return f"{text}: {MERGE_FIRST}"
    what, some = ("lacks", lacking) if lacking else ("has", further)
    advice = "lora.target_modules and lora.modules_to_save must name the same modules"
    return f"{what} {min(some)}, of {len(some)} tensors in all: {advice}"


def _adapted_module(name: str) -> str:
    """q_proj for model.layers.0.self_attn.q_proj.lora_A.weight; empty for what is no adapter's factor."""
    return name.rpartition(".lora_")[0].rpartition(".")[2]


def _check_adapter_config(path: Path, lora: Lora) -> None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not an adapter's configuration ({type(error).__name__}: {error})") from error
    for option, allowed in _PLAIN_ADAPTERS.items():
        if option in config and config[option] not in allowed:
            raise UserError(f"{path}: {option} = {config[option]!r} is not supported: {MERGE_FIRST}")
    if (rank, alpha) != (lora.rank, lora.alpha):
        text = f"set lora.rank = {rank} and lora.alpha = {alpha:g} (they are {lora.rank} and {lora.alpha:g})"
        raise UserError(f"{path}: this adapter has another shape: {text}")
    was_nf4 = (config.get(QUANTIZATION) or {}).get("bnb_4bit_quant_type") == "nf4"
    if was_nf4 and lora.base_bits != 4:
        logger.warning("%s was trained on a base in four bits, which lora.base_bits = 4 gives it again", path.parent)
