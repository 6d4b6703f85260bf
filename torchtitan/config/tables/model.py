"""The model, its adapters, and how it is laid out over the ranks."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.values import TABLE, Count, CountOrZero, PathText, Positive, Range, ShareBelowOne


@dataclass(config=TABLE)
class Model:
    name: Literal["auto", "llama3", "qwen2", "qwen3", "qwen3_moe", "gpt_oss"] = "auto"
    """Model family; auto reads it from hf_assets_path/config.json"""

    implementation: Literal["auto", "native", "transformers"] = "auto"
    """Whose layers compute the model: native are this program's, which have all parallelisms and the embedded engine;
    transformers' (its package is an extra) have FSDP2 and LoRA. auto: native where the family is, else transformers"""

    flavor: str = ""
    """Shape from the table of public shapes (e.g. 0.6B); empty reads it from hf_assets_path/config.json"""

    hf_assets_path: PathText = ""
    """Hugging Face checkpoint directory (config.json, *.safetensors, tokenizer.json), or the folder of a run, whose
    last export is taken"""

    logprob_head: Literal["one_pass", "two_pass", "full"] = "one_pass"
    """Log-probs without full logits, with gradients formed in the forward where the objective is separable by tokens
    (else two_pass), or always two_pass; full holds all logits, to compare with"""

    logprob_head_budget_mb: CountOrZero = 0
    """Memory for logits at a time, in MiB; a GPU takes as much again beside it. Not named, it is 1024 where the ranks
    have GPUs; 0 is 1024 for tensors on a GPU, else an eighth of the head's gradients, 8 to 36"""


@dataclass(config=TABLE)
class Lora:
    rank: CountOrZero = 0
    """Columns of the low-rank adapters that are trained in place of the model's weights; 0 trains the weights"""

    alpha: Positive = 32.0
    """An adapter counts alpha / rank times"""

    dropout: ShareBelowOne = 0.0
    """Share of an adapter's input that is left out while training"""

    target_modules: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    """Modules that get adapters; lm_head and embed_tokens are possible too"""

    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole beside the adapters, such as lm_head or norm"""

    adapter_path: str = ""
    """Adapter directory in PEFT's format to start from; empty starts with adapters that change nothing"""

    base_bits: Literal[4, 16] = 16
    """Bits of the layers' frozen projections: 4 holds them quantised (QLoRA, NF4), 16 in training.dtype"""


@dataclass(config=TABLE)
class ActivationCheckpoint:
    mode: Literal["none", "selective", "full"] = "none"
    """Which layers recompute their activations in the backward"""

    selective_ac_option: Count = 2
    """With selective: every n-th layer is checkpointed"""


@dataclass(config=TABLE)
class Compile:
    enable: bool = False
    """torch.compile every decoder layer"""

    backend: str = "inductor"
    """Backend of torch.compile"""


@dataclass(config=TABLE)
class Parallelism:
    data_parallel_replicate_degree: Count = 1
    """Replicas of the sharded model (HSDP)"""

    data_parallel_shard_degree: Annotated[int, Range(1, also=-1)] = -1
    """Ranks that share one copy of the model (FSDP2); -1 takes the ranks that are left"""

    context_parallel_degree: Count = 1
    """Ranks that share the tokens of every micro-batch, for sequences that do not fit one rank; each rank has an equal
    part of the tokens, and in attention some of the heads. Parameters are sharded over them, too"""

    tensor_parallel_degree: Count = 1
    """Ranks that share every layer (tensor parallelism with sequence parallelism)"""

    expert_parallel_degree: Count = 1
    """Ranks, among the shards and their tensor-parallel ranks, that have different experts of a mixture: tokens travel
    to the experts"""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after the forward; default does so for all layers but the last"""

    fsdp_reduce_gradients: Literal["micro_batch", "optimizer_step"] = "micro_batch"
    """Add gradients up over the ranks after every micro-batch, or once per optimizer step: less communication for the
    memory of the whole model's gradients on each rank, where micro-batches add up in training.mixed_precision_reduce"""


@dataclass(config=TABLE)
class Comm:
    init_timeout_seconds: Count = 300
    """Deadline of the first collective"""

    train_timeout_seconds: Count = 120
    """Deadline of every later collective"""

    interface: str = ""
    """Network interface of the ranks on every machine, such as ib0 (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); empty:
    gloo takes the one that leads to rank 0, NCCL chooses by itself"""
