"""What goes to which file of an export: the policy's parameters, and what its checkpoint holds beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan.errors import UserError
from torchtitan.models.decoder import Decoder
from torchtitan.models.lora import base_parameters
from torchtitan.models.shape.checkpoint_files import tensor_files
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.models.shape.untrained_files import UntrainedFile, find_untrained


@dataclass(frozen=True)
class ExportPlan:
    """What goes to which file of an export."""

    trained: dict[str, list[str]]
    """Names of parameters"""
    untrained: dict[str, UntrainedFile]


def find_beside(policy: Decoder, directory: Path) -> list[UntrainedFile]:
    """What the checkpoint directory holds beside the policy. Raises UserError for a composite whose files are gone, or
    have become those of another model; nothing if a checkpoint of text alone has no weights."""
    args = policy.args
    if args.composite is None and not any(directory.glob("*.safetensors")):
        return []
    if args.composite is not None:
        names = {args.stored_name(part) for name in base_parameters(policy) for part, _ in policy.names_in_files(name)}
        if missing := names - tensor_files(directory).keys():
            text = f"the checkpoint's files have changed since the policy was loaded: they lack {min(missing)}"
            raise UserError(f"{directory}: {text}, so that the rest of them cannot be kept in an export")
    return find_untrained(directory, policy.args.is_untrained)


def plan_files(
    policy: Decoder, types: dict[str, torch.dtype], max_file_bytes: int, untrained: list[UntrainedFile]
) -> ExportPlan:
    """Assign parameter names to files of at most `max_file_bytes`, or of one parameter if that is larger."""
    groups: list[list[str]] = []
    used, before = max_file_bytes, ""
    for name, parameter in base_parameters(policy).items():
        size = math.prod(parameter.shape) * types[name].itemsize
        stored = policy.args.stored_name(policy.names_in_files(name)[0][0])
        # One tensor may hold several parameters, which are neighbours.
        together, before = stored == before, stored
        if used + size > max_file_bytes and not together:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    count = len(groups) + len(untrained)
    if count == 1:
        return ExportPlan({"model.safetensors": groups[0]}, {})
    files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    return ExportPlan(
        dict(zip(files[: len(groups)], groups, strict=True)), dict(zip(files[len(groups) :], untrained, strict=True))
    )


def stack_experts(args: ModelArgs, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put the matrices of experts together that files hold in one tensor; all of them are in `tensors`, which loses
    them."""
    stacked = args.stacked_experts
    if stacked is None:
        return tensors
    stacks: dict[str, dict[int, list[torch.Tensor]]] = {}
    for name in [*tensors]:
        if (matrix := stacked.find(name)) is not None:
            # Gate comes before up.
            stacks.setdefault(matrix.name, {}).setdefault(matrix.expert, []).append(tensors.pop(name))
    for name, experts in stacks.items():
        stack = torch.stack([torch.cat(experts[expert]) for expert in sorted(experts)])
        tensors[name] = (stack.transpose(1, 2) if stacked.transposed else stack).contiguous()
    return tensors
