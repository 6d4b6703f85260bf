"""Policies: one decoder definition, Hugging Face checkpoints in and out, parallelism."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.models.hf_checkpoint import export_policy, load_policy

__all__ = ["export_policy", "load_policy"]


def __getattr__(name: str) -> Any:
    # Lazy: reading a model's shape (for config checks) must not import torch.
    if name in __all__:
        from torchtitan.models import hf_checkpoint

        return getattr(hf_checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
