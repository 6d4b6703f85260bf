"""What [lora] must satisfy together with the rest of a configuration. No torch here."""

from __future__ import annotations

from pathlib import Path

from torchtitan.config.derived import has_engines
from torchtitan.config.values import nearest
from torchtitan.models.shape import NORMS, TARGETS
from torchtitan.preflight.check import Check


def check_lora(check: Check) -> None:
    """Problems of [lora]; none where it is off."""
    config, refuse = check.config, check.refuse
    lora = config.lora
    if lora.rank == 0:
        text = "must be 16 with lora.rank = 0: only frozen weights can be held in fewer bits"
        refuse("lora.base_bits", lora.base_bits != 16, text)
        return
    refuse("lora.target_modules", not lora.target_modules, f"must name at least one of {', '.join(TARGETS)}")
    for key, names, known in (
        ("lora.target_modules", lora.target_modules, TARGETS),
        ("lora.modules_to_save", lora.modules_to_save, (*TARGETS, *NORMS)),
    ):
        for name in names:
            refuse(key, name not in known, f"must be made of {', '.join(known)}{nearest(name, known)}")
        refuse(key, len(set(names)) < len(names), "every module may be named once")
    both = [name for name in lora.modules_to_save if name in lora.target_modules]
    text = f"{', '.join(both)} is in lora.target_modules, too: a module is one or the other"
    refuse("lora.modules_to_save", both, text)
    text = "needs training.dtype = float32, the type of all that is trained"
    refuse("lora.modules_to_save", lora.modules_to_save and config.training.dtype != "float32", text)
    text = "must be 0 with lora.rank > 0: the reference is the model without adapters"
    follows = config.grpo.kl_coefficient > 0 and config.grpo.reference_ema_decay > 0
    refuse("grpo.reference_ema_decay", follows, text)
    if config.parallelism.tensor_parallel_degree > 1:
        text = "with parallelism.tensor_parallel_degree > 1"
        refuse("lora.dropout", lora.dropout > 0, f"must be 0 {text}, whose ranks share activations")
        refuse("lora.target_modules", "embed_tokens" in lora.target_modules, f"embed_tokens cannot be one {text}")
        refuse("lora.base_bits", lora.base_bits == 4, f"must be 16 {text}")
    if config.model.flavor and not check.planning and not any(Path(config.model.hf_assets_path).glob("*.safetensors")):
        text = "needs the weights of model.hf_assets_path: actors get nothing but the adapters"
        refuse("lora.rank", has_engines(config), text)
        text = "must be 16 where the weights are random: there are none in model.hf_assets_path"
        refuse("lora.base_bits", lora.base_bits == 4, text)
    missing = lora.adapter_path and not (Path(lora.adapter_path) / "adapter_config.json").is_file()
    refuse("lora.adapter_path", missing, f"there is no adapter_config.json in it (looked in {Path.cwd()})")
