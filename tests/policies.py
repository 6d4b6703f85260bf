"""A policy of the debug runs' shape, and what must hold of a version of any policy."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from scripts.make_debug_checkpoint import debug_model_args, write_tokenizer
from torchtitan.distributed.placement import LocalTensors
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy
from torchtitan.models.lora import synced_parameters
from torchtitan.weight_sync.trainer.plan import placed_parameters, plan_rank


def make_debug_checkpoint(directory: Path, mixture: bool = False) -> Decoder:
    """The shape and tokenizer of the debug runs with random weights; returns the policy."""
    policy = Decoder(debug_model_args(mixture))
    policy.initialize_weights(0)
    export_policy(policy, directory)
    write_tokenizer(directory)
    return policy


def check_named_as_files(policy: torch.nn.Module, directory: Path) -> None:
    """A version of the policy has the names, shapes and values of the checkpoint's file, and copies no stack."""
    sent, files = synced_parameters(policy), load_file(directory / "model.safetensors")
    assert sent.keys() == files.keys()
    layout = plan_rank(placed_parameters(sent), 0, "float32", 1 << 20)
    assert {entry.name: entry.shape for entry in layout.parameters} == {n: tuple(t.shape) for n, t in files.items()}
    local = LocalTensors([list(sent.values())[shard.parameter] for shard in layout.ranks[0]]).now()
    for shard, tensor in zip(layout.ranks[0], local, strict=True):
        assert torch.equal(tensor, files[layout.parameters[shard.parameter].name])
    memory = {weight.untyped_storage().data_ptr() for weight in [*policy.parameters(), *policy.buffers()]}
    assert {tensor.untyped_storage().data_ptr() for tensor in local} <= memory
