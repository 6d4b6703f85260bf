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
    from torchtitan.inference.engines.replicas.replica import Replica


class Colocated(EngineDescriptor):
    """vLLM in the trainer's own processes."""

    features = Features(
        sleeps=True,
        any_family=False,
    )
    documentation: ClassVar[dict[str, str]] = {
        "runs in": "the trainer's processes",
        "its Python": "vLLM's environment, for the trainer too",
        "more than one device per model": "`tensor_parallel_size`, over neighbouring ranks",
        "weights change while requests run": "between rounds of generation",
        "adapters only (`lora.rank`)": "merged in the trainer",
        "how its weights are verified": "log-probs of what it samples",
        "sleep while the trainer trains (`sleep_level`)": "`/sleep` and `/wake_up`, in process",
    }

    def problems(self, config: JobConfig, ranks: int) -> Iterator[tuple[str, str]]:
        inference = config.inference
        yield from ENGINE.problems(config)
        if inference.servers:
            yield "inference.servers", "must be empty with inference.backend = colocated, which has no servers"
        if ranks % inference.engine.tensor_parallel_size:
            text = f"must divide the {ranks} rank{'s' if ranks > 1 else ''} (NGPU)"
            yield inference.engine_key("tensor_parallel_size"), text

    def open_in_rank(self, config: JobConfig, run_dir: Path) -> AbstractContextManager[Replica | None]:
        from torchtitan.inference.engines.colocated.vllm_engine import open_replica

        return open_replica(config, run_dir)

    def open_pool(self, config: JobConfig, epoch: str, ranks: int) -> ReplicaPool:
        return ReplicaPool(config, epoch, ranks // config.inference.engine.tensor_parallel_size)


DESCRIPTOR = Colocated
