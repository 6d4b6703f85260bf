"""What the ranks of a colocated trainer do in tests/engines/test_colocated.py; runs with vLLM's Python."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.engines.models import randomize_adapters
from torchtitan.distributed import device
from torchtitan.distributed.placement import ParallelDims
from torchtitan.inference.engines.colocated.vllm_engine import _import_vllm, open_replica, own_sockets
from torchtitan.inference.engines.replicas.replica import Replica
from torchtitan.inference.engines.replicas.replica_pool import ReplicaAnswer, Round
from torchtitan.inference.types import GenerateRequest, SamplingParameters
from torchtitan.models.hf_checkpoint import export_policy, load_into
from torchtitan.models.parallelize import build_policy
from torchtitan.preflight.validate import load_config
from torchtitan.trainer.weight_path import open_weight_path

# Here, and so once for all ranks: it takes most of an engine's start.
_import_vllm("v1.engine.llm_engine")
EPOCH = "e1-test"
ROUND_SECONDS = 120.0
THREADS = 2
# As a trainer has it, beside an engine that takes the function away.
SET_THREADS = torch.set_num_threads


def request(name: str, prompt: list[int], tokens: int, n: int = 1, temperature: float = 1.0) -> GenerateRequest:
    return GenerateRequest(name, prompt, SamplingParameters(tokens, n, temperature, seed=7))


class Colocated:
    """A trainer's rank with its engine: a policy from `model`, sharded as `options` say, and its weight path."""

    def __init__(self, folder: str, model: str, options: list[str]):
        settings = ["--model.hf_assets_path", model, "--inference.backend", "colocated"]
        settings += ["--training.seq_len", "256", "--rollout.max_completion_tokens", "200"]
        settings += ["--training.threads", "1", "--inference.max_sequences", "32"]
        self.config = load_config([*settings, "--job.dump_folder", folder, *options])
        (Path(folder) / "logs").mkdir(exist_ok=True)
        self.dims = ParallelDims.from_config(self.config.parallelism, device.world_size(), device.rank())
        device.seed_everything(3)
        self.policy = build_policy(self.config, self.dims)
        before = draws_to_come()
        SET_THREADS(THREADS)
        self._opened = open_replica(self.config, Path(folder))
        replica = self._opened.__enter__()
        assert replica is not None
        self.replica: Replica = replica
        self.random_numbers_kept = before == draws_to_come()
        torch.set_num_threads(THREADS + 1)
        self.threads = torch.get_num_threads()
        SET_THREADS(1)
        self._path = open_weight_path(self.config, self.policy, EPOCH, "", Path(folder), replica)
        self.weights = self._path.__enter__()
        self.version = -1
        self.tokens: dict[str, list[int]] = {}
        self._note_every_rank()

    @property
    def replicas(self) -> int:
        return device.world_size() // self.config.inference.engine.tensor_parallel_size

    def publish(self) -> None:
        self.version += 1
        self.weights.commit(self.version, 0)

    def train_to(self, model: str) -> None:
        """As if the optimizer's steps had ended at the weights of another checkpoint."""
        load_into(self.policy, model)

    def round(self, *requests: GenerateRequest, steps: int = 4, cancelled: tuple[str, ...] = ()) -> list[ReplicaAnswer]:
        """One GENERATE order; requests go to the replicas in turn. Answers on rank 0, nothing elsewhere."""
        shares = [list(requests[number :: self.replicas]) for number in range(self.replicas)]
        order = Round(f"{EPOCH}/{self.version}", steps, shares, list(cancelled))
        return self.replica.run(Round.decode(order.encode())) or []

    def rounds(self, *requests: GenerateRequest) -> list[ReplicaAnswer]:
        """Until all that is under way is finished; the ranks agree on when that is."""
        answers = self.round(*requests)
        deadline = time.monotonic() + ROUND_SECONDS
        while bool(torch.tensor(self._busy_anywhere())):
            assert time.monotonic() < deadline
            answers += self.round()
        return answers

    def close(self) -> None:
        self._path.__exit__(None, None, None)
        self._opened.__exit__(None, None, None)

    def _busy_anywhere(self) -> bool:
        from torchtitan.distributed.collectives import all_reduce_sum

        return all_reduce_sum(torch.tensor(float(self.replica._engine.busy))).item() > 0

    def _note_every_rank(self) -> None:
        """The tokens of every sample on every rank, not only on those that speak for their group."""
        engine: Any = self.replica._engine
        step = engine.step

        def recording() -> Any:
            finished = step()
            self.tokens |= {name: completion.token_ids for name, completion in finished}
            return finished

        engine.step = recording


def draws_to_come() -> str:
    """Of all generators that the trainer has, without drawing."""
    states = (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[union-attr]
    return hashlib.sha256(repr(states).encode()).hexdigest()


def shared_memory() -> set[str]:
    """Names under which vLLM's ranks would find each other's memory."""
    return {path.name for path in Path("/dev/shm").glob("*cpushm*")}


def as_json(answers: list[ReplicaAnswer]) -> dict[str, Any]:
    return {
        answer.request_id: {"refused": answer.refused, "completions": [reply.to_json() for reply in answer.completions]}
        for answer in answers
    }


def play_parts(folder: str, parts: list[dict[str, Any]]) -> list[Any]:
    """What happens in each part, one engine after the other in the same process."""
    results = []
    with own_sockets():
        for number, part in enumerate(parts):
            part_folder = Path(folder) / str(number)
            part_folder.mkdir(exist_ok=True)
            results.append(globals()[part.pop("function")](str(part_folder), **part))
    return results


def story(folder: str, models: list[str], options: list[str], prompts: list[list[int]], long: list[int]) -> Any:
    """Two versions: samples of the first, samples that live through the change, and samples of the second."""
    shared_before = shared_memory()
    engine = Colocated(folder, models[0], options)
    try:
        engine.publish()
        first = engine.rounds(
            *(request(f"first-{number}", prompt, 24, n=2) for number, prompt in enumerate(prompts)),
            *(request(f"first-greedy-{number}", prompt, 24, temperature=0.0) for number, prompt in enumerate(prompts)),
        )
        # Two on the way when the weights change: one prompt per replica at least.
        across = [request(f"across-{number}", long, 40, n=2) for number in range(2)]
        engine.round(*across, steps=9)
        # Two that are asked for and have not begun.
        engine.round(*(request(f"late-{number}", long, 24, n=2) for number in range(2)), steps=0)
        engine.train_to(models[1])
        engine.publish()
        second = engine.rounds(
            *(request(f"second-long-{number}", long, 24, n=2) for number in range(2)),
            *(request(f"second-{number}", prompt, 24, n=2) for number, prompt in enumerate(prompts)),
            *(request(f"second-greedy-{number}", prompt, 24, temperature=0.0) for number, prompt in enumerate(prompts)),
        )
        truncated = request("truncated", prompts[0], 4)
        truncated.sampling.top_p = 0.9
        odd = engine.rounds(request("too-long", [5] * 300, 4), truncated, request("fits", prompts[0], 4))
        engine.round(request("unwanted", prompts[0], 200), steps=2)
        engine.round(steps=0, cancelled=("unwanted",))
        dropped = not engine.replica._engine.busy
        return {
            "answers": as_json([*first, *second, *odd]),
            "tokens": engine.tokens,
            "threads": engine.threads,
            "random_numbers_kept": engine.random_numbers_kept,
            "dropped": dropped,
            "stale": refuses_stale_weights(engine),
            "left_behind": sorted(shared_memory() - shared_before),
            "actors": {name: status.version for name, status in engine.weights.actors().items()},
        }
    finally:
        engine.close()


def adapted(folder: str, model: str, options: list[str], prompt: list[int]) -> Any:
    """Two versions of adapters: each one's merged checkpoint in `folder`/merged-N, and what was sampled with it."""
    engine = Colocated(folder, model, ["--lora.rank", "4", "--lora.modules_to_save", "norm", *options])
    try:
        answers = []
        for version in range(2):
            randomize_adapters(engine.policy, version)
            export_policy(engine.policy, Path(folder) / f"merged-{version}")
            engine.publish()
            answers.append(as_json(engine.rounds(request("one", prompt, 24)))["one"])
        return answers
    finally:
        engine.close()


def refuses_stale_weights(engine: Colocated) -> str:
    """What an order says to engines that hold another version than it asks for."""
    try:
        engine.replica.run(Round(f"{EPOCH}/{engine.version + 1}", 4, [[] for _ in range(engine.replicas)]))
    except RuntimeError as error:
        return str(error)
    return ""
