"""The shape of a run's policy before anything is loaded, and what adapters make of it. No torch here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torchtitan.config.derived import teacher_config
from torchtitan.config.job_config import JobConfig
from torchtitan.config.toml import show
from torchtitan.errors import UserError
from torchtitan.models.families import FAMILIES
from torchtitan.models.flavors import find_flavor
from torchtitan.models.foreign_args import read_args
from torchtitan.models.model_args import FEED_FORWARD_PROJECTIONS, PROJECTIONS, ModelArgs

TARGETS = (*PROJECTIONS, "lm_head", "embed_tokens")
NORMS = (
    *sorted({name for family in FAMILIES.values() for name in family.norms if name}),
    *("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm", "norm"),
)
# With base_bits = 4: neighbours in a row of weights that share a scale of 16 bits.
BLOCK = 64
QUANTIZED_BITS = 4 + 16 / BLOCK


def quantized_projections(config: JobConfig, args: ModelArgs) -> dict[str, tuple[int, int]]:
    """Weight [out, in] of a layer's projections that are held in four bits."""
    if config.lora.base_bits != 4:
        return {}
    return {name: shape for name, shape in args.projection_shapes().items() if name not in config.lora.modules_to_save}


def trained_parameters(config: JobConfig, args: ModelArgs) -> tuple[int, int]:
    """Elements of (the model's own parameters that are trained, adapters)."""
    lora, layers = config.lora, args.num_hidden_layers
    if lora.rank == 0:
        return args.num_parameters(), 0
    vocabulary, experts = (args.vocab_size, args.hidden_size), 1
    if args.experts is not None:
        # Layers with adapters in their feed-forward are all mixtures.
        experts, args = args.experts.count, replace(args, intermediate_size=args.experts.intermediate_size)
    shapes = {
        name: (*shape, layers * (experts if name in FEED_FORWARD_PROJECTIONS else 1))
        for name, shape in args.projection_shapes().items()
    }
    shapes |= {"lm_head": (*vocabulary, 1), "embed_tokens": (*vocabulary, 1)}
    adapters = sum(
        count * (rows + columns)
        for rows, columns, count in (shapes[name] for name in lora.target_modules if name in shapes)
    )
    return sum(args.module_parameters().get(name, 0) for name in lora.modules_to_save), lora.rank * adapters


# What scripts/make_debug_checkpoint.py makes and run_grpo.sh asks it for.
DEBUG_TASKS = ("arithmetic", "arithmetic_moe", "calculator", "guess", "random")
DEBUG_ASSETS = tuple(f"assets/debug_{task}" for task in DEBUG_TASKS)


def is_missing_debug_checkpoint(config: JobConfig) -> bool:
    """Whether a checkpoint that run_grpo.sh makes by itself is named and not there yet."""
    directory = Path(config.model.hf_assets_path)
    return directory.as_posix().endswith(DEBUG_ASSETS) and not (directory / "config.json").exists()


def newest_export(path: str) -> str:
    """Where `path` is a run's folder, the last checkpoint that the run has exported; else `path` itself."""
    exports = {int(one.name.removeprefix("step-")): one for one in Path(path).glob("hf/step-*[0-9]")}
    # Not by way of `latest`, which will be this very run.
    return str(exports[max(exports)].resolve()) if exports else path


def read_teacher_shape(config: JobConfig) -> ModelArgs | None:
    """As read_shape, of distill.teacher."""
    return read_shape(teacher_config(config), "distill.teacher")


def read_shape(config: JobConfig, key: str = "model.hf_assets_path") -> ModelArgs | None:
    """The shape of the policy, or None while the debug checkpoint has not been made. key: where the path was given.

    Raises:
        UserError: unknown flavor; no, unreadable or unsupported config.json. Its message names key and value.
    """
    model = config.model
    if model.flavor:
        return find_flavor(model.name, model.flavor)
    if is_missing_debug_checkpoint(config):
        return None
    path, given = Path(model.hf_assets_path) / "config.json", f"{key} = {show(model.hf_assets_path)}"
    if not path.exists():
        raise UserError(f"{given}: there is no config.json in it (looked in {Path.cwd()})")
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
    return args
