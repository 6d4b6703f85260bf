"""vLLM in the trainer's ranks, to the rest of a run: see engines/descriptor.py. It has no actors, so there is nothing
to start and nothing to ask over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.engines.descriptor import EngineDescriptor, Features
from torchtitan.inference.engines.replicas.replica_pool import ReplicaPool
from torchtitan.inference.engines.vllm.engine import ENGINE

if TYPE_CHECKING:
    import torch

    from torchtitan.inference.engines.replicas.replica import Replica

WITHOUT_SERVERS = "with inference.mode = colocate, which has no servers"


class Colocated(EngineDescriptor):
    """vLLM in the trainer's own processes."""

    features = Features(
        options=("tensor_parallel_size", "engine_args", "engine_python", "engine_memory_gb", "offload_optimizer"),
        sleep_levels=(0, 1, 2),
        any_family=False,
    )
    documentation: ClassVar[dict[str, str]] = {
        "runs in": "the trainer's processes",
        "its Python": "vLLM's environment, for the trainer too",
        "more than one device per model": "`inference.tensor_parallel_size`, over neighbouring ranks",
        "weights change while requests run": "between rounds of generation",
        "adapters only (`lora.rank`)": "merged in the trainer",
        "how its weights are verified": "log-probs of what it samples",
        "sleep while the trainer trains (`inference.sleep_level`)": "`/sleep` and `/wake_up`, in process",
    }

    def problems(self, config: JobConfig, ranks: int) -> Iterator[tuple[str, str]]:
        inference = config.inference
        yield from ENGINE.problems(config)
        if inference.servers:
            yield "inference.servers", f"must be empty {WITHOUT_SERVERS}"
        if not inference.launch:
            yield "inference.launch", f"must be true {WITHOUT_SERVERS}"
        if ranks % inference.tensor_parallel_size:
            text = f"must divide the {ranks} rank{'s' if ranks > 1 else ''} (NGPU)"
            yield "inference.tensor_parallel_size", text
        if inference.offload_optimizer and config.training.enable_cpu_offload:
            text = "training.enable_cpu_offload keeps the optimizer's state in host memory already"
            yield "inference.offload_optimizer", text

    def open_in_rank(
        self, config: JobConfig, optimizer: torch.optim.Optimizer, run_dir: Path
    ) -> AbstractContextManager[Replica | None]:
        from torchtitan.inference.engines.colocated.vllm_engine import open_replica

        return open_replica(config, optimizer, run_dir)

    def open_pool(self, config: JobConfig, epoch: str, ranks: int) -> ReplicaPool:
        return ReplicaPool(config, epoch, ranks // config.inference.tensor_parallel_size)


DESCRIPTOR = Colocated
