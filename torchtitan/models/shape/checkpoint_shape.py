"""The shape of a run's policy before anything is loaded: that of a flavor, or of a checkpoint's files.

FLAVORS are public shapes by family and size, for planning and for training from scratch; if there is a checkpoint, its
own config.json always decides. For a model that transformers computes, the headers of the checkpoint's files tell the
rest.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.config.teachers import teacher_config
from torchtitan.config.values import show
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_files import open_tensors, read_json, tensor_files
from torchtitan.models.shape.composite import read_text, text_config
from torchtitan.models.shape.exports import aside_text
from torchtitan.models.shape.families import (
    FAMILIES,
    LENGTH,
    SCALINGS,
    Family,
    Scaling,
    check_scaling,
    check_types,
    read_windows,
)
from torchtitan.models.shape.mixture_args import COUNT_KEYS, ExpertArgs
from torchtitan.models.shape.model_args import (
    FEED_FORWARD_PROJECTIONS,
    PROJECTIONS,
    REQUIRED_KEYS,
    ModelArgs,
    read_model_args,
)


def _shape(family: str, vocabulary: int, context: int, *sizes: int, **others: Any) -> ModelArgs:
    """sizes: hidden, intermediate, layers, heads, key-value heads. others: further fields; without a head_dim, the
    heads divide the hidden size."""
    hidden, intermediate, layers, heads, key_value_heads = sizes
    sized = {"vocab_size": vocabulary, "max_position_embeddings": context, "head_dim": hidden // heads}
    return ModelArgs(
        family,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        **sized | others,
    )


def _debug(family: str, **others: Any) -> ModelArgs:
    """A shape of about a million parameters for tests and first runs."""
    return _shape(family, 2048, 2048, 128, 384, 4, 4, 2, **others)


def _llama3(factor: float, *sizes: int, tied: bool = False) -> ModelArgs:
    scaling, tokens = Scaling("llama3", factor, 8192), {"bos_token_id": 128000, "eos_token_ids": (128001,)}
    rotary = {"rope_theta": 500000.0, "rope_scaling": scaling}
    return _shape("llama", 128256, 131072, *sizes, 8, rms_norm_eps=1e-5, tie_word_embeddings=tied, **rotary, **tokens)


def _qwen2(context: int, *sizes: int, tied: bool = False, eps: float = 1e-6, theta: float = 1000000.0) -> ModelArgs:
    # The larger models have a vocabulary with more padding.
    vocabulary, tokens = 151936 if tied else 152064, {"bos_token_id": 151643, "eos_token_ids": (151643,)}
    others = {"rms_norm_eps": eps, "rope_theta": theta, "tie_word_embeddings": tied}
    return _shape("qwen2", vocabulary, context, *sizes, **others, **tokens)


def _qwen3(*sizes: int, tied: bool = False, family: str = "qwen3", experts: ExpertArgs | None = None) -> ModelArgs:
    tokens = {"bos_token_id": 151643, "eos_token_ids": (151645,)}
    others = {"head_dim": 128, "rope_theta": 1000000.0, "tie_word_embeddings": tied, "experts": experts}
    return _shape(family, 151936, 40960, *sizes, **others, **tokens)


def _qwen3_moe(expert: int, *sizes: int) -> ModelArgs:
    return _qwen3(*sizes, family="qwen3_moe", experts=ExpertArgs(128, 8, expert, normalize=True))


def _gpt_oss(layers: int, experts: int) -> ModelArgs:
    sizes = {"num_hidden_layers": layers, "num_local_experts": experts, "vocab_size": 201088, "hidden_size": 2880}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4, "eos_token_id": 200002}
    shape = {**sizes, **heads, "intermediate_size": 2880, "max_position_embeddings": 131072}
    return ModelArgs.from_hf_config({"model_type": "gpt_oss", "tie_word_embeddings": False, **shape})


def _qwen3_5() -> ModelArgs:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    sizes = {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32}
    rope = {"rope_theta": 10000000.0, "max_position_embeddings": 262144}
    return ModelArgs.from_hf_config({"model_type": "qwen3_5_text", **sizes, **heads, **rope})


FLAVORS: dict[str, dict[str, ModelArgs]] = {
    "llama3": {
        "debug": _debug("llama", rope_theta=500000.0, rope_scaling=Scaling("llama3", 8.0, 1024)),
        "3.2-1B": _llama3(32.0, 2048, 8192, 16, 32, tied=True),
        "3.2-3B": _llama3(32.0, 3072, 8192, 28, 24, tied=True),
        "3.1-8B": _llama3(8.0, 4096, 14336, 32, 32),
        "3.1-70B": _llama3(8.0, 8192, 28672, 80, 64),
    },
    "qwen2": {
        "debug": _debug("qwen2", tie_word_embeddings=True),
        "2.5-0.5B": _qwen2(32768, 896, 4864, 24, 14, 2, tied=True),
        "2.5-1.5B": _qwen2(131072, 1536, 8960, 28, 12, 2, tied=True),
        "2.5-3B": _qwen2(32768, 2048, 11008, 36, 16, 2, tied=True),
        "2.5-7B": _qwen2(131072, 3584, 18944, 28, 28, 4),
        "2.5-14B": _qwen2(131072, 5120, 13824, 48, 40, 8, eps=1e-5),
        "2.5-32B": _qwen2(131072, 5120, 27648, 64, 40, 8, eps=1e-5),
        "2.5-72B": _qwen2(131072, 8192, 29568, 80, 64, 8, eps=1e-5),
        "2.5-Math-1.5B": _qwen2(4096, 1536, 8960, 28, 12, 2, tied=True, theta=10000.0),
        "2.5-Math-7B": _qwen2(4096, 3584, 18944, 28, 28, 4, theta=10000.0),
        "2.5-Math-72B": _qwen2(4096, 8192, 29568, 80, 64, 8, eps=1e-5, theta=10000.0),
    },
    "qwen3": {
        "debug": _debug("qwen3", tie_word_embeddings=True),
        "0.6B": _qwen3(1024, 3072, 28, 16, 8, tied=True),
        "1.7B": _qwen3(2048, 6144, 28, 16, 8, tied=True),
        "4B": _qwen3(2560, 9728, 36, 32, 8, tied=True),
        "8B": _qwen3(4096, 12288, 36, 32, 8),
        "14B": _qwen3(5120, 17408, 40, 40, 8),
        "32B": _qwen3(5120, 25600, 64, 64, 8),
    },
    "qwen3_moe": {
        "debug": _debug("qwen3_moe", experts=ExpertArgs(8, 2, 96, normalize=True)),
        "30B-A3B": _qwen3_moe(768, 2048, 6144, 48, 32, 4),
        "235B-A22B": _qwen3_moe(1536, 4096, 12288, 94, 64, 4),
    },
    "qwen3_5_text": {"9B": _qwen3_5()},
    "gpt_oss": {"20B": _gpt_oss(24, 32), "120B": _gpt_oss(36, 128)},
}


def find_flavor(name: str, flavor: str) -> ModelArgs:
    """Return the shape of `flavor` in family `name` (such as llama3). Raises UserError that lists what is allowed.

    If the name is `auto`, the flavor alone must identify the family.
    """
    families = list(FLAVORS) if name == "auto" else [name]
    if not set(families) <= set(FLAVORS):
        raise UserError(f"model.name = {name!r}: allowed are auto, {', '.join(FLAVORS)}")
    owners = [family for family in families if flavor in FLAVORS[family]]
    if len(owners) > 1:
        raise UserError(f"model.flavor = {flavor!r} exists in {', '.join(owners)}: set model.name to one of them")
    if not owners:
        known = ", ".join(known for family in families for known in FLAVORS[family])
        raise UserError(f"model.flavor = {flavor!r} is not known for model.name = {name!r}; known: {known}")
    return FLAVORS[owners[0]][flavor]


FOREIGN_KEYS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
FOREIGN_TYPES = (
    *(*FOREIGN_KEYS, "intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("tie_word_embeddings", "rope_parameters", "rope_scaling", "layer_types", "eos_token_id"),
    *("sliding_window", "use_sliding_window"),
)
# Other kinds mix the sequences of a pack, or depend on the length of its longest sequence.
FOREIGN_ATTENTION = {"full_attention", "sliding_attention"}
FOREIGN_ROPES = {"default", "linear", "llama3", "yarn", "proportional"}


@dataclass(frozen=True)
class ForeignArgs(ModelArgs):
    """A decoder whose layers are transformers' own. Only the sizes that memory and time depend on are known."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), repr=False)
    """Names and shapes of the tensors in its files"""

    @property
    def kind(self) -> Family:
        return Family("its own")

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        if self.composite is not None:
            return super().to_hf_config(dtype)
        return json.loads(self.source) | {"torch_dtype": dtype, "dtype": dtype}

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Weights [out, in] of the layers' projections, except those of experts."""
        return {
            _module(name): (shape[0], shape[1])
            for name, shape in self.shapes
            if len(shape) == 2 and self.vocab_size not in shape and "experts" not in name and name.endswith(".weight")
        }

    def weights_per_token(self) -> dict[str, int]:
        config = json.loads(self.source)
        experts = next((config[key] for key in COUNT_KEYS if key in config), 1)
        counts = self.module_parameters()
        counts = {name: counts[name] for name in ("experts", *self.projection_shapes()) if name in counts}
        return counts | {"experts": counts.get("experts", 0) * config.get("num_experts_per_tok", 1) // experts}

    def module_parameters(self) -> dict[str, int]:
        counts = Counter[str]()
        for name, shape in self.shapes:
            counts[_module(name)] += math.prod(shape)
        return dict(counts)


def _module(name: str) -> str:
    return "experts" if ".experts." in name else name.rpartition(".")[0].rpartition(".")[2]


def read_args(directory: str | Path, implementation: str = "auto") -> ModelArgs:
    """Read the shape of a checkpoint directory. The result is a ForeignArgs if transformers computes the layers: with
    implementation "transformers", or with "auto" if the decoder lacks the family.

    Raises UserError for missing or broken files, and for a model that neither of the two computes.
    """
    config = read_json(Path(directory) / "config.json")
    try:
        family = text_config(config).get("model_type")
    except UserError as error:
        raise UserError(f"{directory}: {error}") from error
    if implementation == "native" or (implementation == "auto" and family in FAMILIES):
        return read_model_args(directory)
    if importlib.util.find_spec("transformers") is None:
        needed = "only transformers computes it, which is not installed: pip install 'torchtitan-grpo[transformers]'"
        raise UserError(f"{directory}: model_type {family!r}: {needed}")
    try:
        return _read_foreign(Path(directory), config)
    except UserError as error:
        raise UserError(f"{directory}: model_type {family!r}: {error}") from error


# What a config.json says of its file, not of the model.
OF_THE_FILE = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "architectures", "use_cache")


def model_facts(args: ModelArgs) -> dict[str, Any]:
    """Return all that decides what a model computes with its weights, as JSON can hold it."""
    facts = {name: value for name, value in asdict(args).items() if name not in ("source", "shapes", "composite")}
    if args.composite is not None:
        facts["composite"] = args.composite.stack, args.composite.head
    if isinstance(args, ForeignArgs):
        # transformers reads further keys.
        facts |= {key: value for key, value in json.loads(args.source).items() if key not in OF_THE_FILE}
    return facts


def check_layers(config: dict[str, Any]) -> None:
    """Raise UserError if a config.json has layers that do not support packs, or weights that cannot be trained."""
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer_type = [rope for rope in ropes.values() if isinstance(rope, dict)]
    strange = sorted({*(config.get("layer_types") or ())} - FOREIGN_ATTENTION)
    strange_ropes: set[str] = set()
    for rope in by_layer_type or [ropes]:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in FOREIGN_ROPES:
            strange_ropes.add(kind)
        if kind in SCALINGS:
            check_scaling(kind, {LENGTH: config.get("max_position_embeddings"), **rope})
    strange += sorted(strange_ropes)
    if config.get("quantization_config"):
        strange.append("quantization_config")
    if strange:
        raise UserError(
            f"{', '.join(strange)} in config.json: not trained with transformers' layers (model.implementation)"
        )


def _read_foreign(directory: Path, config: dict[str, Any]) -> ForeignArgs:
    config, composite = read_text(directory, config)
    lacking = [key for key in FOREIGN_KEYS if not config.get(key)]
    if lacking:
        kind = config.get("model_type")
        raise UserError(f"config.json of model_type {kind!r} lacks {', '.join(lacking)}: no decoder of text alone")
    check_types(config, FOREIGN_TYPES)
    check_layers(config)
    files = tensor_files(directory)
    handles = {path: open_tensors(path, framework="numpy") for path in set(files.values())}
    shapes = {
        name: tuple(handles[path].get_slice(name).get_shape())
        for name, path in files.items()
        if composite is None or composite.name_of_text(name) is not None
    }
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return ForeignArgs(
        family=config["model_type"],
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        intermediate_size=config.get("intermediate_size") or 4 * hidden,
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", "lm_head.weight" not in shapes)),
        max_position_embeddings=config.get("max_position_embeddings", 32768),
        windows=read_windows(config, Family("its own")),
        composite=composite,
        source=json.dumps(config),
        shapes=tuple(shapes.items()),
    )


TARGETS = (*PROJECTIONS, "lm_head", "embed_tokens")
NORMS = (
    *sorted({name for family in FAMILIES.values() for name in family.norms if name}),
    *("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm", "norm"),
)
# With base_bits = 4, this many consecutive weights of a row share a 16-bit scale.
BLOCK = 64
QUANTIZED_BITS = 4 + 16 / BLOCK


def quantized_projections(config: JobConfig, args: ModelArgs) -> dict[str, tuple[int, int]]:
    """Weights [out, in] of a layer's projections that are held in four bits."""
    if config.lora.base_bits != 4:
        return {}
    return {name: shape for name, shape in args.projection_shapes().items() if name not in config.lora.modules_to_save}


def trained_parameters(config: JobConfig, args: ModelArgs) -> tuple[int, int]:
    """Return the elements of (the model's own trained parameters, adapters)."""
    lora = config.lora
    if lora.rank == 0:
        return args.num_parameters(), 0
    vocabulary = (args.vocab_size, args.hidden_size)
    counts = {name: args.layers_with(name) for name in args.projection_shapes()}
    if args.experts is not None:
        # Every layer with adapters in its feed-forward is a mixture.
        counts |= dict.fromkeys(FEED_FORWARD_PROJECTIONS, args.num_hidden_layers * args.experts.count)
        args = replace(args, intermediate_size=args.experts.intermediate_size)
    shapes = {name: (*shape, counts[name]) for name, shape in args.projection_shapes().items()}
    shapes |= {"lm_head": (*vocabulary, 1), "embed_tokens": (*vocabulary, 1)}
    adapter_rows = 0
    for name in lora.target_modules:
        if name in shapes:
            rows, columns, count = shapes[name]
            adapter_rows += count * (rows + columns)
    saved_modules = sum(args.module_parameters().get(name, 0) for name in lora.modules_to_save)
    return saved_modules, lora.rank * adapter_rows


def read_teacher_shape(config: JobConfig) -> ModelArgs:
    """Like read_shape, for distill.teacher."""
    return read_shape(teacher_config(config), "distill.teacher")


def read_shape(config: JobConfig, key: str = "model.hf_assets_path") -> ModelArgs:
    """Return the shape of the policy: that of the checkpoint or, where there is none, of model.flavor. key: the
    configuration key.

    Raises:
        UserError: unknown flavor, or one that is not the checkpoint's; missing, unreadable or unsupported config.json.
            The message names key and value.
    """
    model = config.model
    path, given = Path(model.hf_assets_path) / "config.json", f"{key} = {show(model.hf_assets_path)}"
    flavor = find_flavor(model.name, model.flavor) if model.flavor else None
    has_checkpoint = model.hf_assets_path and path.is_file() and any(path.parent.glob("*.safetensors"))
    if flavor is not None and not has_checkpoint:
        return flavor
    if not path.exists():
        gone = aside_text(path.parent)
        raise UserError(f"{given}: there is no config.json in it (looked in {Path.cwd()}){gone}")
    try:
        args = read_args(model.hf_assets_path, model.implementation)
    except UserError as error:
        raise UserError(f"{given}: {error}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{given}: {path}: {error}") from error
    except KeyError as error:
        raise UserError(f"{given}: {path} lacks the key {error}") from error
    named = {"llama3": "llama"}.get(model.name, model.name)
    if model.name != "auto" and args.family != named:
        raise UserError(
            f'model.name = "{model.name}" is not allowed: the checkpoint in {model.hf_assets_path} is of family '
            f"{args.family}; set model.name to auto"
        )
    if flavor is not None and (differences := _differences(flavor, args)):
        text = f"is not the model in {model.hf_assets_path} ({differences}): leave it out, or name its checkpoint"
        raise UserError(f"model.flavor = {show(model.flavor)} {text}")
    return args


def _differences(flavor: ModelArgs, args: ModelArgs) -> str:
    """Name the sizes that a flavor and a checkpoint do not share."""
    found = []
    for name in ("family", *REQUIRED_KEYS, "num_key_value_heads"):
        of_flavor, of_checkpoint = getattr(flavor, name), getattr(args, name)
        if of_flavor != of_checkpoint:
            found.append(f"{name} {of_flavor}, there {of_checkpoint}")
    return ", ".join(found)


def vocabulary_of(config: JobConfig) -> int | None:
    """Return the size of the policy's vocabulary, or None where no model is named. Raises what read_shape() does."""
    model = config.model
    args = read_shape(config) if model.flavor or model.hf_assets_path else None
    return None if args is None else args.vocab_size
