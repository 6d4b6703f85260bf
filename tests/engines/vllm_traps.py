"""What could go wrong in a vLLM that gets new weights; one engine after the other here.

    {vLLM's python} -m tests.engines.vllm_traps '[[MODEL, OTHER_MODEL, [CASE, …]], …]'
        prints for each of them {case: log-probs of the probe, or an error}; without cases for all cases

OTHER_MODEL holds the new weights, of the same architecture. Tests call `cases`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Shard

from tests.processes import ENVIRONMENT, ROOT
from torchtitan.weight_sync.memory.manifest import Layout
from torchtitan.weight_sync.memory.staging import Staging
from torchtitan.weight_sync.trainer.plan import Placed, PlacedParameter, plan_rank

# Longer than a block of the KV cache, so that its beginning can be found there.
PROBE = [(7 * i + i * i // 5) % 60 + 2 for i in range(150)]
# How many of its tokens are scored. (vLLM does not read its prefix cache for those whose log-probs it is asked for.)
SCORED = 8


def cases(python: Path, models: Sequence[tuple[str, str, list[str]]]) -> list[dict[str, Any]]:
    """Run this file in vLLM's environment."""
    done = subprocess.run(
        [str(python), "-m", "tests.engines.vllm_traps", json.dumps(models)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    found: list[dict[str, Any]] = json.loads(lines[0].removeprefix("RESULTS "))
    return found


class Engine:
    """vLLM in this process."""

    def __init__(self, model: str, dtype: str):
        from vllm import LLM

        self.llm = LLM(
            model,
            enforce_eager=True,
            dtype=dtype,
            max_model_len=256,
            kv_cache_memory_bytes=64 * 2**20,
            enable_prefix_caching=True,
            max_logprobs=-1,
        )
        self.worker: Any = self.llm.llm_engine.model_executor.driver_worker.worker
        self.model: torch.nn.Module = self.worker.get_model()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def log_probs(self) -> list[float]:
        """Of the probe's last tokens, each sampled greedily after those before it."""
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, detokenize=False, ignore_eos=True)
        prompts = [TokensPrompt(prompt_token_ids=PROBE[:end]) for end in range(len(PROBE) - SCORED, len(PROBE))]
        answers = self.llm.generate(prompts, sampling, use_tqdm=False)
        given = zip(answers, PROBE[-SCORED:], strict=True)
        return [answer.outputs[0].logprobs[0][token].logprob for answer, token in given]

    def load(self, weights: Any, recorder: Any = None) -> None:
        """As our backend does."""
        from vllm.config import set_current_vllm_config

        from torchtitan.inference.engines.vllm.loading import load_weights

        with set_current_vllm_config(self.worker.vllm_config):
            load_weights(self.model, self.worker.model_config, weights, recorder)


def in_trainers_order(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Layer by layer, with what vLLM stacks one behind the other."""
    order = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    names = sorted(weights, key=lambda name: order.index(part) if (part := name.split(".")[-2]) in order else -1)
    return {name: weights[name] for name in sorted(names, key=lambda name: name.split(".")[:3])}


def received(weights: dict[str, torch.Tensor], ranks: int = 2, bucket_bytes: int = 2**20) -> Staging:
    """Staging memory that holds these weights, each cut by its rows over the ranks of a trainer."""
    plans = []
    for rank in range(ranks):
        placed = [Placed(tuple(tensor.shape), (ranks,), (rank,), (Shard(0),)) for tensor in weights.values()]
        parameters = [PlacedParameter(name, place) for name, place in zip(weights, placed, strict=True)]
        plans.append(plan_rank(parameters, rank, dtype_of(weights), bucket_bytes))
    staging = Staging(Layout(bucket_bytes, plans[0].parameters, tuple(plan.ranks[0] for plan in plans)))
    for (area,), layout in zip(staging.memory, staging.layout.ranks, strict=True):
        for shard in layout:
            whole = weights[staging.layout.parameters[shard.parameter].name]
            rows = whole[shard.offset[0] : shard.offset[0] + shard.shape[0]].contiguous()
            area[shard.byte_offset : shard.byte_offset + rows.nbytes] = rows.view(torch.uint8).numpy().tobytes()
    return staging


def dtype_of(weights: dict[str, torch.Tensor]) -> str:
    """The type that all of them have."""
    return str(next(iter(weights.values())).dtype).removeprefix("torch.")


def breaking_off(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Half of the first layer's projections, then an error."""
    for name, tensor in weights.items():
        if "v_proj" in name:
            raise ConnectionError("broken off")
        yield name, torch.full_like(tensor, 7.0)


def main(models: list[tuple[str, str, list[str]]]) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    torch.set_num_threads(1)
    print("RESULTS " + json.dumps([run_cases(*arguments) for arguments in models]))


def run_cases(model: str, other: str, only: list[str]) -> dict[str, Any]:
    """What each case led to, in an engine that is gone then."""
    from torchtitan.inference.engines.vllm import backend, loading

    old, new = (load_file(Path(folder) / "model.safetensors") for folder in (model, other))
    engine = Engine(model, dtype_of(old))
    results: dict[str, Any] = {}

    def record(case: str, load: Callable[[], None]) -> None:
        """Log-probs after `load`, which starts from the old weights."""
        if only and case not in only:
            return
        engine.load(iter(old.items()))
        engine.llm.reset_prefix_cache()
        engine.log_probs()
        try:
            load()
        except Exception as error:
            results[case] = f"{type(error).__name__}: {error}"
            return
        results[case] = engine.log_probs()

    def load_without_repacking() -> None:
        with mock.patch.object(loading, "repack_tied_heads", lambda _: None):
            load_all()

    def load_twice_without_repacking() -> None:
        with contextlib.suppress(loading.IncompleteVersion):
            load_without_repacking()
        load_without_repacking()

    def load_and_look() -> None:
        """Which layers still have packed weights when the first new ones are asked for."""

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            results["packed_while_loading"] = packed()
            yield from new.items()

        results["packed_before"] = packed()
        engine.load(weights())
        results["packed_after"] = packed()
        engine.llm.reset_prefix_cache()

    def packed() -> list[str]:
        layers = engine.model.named_modules()
        return [name for name, layer in layers if layer.__dict__.get(loading.PACKED) is not None]

    def load_all() -> None:
        engine.load(iter(new.items()))
        engine.llm.reset_prefix_cache()

    def load_after_a_failure() -> None:
        try:
            engine.load(breaking_off(new))
        except ConnectionError:
            load_all()

    def load_in_place() -> None:
        """From staging memory, which is another version's as soon as this one is loaded."""
        staged, again = received(in_trainers_order(new), ranks=1).tensors, loading.LoadRecorder()
        engine.load(iter(old.items()), again)
        with mock.patch.object(loading, "_joined", mock.Mock(side_effect=loading._joined)) as joined:
            engine.load(staged, again)
        results["in_place_layers"] = joined.call_count
        weights = (getattr(layer, "weight", None) for layer in engine.model.modules())
        results["layers_without_weight"] = sum(weight is not None and weight.numel() == 0 for weight in weights)
        for tensor in staged.values():
            tensor.fill_(7.0)
        engine.llm.reset_prefix_cache()

    def found(doubled: str = "") -> list[str]:
        """What does not look like the new weights once they are loaded, one element of a parameter doubled."""
        weights = {name: tensor.clone() for name, tensor in new.items()}
        if doubled:
            weights[doubled].view(-1)[13] *= 2
        engine.load(received(in_trainers_order(weights)).tensors, recorder)
        staged = received(in_trainers_order(new)).tensors
        looks = backend.comparisons(engine.model, recorder.loads.values(), staged)
        return sorted({names for names, same in looks if same is not None and not same})

    results["first"] = engine.log_probs()
    record("loaded", load_all)
    record("stale_head", load_without_repacking)
    record("stale_head_again", load_twice_without_repacking)
    record("one_model_at_a_time", load_and_look)
    record("in_place", load_in_place)
    record("after_a_failure", load_after_a_failure)
    record("incomplete", lambda: engine.load((n, t) for n, t in new.items() if "layers.1.mlp" not in n))
    record("loaded_again", load_all)
    recorder = loading.LoadRecorder()
    if only and "found" not in only:
        engine.close()
        return results
    parameters = ["self_attn.k_proj", "self_attn.q_norm", "mlp.down_proj"]
    parameters = [f"model.layers.1.{name}.weight" for name in parameters] + ["model.embed_tokens.weight", ""]
    results["found"] = {name: found(name) for name in parameters}
    engine.close()
    return results


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
