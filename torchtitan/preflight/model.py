"""Rules for the model's shape (from config.json or the table of flavors) and for job.stage.

They run before anything is loaded. No torch here; only the small files of checkpoints are read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torchtitan.config.job_config import JobConfig, value_at
from torchtitan.config.teachers import (
    compares_vocabulary,
    held_references,
    hint_column,
    hints_after_scoring,
    teacher_id,
)
from torchtitan.config.values import show
from torchtitan.errors import UserError, nearest
from torchtitan.inference.engines.checks import engines_for_any_family
from torchtitan.models.shape.checkpoint_shape import (
    BLOCK,
    FLAVORS,
    NORMS,
    TARGETS,
    ForeignArgs,
    quantized_projections,
    read_shape,
    read_teacher_shape,
)
from torchtitan.models.shape.exports import SHIPPED
from torchtitan.models.shape.model_args import FEED_FORWARD_PROJECTIONS, ModelArgs
from torchtitan.preflight.check import Check
from torchtitan.preflight.gpu_memory import check_gpu_memory
from torchtitan.preflight.hub import is_snapshot
from torchtitan.preflight.memory import check_memory

KEY = "model.hf_assets_path"
TEACHER = "distill.teacher"
STAGE_OF = {
    "grpo.observation_coefficient": "grpo",
    "sft.epochs": "sft",
    "sft.sample": "sft",
    TEACHER: "distill",
    "distill.server.url": "distill",
    "distill.add_rewards": "distill",
    "distill.divergence": "distill",
    "distill.hint": "distill",
}
"""Keys that turn something on -> the job.stage that has it. In another stage they would do nothing, or harm"""
DEFAULTS = JobConfig()


def check_lora(check: Check) -> None:
    """Check [lora]."""
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
    named_twice = [name for name in lora.modules_to_save if name in lora.target_modules]
    text = f"{', '.join(named_twice)} is in lora.target_modules too: name a module in one of the two"
    refuse("lora.modules_to_save", named_twice, text)
    text = "needs training.dtype = float32, the type of everything that is trained"
    refuse("lora.modules_to_save", lora.modules_to_save and config.training.dtype != "float32", text)
    text = "must be 0 with lora.rank > 0: the reference stays what the adapters began with"
    follows = "" in held_references(config) and config.grpo.reference_ema_decay > 0
    refuse("grpo.reference_ema_decay", follows, text)
    if config.parallelism.tensor_parallel_degree > 1:
        text = "with parallelism.tensor_parallel_degree > 1"
        refuse("lora.dropout", lora.dropout > 0, f"must be 0 {text}, whose ranks share activations")
        refuse("lora.target_modules", "embed_tokens" in lora.target_modules, f"leave out embed_tokens {text}")
        refuse("lora.base_bits", lora.base_bits == 4, f"must be 16 {text}")
    if config.model.flavor and not check.planning and not any(Path(config.model.hf_assets_path).glob("*.safetensors")):
        text = "needs the weights of model.hf_assets_path: actors get only the adapters"
        refuse("lora.rank", config.has_engines, text)
        text = "must be 16 because the weights are random: there are none in model.hf_assets_path"
        refuse("lora.base_bits", lora.base_bits == 4, text)
    missing = lora.adapter_path and not (Path(lora.adapter_path) / "adapter_config.json").is_file()
    refuse("lora.adapter_path", missing, f"there is no adapter_config.json in it (looked in {Path.cwd()})")


def check_model(check: Check) -> None:
    """Check [model] and everything that depends on the model's shape."""
    config, model = check.config, check.config.model
    if model.flavor:
        known = [name for family in FLAVORS if model.name in ("auto", family) for name in FLAVORS[family]]
        if model.flavor not in known:
            check.refuse("model.flavor", True, f"must be one of {', '.join(known)}{nearest(model.flavor, known)}")
            return
    if not (check.planning and model.flavor) and (problem := _missing(check)):
        check.say(KEY, f"{KEY} = {show(model.hf_assets_path)}{problem}")
        return
    try:
        args = read_shape(config)
    except UserError as error:
        check.say(KEY, str(error))
        return
    if isinstance(args, ForeignArgs):
        _check_foreign(check, args)
    _check_shape(check, args)
    check_memory(check, args)
    check_gpu_memory(check, args)


def _missing(check: Check) -> str:
    """Return what is missing from the checkpoint directory, or an empty string."""
    config, path = check.config, check.config.model.hf_assets_path
    directory = Path(path)
    if not path:
        return ": must be a Hugging Face checkpoint directory (config.json, tokenizer.json)"
    if not directory.is_dir():
        if directory.name in SHIPPED:
            return f" is not a directory; to have the checkpoint that comes with the package, give {directory.name}"
        parent = directory.parent
        siblings: list[str] = []
        if parent.is_dir():
            siblings = [folder.name for folder in parent.iterdir() if folder.is_dir()]
        return f" is not a directory (looked in {Path.cwd()}){nearest(directory.name, siblings)}"
    reason = ""
    if config.model.flavor:
        reason = (
            ", and actors start from a checkpoint, not from model.flavor: export one of this flavor first, or set "
            "model.hf_assets_path to one (no actor is started with rollout.replay, inference.servers, "
            "or job.stage = sft without sft.sample)"
        )
    starts_actors = config.has_engines and not config.inference.servers
    needs_model = starts_actors or not config.model.flavor
    if needs_model and not (directory / "config.json").is_file():
        return f": there is no config.json in it{reason}"
    if not (directory / "tokenizer.json").is_file():
        return ": there is no tokenizer.json in it"
    # A plan downloads no weights.
    needs_weights = needs_model and not (check.planning and is_snapshot(directory))
    if needs_weights and not any(directory.glob("*.safetensors")):
        return f": there are no *.safetensors in it{reason}"
    return ""


# The only values that the transformers library's layers support.
FOREIGN_LAYOUT: dict[str, object] = {
    **{f"parallelism.{key}_parallel_degree": 1 for key in ("context", "tensor", "expert")},
    "compile.enable": False,
}


def _check_foreign(check: Check, args: ForeignArgs) -> None:
    text = f"for {args.family}, whose layers are transformers'"
    allowed = FOREIGN_LAYOUT | {"lora.base_bits": 16, "grpo.routing_replay": False}
    allowed |= {"training.expert_bias_rate": 0.0}
    for key, value in allowed.items():
        check.refuse(key, check.get(key) != value, f"must be {show(value)} {text}")
    if (engines := engines_for_any_family(check.config)) and not check.config.rollout.replay:
        check.refuse("inference.backend", True, f"must be {engines} {text}")
    # With transformers 5, PEFT takes these names for those of experts and loses the adapters of such layers.
    shapes, lora = args.projection_shapes(), check.config.lora
    lost = [name for name in FEED_FORWARD_PROJECTIONS if name in lora.target_modules and name in shapes]
    text = f"PEFT has no adapters of these beside the experts of {args.family}: leave out {', '.join(lost)}"
    check.refuse("lora.target_modules", lora.rank and lost and "experts" in args.module_parameters(), text)


def _check_shape(check: Check, args: ModelArgs) -> None:
    config, lora = check.config, check.config.lora
    degree = config.parallelism.tensor_parallel_degree
    if isinstance(args, ForeignArgs):
        degree = 1
    counts = {
        "attention heads": args.num_attention_heads,
        "key-value heads": args.num_key_value_heads,
    }
    if args.delta is not None:
        counts["key heads of Gated DeltaNet"] = args.delta.key_heads
    if args.dense_layers:
        counts["feed-forward columns (intermediate_size)"] = args.intermediate_size
    if args.experts is not None and args.experts.shared_intermediate_size:
        counts["columns of the shared experts"] = args.experts.shared_intermediate_size
    undivided = [f"{count} {what}" for what, count in counts.items() if count % degree]
    common = math.gcd(*counts.values())
    allowed = ", ".join(str(number) for number in range(1, min(common, 64) + 1) if common % number == 0)
    text = f"must divide the model's {' and '.join(undivided)} (allowed: {allowed})"
    check.refuse("parallelism.tensor_parallel_degree", undivided, text)
    text = f"must be 1 for {args.family}, which has {args.undivided}"
    check.refuse("parallelism.tensor_parallel_degree", degree > 1 and args.undivided, text)
    key = "parallelism.context_parallel_degree"
    text = f"must be 1 for {args.family}: the state of Gated DeltaNet is not handed from rank to rank"
    check.refuse(key, config.parallelism.context_parallel_degree > 1 and args.delta_layers, text)
    # Parts are rounded up, so the last rank may be left without one.
    text = f"leaves a rank without a part of the model's vocabulary of {args.vocab_size} tokens"
    too_many = -(-args.vocab_size // degree) * (degree - 1) >= args.vocab_size
    check.refuse("parallelism.tensor_parallel_degree", too_many, text)
    text = f"must be at most the model's max_position_embeddings = {args.max_position_embeddings}"
    check.refuse("training.seq_len", config.training.seq_len > args.max_position_embeddings, text)
    if lora.rank:
        text = f"must be at most the model's hidden_size = {args.hidden_size}: no projection has a higher rank"
        check.refuse("lora.rank", lora.rank > args.hidden_size, text)
        for key, names in (("target_modules", lora.target_modules), ("modules_to_save", lora.modules_to_save)):
            if tied := [name for name in ("lm_head", "embed_tokens") if args.tie_word_embeddings and name in names]:
                text = f"this model ties lm_head and embed_tokens, which share one weight: leave out {tied[0]}"
                check.refuse(f"lora.{key}", True, text)
        present = {*args.projection_shapes(), "lm_head", "embed_tokens"}
        absent = [name for name in lora.target_modules if name in TARGETS and name not in present]
        text = f"{args.family} has no {', '.join(absent)}; it has {', '.join(sorted(present))}"
        check.refuse("lora.target_modules", absent, text)
        quantized = quantized_projections(config, args).items()
        ragged = [f"{name} has {columns}" for name, (_, columns) in quantized if columns % BLOCK]
        text = f"projections must have a multiple of {BLOCK} inputs; {', '.join(ragged)}"
        check.refuse("lora.base_bits", ragged, text)
    if not isinstance(args, ForeignArgs):
        _check_experts(check, args)
    outside = [token for token in config.rollout.stop_token_ids if not 0 <= token < args.vocab_size]
    text = f"must be 0 to {args.vocab_size - 1}, the model's vocabulary"
    check.refuse("rollout.stop_token_ids", outside, text, value=outside)


def _check_experts(check: Check, args: ModelArgs) -> None:
    config, lora, experts = check.config, check.config.lora, args.experts
    key, degree = "parallelism.expert_parallel_degree", config.parallelism.expert_parallel_degree
    if experts is None:
        check.refuse(key, degree > 1, "must be 1: this model has no experts")
        rate = config.training.expert_bias_rate
        check.refuse("training.expert_bias_rate", rate > 0, "must be 0: this model has no experts")
        check.refuse("grpo.routing_replay", config.grpo.routing_replay, "must be false: this model has no experts")
        return
    text = f"must be 0: the routers of {args.family} have no bias"
    check.refuse("training.expert_bias_rate", config.training.expert_bias_rate > 0 and not experts.bias, text)
    ranks = config.parallelism.shard_degree(check.ranks) * config.parallelism.ranks_per_pack
    check.refuse(key, experts.count % degree, f"must divide the model's {experts.count} experts")
    check.refuse(key, ranks % degree, f"must divide the {ranks} ranks of shards × context × tensor parallelism")
    rest = ranks // degree
    adapted: list[str] = []
    sizes = {"columns": experts.intermediate_size, "rows": args.hidden_size}
    if lora.rank:
        adapted = [name for name in FEED_FORWARD_PROJECTIONS if name in lora.target_modules]
    if adapted:
        sizes["columns of an adapter (lora.rank)"] = lora.rank
    ragged = degree > 1 and ranks % degree == 0 and any(size % rest for size in sizes.values())
    text = f"must divide its {' and '.join(f'{size} {what}' for what, size in sizes.items())}"
    check.refuse(key, ragged, f"leaves {rest} ranks to share an expert, which {text}")
    if lora.rank:
        text = "must be 0 with lora.rank > 0: routers are not sent to the actors"
        check.refuse("training.expert_bias_rate", config.training.expert_bias_rate > 0, text)
        others = "other experts" if experts.stacked else "layers or experts for all tokens beside those of the router"
        unlike = experts.stacked or experts.shared_intermediate_size or experts.dense_layers
        text = f"{args.family} has {others}, for which PEFT has no adapters: leave out {', '.join(adapted)}"
        check.refuse("lora.target_modules", adapted and unlike, text)
        if adapted and args.composite is not None and args.stacked_experts is not None:
            text = f"the files of {args.composite.family} stack all experts, to which no adapters are added"
            check.refuse("lora.target_modules", True, f"{text}: leave out {', '.join(adapted)}")
        text = "PEFT adapts gate_proj and up_proj of experts as one: name both or neither"
        check.refuse("lora.target_modules", ("gate_proj" in adapted) != ("up_proj" in adapted), text)
        check.refuse("lora.dropout", adapted and lora.dropout > 0, "must be 0 with adapters of experts, as in PEFT")
        in_full = [name for name in FEED_FORWARD_PROJECTIONS if name in lora.modules_to_save]
        check.refuse("lora.modules_to_save", in_full, f"experts are not trained whole: leave out {', '.join(in_full)}")
        check.refuse("lora.base_bits", lora.base_bits == 4, "must be 16: experts are not quantised")


def check_stage(check: Check) -> None:
    """Check [sft], [distill] and keys that the stage does not use."""
    config = check.config
    text = "needs evaluations that sample: eval.num_prompts > 0, and sft.sample = true in stage sft"
    check.refuse("eval.stop_at", config.eval.stop_at and not (config.eval.is_used and config.has_engines), text)
    for key, stage in STAGE_OF.items():
        is_set = check.get(key) != value_at(DEFAULTS, key)
        check.refuse(key, is_set and config.job.stage != stage, f"needs job.stage = {stage}")
    if config.job.stage == "sft":
        _check_sft(check)
    elif config.job.stage == "distill":
        _check_distill(check)


def _check_sft(check: Check) -> None:
    config, refuse = check.config, check.refuse
    grpo, rollout, stage = config.grpo, config.rollout, "in job.stage = sft, where nothing is sampled to train on"
    refuse("rollout.replay", rollout.replay, f"must be empty {stage}")
    refuse("rollout.temperature", rollout.temperature != 1, "must be 1 in job.stage = sft: it would scale the logits")
    refuse("job.stage", config.environment.is_used, "it has no use for [environment]")
    for key, asked, off in (
        ("recompute_old_log_probs", grpo.recompute_old_log_probs, "false"),
        ("routing_replay", grpo.routing_replay, "false"),
        ("kl_coefficient", grpo.kl_coefficient > 0, "0"),
        ("entropy_coefficient", grpo.entropy_coefficient > 0, "0"),
    ):
        refuse(f"grpo.{key}", asked, f"must be {off} {stage}")
    shared = config.inference.spec.in_ranks or config.inference.sleep_level > 0
    text = "needs actors that do not sleep: training steps do not wait for them"
    refuse("sft.sample", config.sft.sample and shared, text)
    refuse("sft.sample", config.sft.sample and not config.eval.is_used, "needs eval.num_prompts > 0")
    judged = config.rewards.functions or config.eval.reward_function
    refuse("rewards.functions", config.sft.sample and not judged, "sft.sample = true needs one that judges the samples")


def _check_distill(check: Check) -> None:
    config, refuse = check.config, check.refuse
    distill, grpo, rollout = config.distill, config.grpo, config.rollout
    text = "must be 0 in job.stage = distill, where the teacher takes the place of the reference"
    refuse("grpo.kl_coefficient", grpo.kl_coefficient > 0, text)
    text = "must be the teacher's checkpoint directory, also with distill.server.url; without both, "
    text += "distill.hint makes the policy its own teacher"
    untaught = teacher_id(config) is None and not (distill.add_rewards and config.source)
    refuse(TEACHER, untaught or (distill.server.url and not distill.teacher), text)
    if compares_vocabulary(config):
        text = "over the vocabulary needs parallelism.context_parallel_degree = 1"
        refuse("distill.divergence", config.parallelism.context_parallel_degree > 1, text)
    else:
        text = "needs distill.divergence = forward_kl, reverse_kl or jsd: sampled has the policy's own prompt"
        refuse("distill.hint", distill.hint, text)
    text = "as a column needs single-turn prompts: no [environment]; success and feedback work with one"
    refuse("distill.hint", hint_column(config) and config.environment.is_used, text)
    text = "needs an environment that this run starts: an agent writes its prompts itself"
    refuse("distill.hint", hints_after_scoring(config) and config.environment.uses_gateway, text)
    text = "follows from scores, and needs [rewards] functions or an [environment]"
    judged = config.rewards.functions or config.environment.is_used
    refuse("distill.hint", hints_after_scoring(config) and not judged, text)
    if distill.server.url:
        text = "must be 1 with distill.server.url: a server returns log-probs at temperature 1"
        refuse("rollout.temperature", rollout.temperature != 1, text)
        cut = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
        text = "must be 1, with top_k = 0 and min_p = 0, with distill.server.url: a server ignores truncation"
        refuse("rollout.top_p", cut, text)
    functions = config.rewards.functions or config.eval.reward_function or config.environment.is_used
    refuse("eval.num_prompts", config.eval.is_used and not functions, "must be 0 without [rewards] functions to judge")
    if distill.teacher and not check.planning:
        _check_teacher(check, config)


def _check_teacher(check: Check, config: JobConfig) -> None:
    """The teacher must be a checkpoint that fits the parallel layout and has the policy's vocabulary."""
    directory = Path(config.distill.teacher)
    served = bool(config.distill.server.url)
    for name in ("tokenizer.json",) if served else ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            check.refuse(TEACHER, True, f"there is no {name} in it (looked in {Path.cwd()})")
            return
    if not served:
        _check_teacher_shape(check, config)
    tokenizer = Path(config.model.hf_assets_path) / "tokenizer.json"
    if tokenizer.is_file() and (difference := _difference(tokenizer, directory / "tokenizer.json")):
        text = f"its tokenizer differs from that of model.hf_assets_path ({difference}): its log-probs mean nothing"
        check.refuse(TEACHER, True, text)


def _check_teacher_shape(check: Check, config: JobConfig) -> None:
    try:
        args = read_teacher_shape(config)
        policy_args = read_shape(config) if compares_vocabulary(config) else None
    except UserError as error:
        check.say(TEACHER, str(error))
        return
    if policy_args is not None and policy_args.vocab_size != args.vocab_size:
        text = (
            f"has {args.vocab_size} logits and the policy {policy_args.vocab_size}: needs distill.divergence = sampled"
        )
        check.refuse(TEACHER, True, text)
    text = f"training.seq_len must be at most its max_position_embeddings = {args.max_position_embeddings}"
    check.refuse(TEACHER, config.training.seq_len > args.max_position_embeddings, text)
    if isinstance(args, ForeignArgs):
        for key, value in FOREIGN_LAYOUT.items():
            text = f"must be {show(value)} with a teacher ({args.family}) whose layers are transformers'"
            check.refuse(key, check.get(key) != value, text)
        return
    tensor, experts = config.parallelism.tensor_parallel_degree, config.parallelism.expert_parallel_degree
    sizes = [args.num_attention_heads, args.num_key_value_heads]
    if args.dense_layers:
        sizes.append(args.intermediate_size)
    if args.delta is not None:
        sizes.append(args.delta.key_heads)
    ragged = any(size % tensor for size in sizes)
    text = f"parallelism.tensor_parallel_degree = {tensor} must divide its heads and feed-forward columns"
    check.refuse(TEACHER, ragged or (tensor > 1 and args.undivided), text)
    count = 0 if args.experts is None else args.experts.count
    text = f"parallelism.context_parallel_degree must be 1 with a teacher with Gated DeltaNet ({args.family})"
    check.refuse(TEACHER, config.parallelism.context_parallel_degree > 1 and args.delta_layers, text)
    text = f"parallelism.expert_parallel_degree = {experts} must divide its {count} experts"
    check.refuse(TEACHER, count % experts, text)


def _difference(policy_file: Path, teacher_file: Path) -> str:
    """Describe how two tokenizers' vocabularies differ; empty if every token has the same id in both."""
    if policy_file.read_bytes() == teacher_file.read_bytes():
        return ""
    try:
        policy_tokens, teacher_tokens = _vocabulary(policy_file), _vocabulary(teacher_file)
    except (ValueError, KeyError, TypeError) as error:
        return f"a tokenizer.json cannot be read: {error!r}"
    for token in [*policy_tokens, *teacher_tokens]:
        if policy_tokens.get(token) != teacher_tokens.get(token):
            teacher_id, policy_id = teacher_tokens.get(token, "not in it"), policy_tokens.get(token, "not in it")
            return f"{token!r} is {teacher_id} there and {policy_id} here"
    return ""


def _vocabulary(path: Path) -> dict[str, int]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    tokens = document["model"]["vocab"]
    if isinstance(tokens, list):  # a unigram model: [token, score] pairs
        tokens = {entry[0]: number for number, entry in enumerate(tokens)}
    return {**tokens, **{entry["content"]: entry["id"] for entry in document.get("added_tokens", ())}}
