"""What other trainers of language models by reinforcement call the keys of this one."""

from __future__ import annotations

import re

from torchtitan.config.job_config import known_keys

_GROUP, _BATCH = "grpo.group_size", "training.global_batch_size (in completions, over all ranks)"
_PACK = "training.tokens_per_micro_batch (by tokens)"
_PROMPT = "training.seq_len (prompt and completion together)"
_LENGTH, _KL = "rollout.max_completion_tokens", "grpo.kl_coefficient"
_LOW, _HIGH, _DUAL = "grpo.epsilon_low", "grpo.epsilon_high", "grpo.delta"
_MODEL, _DATA, _RATE = "model.hf_assets_path", "rollout.dataset", "optimizer.lr"
_STEPS, _WARMUP = "training.steps (in batches)", "lr_scheduler.warmup_steps (in batches)"
_MINIBATCHES = "grpo.num_minibatches (how many a batch is divided into)"
_ENGINE = "inference.vllm"
_MEMORY = f"{_ENGINE}.memory_gb (an amount, not a share)"

OTHER_NAMES: dict[str, str] = {
    # GRPOConfig and ModelConfig of TRL, and what it has from transformers' TrainingArguments
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "beta": _KL,
    "epsilon": _LOW,
    "eval_steps": "eval.interval",
    "generation_batch_size": _BATCH,
    "gradient_accumulation_steps": _PACK,
    "gradient_checkpointing": "activation_checkpoint.mode",
    "importance_sampling_level": "grpo.loss_type (gspo)",
    "learning_rate": _RATE,
    "logging_steps": "metrics.log_freq",
    "lora_r": "lora.rank",
    "lora_target_modules": "lora.target_modules",
    "lr_scheduler_type": "lr_scheduler.decay_type",
    "mask_truncated_completions": "grpo.mask_truncated",
    "max_completion_length": _LENGTH,
    "max_grad_norm": "training.max_norm",
    "max_prompt_length": _PROMPT,
    "max_steps": _STEPS,
    "model_name_or_path": _MODEL,
    "multi_objective_aggregation": "grpo.reward_aggregation",
    "num_generations": _GROUP,
    "num_train_epochs": _STEPS,
    "optim": "optimizer.name",
    "output_dir": "job.dump_folder",
    "per_device_train_batch_size": _BATCH,
    "report_to": "metrics.loggers",
    "reward_funcs": "rewards.functions",
    "reward_weights": "rewards.weights",
    "save_steps": "checkpoint.interval",
    "steps_per_generation": _MINIBATCHES,
    "top_entropy_quantile": "grpo.entropy_top_share",
    "train_dataset": _DATA,
    "use_vllm": "inference.backend",
    "vllm_gpu_memory_utilization": _MEMORY,
    "vllm_importance_sampling_clip_max": "grpo.importance_cap",
    "vllm_importance_sampling_correction": "grpo.off_policy_correction",
    "vllm_mode": "inference.backend (vllm, or colocated)",
    "vllm_server_base_url": "inference.servers",
    "vllm_tensor_parallel_size": f"{_ENGINE}.tensor_parallel_size",
    "warmup_ratio": _WARMUP,
    # verl's ppo_trainer.yaml
    "adv_estimator": "grpo.advantage",
    "clip_grad": "training.max_norm",
    "clip_ratio": _LOW,
    "clip_ratio_c": _DUAL,
    "clip_ratio_high": _HIGH,
    "clip_ratio_low": _LOW,
    "default_local_dir": "job.dump_folder",
    "entropy_coeff": "grpo.entropy_coefficient",
    "filter_groups.enable": "grpo.drop_zero_variance",
    "gpu_memory_utilization": _MEMORY,
    "grad_clip": "training.max_norm",
    "kl_coef": _KL,
    "kl_loss_coef": _KL,
    "loss_agg_mode": "grpo.loss_normalization",
    "lr_warmup_steps": _WARMUP,
    "max_assistant_turns": "environment.max_turns",
    "max_response_length": _LENGTH,
    "norm_adv_by_std_in_grpo": "grpo.scale_rewards",
    "ppo_epochs": "grpo.num_iterations",
    "ppo_max_token_len_per_gpu": _PACK,
    "ppo_micro_batch_size_per_gpu": _PACK,
    "ppo_mini_batch_size": _MINIBATCHES,
    "prompt_key": "rollout.prompt_column",
    "response_length": _LENGTH,
    "rollout.n": _GROUP,
    "rollout_is_threshold": "grpo.importance_cap",
    "save_freq": "checkpoint.interval",
    "tensor_model_parallel_size": f"{_ENGINE}.tensor_parallel_size",
    "test_freq": "eval.interval",
    "total_epochs": _STEPS,
    "total_training_steps": _STEPS,
    "train_batch_size": _BATCH,
    "train_files": _DATA,
    "ulysses_sequence_parallel_size": "parallelism.context_parallel_degree",
    "use_kl_loss": _KL,
    "val_files": "eval.dataset",
    # Options of OpenRLHF's train_ppo_ray
    "actor_learning_rate": _RATE,
    "advantage_estimator": "grpo.advantage",
    "dual_clip": _DUAL,
    "dynamic_filtering": "grpo.drop_zero_variance",
    "entropy_loss_coef": "grpo.entropy_coefficient",
    "eps_clip": _LOW,
    "generate_max_len": _LENGTH,
    "init_kl_coef": _KL,
    "input_key": "rollout.prompt_column",
    "label_key": "rewards.answer_column",
    "lr_warmup_ratio": _WARMUP,
    "max_epochs": "grpo.num_iterations",
    "micro_train_batch_size": _PACK,
    "n_samples_per_prompt": _GROUP,
    "num_episodes": _STEPS,
    "pretrain": _MODEL,
    "prompt_data": _DATA,
    "prompt_max_len": _PROMPT,
    "ring_attn_size": "parallelism.context_parallel_degree",
    "rollout_batch_size": _BATCH,
    "vllm_num_engines": "inference.num_actors",
    # What was a key here before there were tables by kind
    "engine_args": f"{_ENGINE}.args",
    "engine_memory_gb": f"{_ENGINE}.memory_gb",
    "engine_python": f"{_ENGINE}.python",
    "disk_path": "weight_sync.disk.path",
    "gateway_host": "environment.gateway.host",
    "gateway_port": "environment.gateway.port",
    "gateway_url": "environment.gateway.url",
    "inference.launch": "inference.num_actors (0 for false)",
    "inference.mode": "inference.backend (colocated for colocate)",
    "join_timeout_s": "inference.startup_timeout_s",
    "eval.enable": "eval.num_prompts (0 for false)",
    "comm.init_timeout_seconds": "comm.train_timeout_seconds (1.5 × as long, at least 300 s)",
    "checkpoint.load_step": "checkpoint.resume (RUN/checkpoint/step-N)",
    "job.description": "job.name (more is for a comment in the file)",
    "rollout.shuffle": "rollout.sampler (in_order for false)",
    "offload_optimizer": 'training.enable_cpu_offload ("optimizer")',
    "weight_sync.delta": "weight_sync.tcp.delta",
    "weight_sync.relay": "weight_sync.tcp.relay",
    "weight_sync.route": f"{_ENGINE}.route",
    # Keys of torchtitan that this program had once
    "checkpoint.folder": "job.dump_folder (a run's checkpoints are in its folder checkpoint)",
    "compile.backend": "compile.enable (always with torch's own backend)",
    "enable_profiling": "metrics.profile_freq (0 for false)",
    "enable_tensorboard": "metrics.loggers (tensorboard)",
    "enable_wandb": "metrics.loggers (wandb)",
    "local_batch_size": _PACK,
    "profiling.profile_freq": "metrics.profile_freq",
    "selective_ac_option": "activation_checkpoint.mode (selective: every second layer; op)",
}
"""The end of their name -> the key here, and what to know of its value"""


def name_here(name: str) -> str:
    """` (… is … here)` for a name, with or without tables, that others have for a key; else an empty string. Where its
    table has a key that contains the name, such as beta1 for beta, that one was meant."""
    if name in OTHER_NAMES and "." in name:
        return f" ({name} is {OTHER_NAMES[name]} here)"
    table, _, last = name.rpartition(".")
    alike = re.compile(rf"{re.escape(f'{table}.')}(.+_)?{re.escape(last)}(\d+|_.+)?")
    if table and any(alike.fullmatch(known) for known in known_keys()):
        return ""
    parts = name.split(".")
    ends = (".".join(parts[first:]) for first in range(len(parts)))
    known = next((end for end in ends if end in OTHER_NAMES), None)
    return f" ({known} is {OTHER_NAMES[known]} here)" if known else ""
