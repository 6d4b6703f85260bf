"""GRPO post-training of language models in the style of torchtitan, with asynchronous weight sync."""

__version__ = "0.1.0"
