"""Runs inside of real engines, and spoils the next load of weights as a file says. See the scenario
`sabotage`.

The file is `$TORCHTITAN_SABOTAGE.RANK`, one for each worker, and holds a word; it is gone once that has been done.

    python -m benchmarks.weight_sync.saboteur ...            the embedded engine, with its own arguments
    --worker-extension-cls benchmarks.weight_sync.saboteur_vllm.WorkerExtension
    benchmarks.weight_sync.saboteur:plug_into_sglang         an entry point of SGLang's plugins
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

import torch

VARIABLE = "TORCHTITAN_SABOTAGE"
VICTIM = "model.layers.1.mlp.down_proj.weight"
TWINS = ("model.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight")
# Bits of a bfloat16: the highest of the exponent, and the lowest of it, which doubles or halves.
HIGH_BIT, LOW_BIT = 14, 7
# What a load that is left out says of itself.
NO_LOAD = ("stale", "one_of_two")


def asked(rank: int = 0) -> str:
    """What the next load of this worker is to suffer, nothing if it is to be left alone."""
    file = Path(f"{os.environ[VARIABLE]}.{rank}")
    if not file.exists():
        return ""
    kind = file.read_text()
    file.unlink()
    return kind


def spoiled(kind: str, weights: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """A version's tensors as an engine's loader is to see them."""
    tensors: dict[str, Any] = dict(weights)
    spoil(kind, tensors, {name: torch.zeros_like(tensors[name]) for name in (VICTIM,)})
    return list(tensors.items())


def spoil(kind: str, tensors: MutableMapping[str, Any], older: dict[str, torch.Tensor]) -> None:
    """Change what `tensors` hold. older: what some of them held before."""
    if kind in ("flip", "flip_low"):
        changed = tensors[VICTIM].clone()
        element = changed.view(-1)[1234:1235]
        bits = element.bfloat16().view(torch.int16) ^ (1 << (HIGH_BIT if kind == "flip" else LOW_BIT))
        element.copy_(bits.view(torch.bfloat16))
        tensors[VICTIM] = changed
    elif kind == "missing":
        del tensors[VICTIM]
    elif kind == "swap":
        tensors[TWINS[0]], tensors[TWINS[1]] = tensors[TWINS[1]].clone(), tensors[TWINS[0]].clone()
    elif kind == "torn":
        changed = tensors[VICTIM].clone()
        changed[: len(changed) // 2] = older[VICTIM][: len(changed) // 2]
        tensors[VICTIM] = changed


# The embedded engine


def embed() -> int:
    """Its live tensors are changed once a version has been applied."""
    from torchtitan.inference.engines.embedded import __main__, weights

    applied = weights.Verifier.applied
    before: dict[str, torch.Tensor] = {}

    def spoil_and_verify(self: weights.Verifier, staged: Any) -> None:
        live, kind = self._live(), asked()
        wanted = {name: tensor.detach().clone() for name, tensor in live.items()}
        if kind == "missing":
            wanted[VICTIM] = before[VICTIM]
        elif kind == "stale":
            wanted = dict(before)
        elif kind:
            spoil(kind, wanted, before)
        before.update({name: tensor.detach().clone() for name, tensor in live.items()})
        if kind:
            with torch.no_grad():
                for name, tensor in live.items():
                    tensor.copy_(wanted[name])
        applied(self, staged)

    weights.Verifier.applied = spoil_and_verify  # type: ignore[method-assign]
    return __main__.main(sys.argv[1:])


# SGLang


def plug_into_sglang() -> None:
    """Called in each of its processes."""
    from sglang.srt.distributed import get_tensor_model_parallel_rank
    from sglang.srt.model_loader.loader import DefaultModelLoader

    load = DefaultModelLoader.load_weights_and_postprocess

    def spoil_and_load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], device: Any) -> None:
        rank = get_tensor_model_parallel_rank()
        kind = asked(rank)
        if kind not in NO_LOAD or (kind == "one_of_two" and rank == 0):
            load(model, spoiled(kind, weights) if kind else weights, device)

    DefaultModelLoader.load_weights_and_postprocess = staticmethod(spoil_and_load)


def install_into_sglang(folder: Path) -> None:
    """Have it find the plugin where this folder is on the path."""
    about = folder / "torchtitan_saboteur-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan-saboteur\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nsaboteur = benchmarks.weight_sync.saboteur:plug_into_sglang\n"
    )


if __name__ == "__main__":
    sys.exit(embed())
