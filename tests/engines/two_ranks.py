"""A trainer of two ranks under FSDP2 that publishes to a server, and what the server has to serve then."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.distributed_launcher import run_distributed
from tests.engines.job import CALL_SECONDS, PROMPT, Actor, differences
from tests.patience import PATIENCE_S, until
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.distributed.placement import unique_parameters
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key

SECONDS = 120.0
EPOCH = "e1-fsdp"


def publish(model: str, folder: str, dtype: str, versions: int) -> float:
    """On every rank: publish versions, each changed on the shards before; the last one, whole, goes to a file.

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
    config = WeightSyncConfig()
    config.bucket_bytes = 128 * 1024
    if rank == 0:
        sync = WeightSync(config, parameters, **options)  # type: ignore[arg-type]
        place[0] = sync.registry_address
        connect = {"registry": place[0], "epoch": EPOCH, "actor": "actor-0"}
        partial = Path(folder) / "connect.tmp"
        partial.write_text(json.dumps({**connect, "key": role_key("token-of-the-test", ACTOR, "actor-0")}))
        partial.replace(Path(folder) / "connect.json")
    dist.broadcast_object_list(place)
    if rank != 0:
        sync = WeightSync(config, parameters, registry=place[0], **options)  # type: ignore[arg-type]
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
    until((Path(folder) / "seen").exists, SECONDS)
    sync.close()
    shares = [p._local_tensor.numel() / p.numel() for p in parameters.values()]  # type: ignore[attr-defined]
    return max(shares)


def check_two_ranks(actor: Actor, model: Path, folder: Path, dtype: str, tolerance: float) -> None:
    """Versions of a trainer of two ranks: log-probs and greedy tokens of the last one."""
    import transformers

    with ThreadPoolExecutor(1) as threads:
        options = {"model": str(model), "folder": str(folder), "dtype": dtype, "versions": 3}
        training = threads.submit(run_distributed, "tests.engines.two_ranks:publish", 2, 200.0, **options)

        def reach(path: Path) -> None:
            until(lambda: path.exists() or training.done())
            if training.done():
                training.result()

        reach(folder / "connect.json")
        connect = json.loads((folder / "connect.json").read_text())
        actor.agent.call("POST", "/weights/connect", CALL_SECONDS, connect)
        reach(folder / "done")
        policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        whole = load_file(folder / "whole.safetensors")
        assert not policy.load_state_dict(whole, strict=False).unexpected_keys
        policy = policy.to(getattr(torch, dtype))
        (completion,) = actor.generate(PROMPT, 12, stop_token_ids=[])
        assert [span.version for span in completion.spans] == [2]
        ids = [*PROMPT, *completion.token_ids]
        with torch.no_grad():
            rows = policy(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        expected = rows.gather(1, torch.tensor(ids)[1:, None])[:, 0]
        assert differences(actor.score(ids), expected.tolist()) < tolerance
        rows, expected = rows[len(PROMPT) - 1 :], expected[len(PROMPT) - 1 :]
        assert differences(completion.log_probs, expected.tolist()) < tolerance
        # Greedy: nothing is more likely than what was taken, within what the dtype can tell apart.
        assert float((rows.max(-1).values - expected).max()) < tolerance
        (folder / "seen").touch()
        assert max(training.result(PATIENCE_S)) == 0.5
