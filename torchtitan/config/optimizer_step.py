"""What an optimizer step takes, and how precise its sums are and how large its learning rate is."""

from __future__ import annotations

from torchtitan.config.job_config import JobConfig


def warn_no_fp32_masters(config: JobConfig) -> str | None:
    """What to say of a run whose master weights are rounded to bfloat16; None where they are not."""
    if config.training.dtype != "bfloat16" or config.lora.rank:
        return None
    return (
        'training.dtype = "bfloat16" has no float32 master weights: an update below 1/256 of a weight is lost, as most '
        f'are with optimizer.lr = {config.optimizer.lr:g}. Set training.mixed_precision_param = "bfloat16" instead'
    )


def warn_long_warmup(config: JobConfig) -> str | None:
    """What to say of a run that ends before its learning rate has reached its peak; None of others. With sft.epochs,
    training.steps is known only once the data have been read."""
    warmup, steps = config.lr_scheduler.warmup_steps, config.training.steps
    if not warmup or warmup < steps:
        return None
    return (
        f"lr_scheduler.warmup_steps = {warmup} is not below training.steps = {steps}: the learning rate rises all the "
        f"time and never reaches optimizer.lr = {config.optimizer.lr:g}"
    )


def keeps_unsharded_params(config: JobConfig) -> bool:
    """Whether a rank keeps the gathered form of parameters that it holds alone, and the sum of their gradients, through
    all micro-batches of an optimizer step: their sums are as precise then, and adapters have no use for the memory."""
    training = config.training
    return (
        config.parallelism.fsdp_reshard_after_forward != "always"
        and training.enable_cpu_offload is not True
        and training.mixed_precision_reduce == training.dtype
        and not config.lora.rank
    )


def groups_per_batch(config: JobConfig) -> int:
    """Groups of a batch over all ranks; of demonstrations, each is one row."""
    return config.training.global_batch_size // group_size(config)


def group_size(config: JobConfig) -> int:
    """Samples of one row."""
    return 1 if config.job.stage == "sft" else config.grpo.group_size
