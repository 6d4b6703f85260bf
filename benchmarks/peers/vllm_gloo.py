"""vLLM's own way of sending weights, with gloo: what the scenario `vllm` of
benchmarks/weight_sync compares with. In vLLM's environment.

vLLM 0.32 ships no engine for CPUs, so this is the smallest one for its trainer API: whole tensors, one broadcast each,
in the order of the source, loaded as they come; a twin of its NCCL engine without packing. The worker's half is
registered when vLLM imports this module (--worker-extension-cls); run as a script it is the trainer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "plain_gloo"
TIMEOUT = timedelta(seconds=120)


def join(address: str, port: int, rank: int, size: int) -> dist.ProcessGroupGloo:
    """A group beside the default one; rank 0 holds the store."""
    store = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=TIMEOUT)
    return dist.ProcessGroupGloo(dist.PrefixStore(BACKEND, store), rank, size, TIMEOUT)


def broadcast(group: dist.ProcessGroupGloo, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


@dataclass
class InitInfo(WeightTransferInitInfo):
    address: str
    port: int
    rank_offset: int
    world_size: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The worker's half."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        rank = init_info.rank_offset + self.parallel_config.rank
        self.group = join(init_info.address, init_info.port, rank, init_info.world_size)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.group, weight)
            self.model.load_weights([(name, weight)])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # Without this it would serve the old head, see docs/engines.md; it belongs to a fair comparison.
        head = self.model.lm_head
        head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        self.group = None


@dataclass
class TrainerInfo(TrainerInitInfo):
    backend: ClassVar[str] = BACKEND
    address: str
    port: int
    world_size: int


class GlooTrainer(TrainerWeightTransferEngine[TrainerInfo]):
    """The trainer's half."""

    init_info_cls = TrainerInfo

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: Any = None) -> GlooTrainer:
        trainer = cls(client=client, source=source)
        worker = InitInfo(init_info.address, init_info.port, 1, init_info.world_size)
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(client.init_weight_transfer_engine, asdict(worker))
            trainer.group = join(init_info.address, init_info.port, 0, init_info.world_size)
            joining.result()
        return trainer

    def send_weights(self) -> None:
        meta = self.source.metadata()
        update = UpdateInfo(
            [m.name for m in meta], [str(m.dtype).split(".")[-1] for m in meta], [list(m.shape) for m in meta]
        )
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(self.client.update_weights, asdict(update))
            for _, tensor in self.source:
                broadcast(self.group, tensor.contiguous())
            receiving.result()
        self.client.finish_weight_update()


class WorkerExtension:
    """Importing this module is what counts."""


class Client(HTTPVLLMWeightSyncClient):
    """vLLM's own, with a token, and what there is to do around an update."""

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        import requests

        headers = {"Authorization": f"Bearer {os.environ['TOKEN']}"}
        requests.post(f"{self.base_url}/{path}", json=json, timeout=self.timeout, headers=headers).raise_for_status()

    def update(self, trainer: TrainerWeightTransferEngine[Any]) -> None:
        """One version, while requests wait."""
        self._post("pause?mode=keep&clear_cache=false")
        trainer.send_weights()
        self._post("reset_prefix_cache")
        self._post("resume")


def train(url: str, model: str, port: int) -> None:
    """Send a version for each line of standard input; answers with when it began and ended."""
    import transformers

    torch.set_num_threads(1)
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    WeightTransferTrainerFactory.register_engine(BACKEND, GlooTrainer)
    client = Client(url)
    trainer = WeightTransferTrainerFactory.trainer_init(
        TrainerInfo("127.0.0.1", port, 2, rank=0), client=client, source=ModuleSource(policy)
    )
    print("SENT ready", flush=True)
    for _ in sys.stdin:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.neg_()
        started_at = time.time()
        client.update(trainer)
        print("SENT " + json.dumps([started_at, time.time()]), flush=True)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
else:
    WeightTransferEngineFactory.register_engine(BACKEND, GlooEngine)
