"""A trainer of two ranks under FSDP2 that publishes to a server; run by tests.distributed_launcher."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.parameters import unique_parameters

SECONDS = 120.0
EPOCH = "e1-fsdp"


def publish(model: str, folder: str, dtype: str, versions: int) -> float:
    """Publish versions, each after it was changed on the shards; the last one's whole tensors go to a file.

    Returns the largest local share of a parameter: 0.5 where all is sharded in two.
    """
    import transformers
    from torch.distributed.fsdp import fully_shard

    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for layer in policy.model.layers:
        fully_shard(layer)
    fully_shard(policy)
    parameters = unique_parameters(dict(policy.named_parameters()))
    rank, place = dist.get_rank(), [""]
    options = {
        "epoch": EPOCH,
        "token": "token-of-the-test",
        "run_dir": Path(folder),
        "rank": rank,
        "world_size": dist.get_world_size(),
        "dtype": dtype,
    }
    config = WeightSyncConfig(bucket_bytes=128 * 1024)
    if rank == 0:
        sync = WeightSync(config, parameters, **options)  # type: ignore[arg-type]
        place[0] = sync.coordinator_address
        partial = Path(folder) / "coordinator.tmp"
        partial.write_text(json.dumps({"coordinator": place[0], "epoch": EPOCH, "token": options["token"]}))
        partial.replace(Path(folder) / "coordinator.json")
    dist.broadcast_object_list(place)
    if rank != 0:
        sync = WeightSync(config, parameters, coordinator_address=place[0], **options)  # type: ignore[arg-type]
    for version in range(versions):
        assert sync.reserve()
        sync.fence()
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.mul_(-0.9 if parameter.dim() > 1 else 1.05)
        assert sync.commit(version, 0) == "published"
        if rank == 0:
            outcome = sync.wait_until_applied(version, SECONDS, at_least=1)
            assert outcome.applied, outcome.missing
        dist.barrier()
    whole = {name: parameter.full_tensor().clone() for name, parameter in parameters.items()}  # type: ignore[attr-defined]
    if rank == 0:
        save_file(whole, Path(folder) / "whole.safetensors")
        (Path(folder) / "done").touch()
    deadline = time.monotonic() + SECONDS
    while not (Path(folder) / "seen").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    sync.close()
    shares = [p._local_tensor.numel() / p.numel() for p in parameters.values()]  # type: ignore[attr-defined]
    return max(shares)
