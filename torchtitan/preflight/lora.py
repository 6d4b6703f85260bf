"""What [lora] must satisfy together with the rest of a configuration. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchtitan.config.fields import Problem, nearest, show
from torchtitan.config.job_config import JobConfig
from torchtitan.models.shape import NORMS, TARGETS


def check_lora(config: JobConfig, planning: bool) -> Iterator[Problem]:
    """Problems of [lora]; none where it is off. `planning`: no checkpoint files are needed."""
    lora = config.lora

    def refuse(key: str, text: str) -> Problem:
        return Problem(f"lora.{key}", f"lora.{key} = {show(getattr(lora, key))} is not allowed: {text}")

    if lora.rank == 0:
        if lora.base_bits != 16:
            yield refuse("base_bits", "must be 16 with lora.rank = 0: only frozen weights can be held in fewer bits")
        return
    if not lora.target_modules:
        yield refuse("target_modules", f"must name at least one of {', '.join(TARGETS)}")
    for key, names, known in (
        ("target_modules", lora.target_modules, TARGETS),
        ("modules_to_save", lora.modules_to_save, (*TARGETS, *NORMS)),
    ):
        for name in names:
            if name not in known:
                yield refuse(key, f"must be made of {', '.join(known)}{nearest(name, known)}")
        if len(set(names)) < len(names):
            yield refuse(key, "every module may be named once")
    if both := [name for name in lora.modules_to_save if name in lora.target_modules]:
        yield refuse(
            "modules_to_save", f"{', '.join(both)} is in lora.target_modules, too: a module is one or the other"
        )
    tensor_parallel = config.parallelism.tensor_parallel_degree > 1
    if tensor_parallel and lora.dropout > 0:
        yield refuse("dropout", "must be 0 with parallelism.tensor_parallel_degree > 1, whose ranks share activations")
    if tensor_parallel and "embed_tokens" in lora.target_modules:
        yield refuse("target_modules", "embed_tokens cannot be one with parallelism.tensor_parallel_degree > 1")
    if lora.modules_to_save and config.training.dtype != "float32":
        yield refuse("modules_to_save", "needs training.dtype = float32, the type of all that is trained")
    if config.grpo.kl_coefficient > 0 and config.grpo.reference_ema_decay > 0:
        text = "must be 0 with lora.rank > 0: the reference is the model without adapters"
        key = "grpo.reference_ema_decay"
        yield Problem(key, f"{key} = {config.grpo.reference_ema_decay:g} is not allowed: {text}")
    directory = Path(config.model.hf_assets_path)
    random = config.model.flavor and not planning and not any(directory.glob("*.safetensors"))
    if random and not config.rollout.replay:
        yield refuse("rank", "needs the weights of model.hf_assets_path: actors get nothing but the adapters")
    if lora.base_bits == 4 and tensor_parallel:
        yield refuse("base_bits", "must be 16 with parallelism.tensor_parallel_degree > 1")
    if lora.base_bits == 4 and random:
        yield refuse("base_bits", "must be 16 where the weights are random: there are none in model.hf_assets_path")
    if lora.adapter_path and not (Path(lora.adapter_path) / "adapter_config.json").is_file():
        yield refuse("adapter_path", f"there is no adapter_config.json in it (looked in {Path.cwd()})")
