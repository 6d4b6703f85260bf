"""GRPO post-training of language models in the style of torchtitan, with asynchronous weight sync."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.grpo_train import train as train

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`from torchtitan import train`; the engines' processes import this package too, and need nothing of that."""
    if name == "train":
        from importlib import import_module

        return import_module("torchtitan.grpo_train").train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
