"""What "auto" means for the type of products: bfloat16 where that is faster, by the device and the model. No torch."""

from __future__ import annotations

from typing import Literal

from torchtitan.config.gpu_defaults import trains_on_gpu
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.utils.machine import bfloat16_flags

# A smaller model spends its time between the products, whose exact equality in trainer and engine would be lost.
REAL_PARAMETERS = 50_000_000


def choose_types(config: JobConfig) -> str:
    """Replace "auto" in training.mixed_precision_param and inference.dtype. Returns what was chosen and why, or an
    empty string where nothing had to be chosen."""
    choices = []
    training, inference = config.training, config.inference
    if training.mixed_precision_param == "auto":
        training.mixed_precision_param, why = _automatic(config, trains_on_gpu())
        choices.append(f"training.mixed_precision_param = {training.mixed_precision_param}, because {why}")
    if inference.dtype == "auto":
        # Some engines compute on the CPU whatever the trainer has.
        inference.dtype, why = _automatic(config, trains_on_gpu() and config.inference.spec.on_gpus)
        choices.append(f"inference.dtype = {inference.dtype}, because {why}")
    return "; ".join(choices)


def _automatic(config: JobConfig, on_gpu: bool) -> tuple[Literal["float32", "bfloat16"], str]:
    if on_gpu:
        return "bfloat16", "the ranks have GPUs"
    flags = bfloat16_flags()
    if not flags:
        return "float32", "this processor has neither AVX512_BF16 nor AMX"
    try:
        count = read_shape(config).num_parameters()
    except UserError:  # check_model() reports it
        count = 0
    if count < REAL_PARAMETERS:
        return "float32", f"the model has {count:,} parameters, fewer than {REAL_PARAMETERS:,}"
    return "bfloat16", f"the processor has {' and '.join(flags)} and the model {count:,} parameters"
