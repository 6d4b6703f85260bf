"""Whether a run fits into the memory, the cores and the descriptors that it may use on this machine. No torch here."""

from __future__ import annotations

from torchtitan.config.gpu_defaults import trains_on_gpu
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.models.shape.costs import estimate_memory, parts_on_host, version_bytes
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.preflight.check import Check
from torchtitan.utils.machine import host_memory, machine_cores, possible_descriptors
from torchtitan.utils.ranks import local_world_size

# The least that a process takes which has imported torch or an engine.
PROCESS_BYTES = 200 << 20
# A larger share of the available memory than this is said: the estimate is rough, and other processes need some.
CLOSE = 0.85
# What an estimate's parts are called, and the key that makes them smaller.
TRAINING, SLOTS, ACTORS = "model.hf_assets_path", "weight_sync.num_slots", "inference.num_actors"
SAVING = "checkpoint.async_mode"
WHAT = {TRAINING: "for training", SLOTS: "of slots for weight versions", ACTORS: "for actors"}
WHAT[SAVING] = "for checkpoints that are written in the background"
# What rank 0 has open besides: files, libraries, the pipes of its workers.
OTHER_DESCRIPTORS = 256
_PASSING = ("gathered", "activations", "logits", "unreduced")


def host_bytes(config: JobConfig, args: ModelArgs, ranks: int, at_least: bool = False) -> dict[str, int]:
    """Return the bytes of host memory that a run takes on this machine, by the key that makes them smaller.

    at_least: without what is held for a part of a step only, whose estimate is rough.
    """
    local, memory = local_world_size(), estimate_memory(config, args, ranks)
    in_host_memory = parts_on_host(config) if trains_on_gpu() else set(vars(memory))
    parts = {part: local * size for part, size in vars(memory).items() if part in in_host_memory}
    slots, saving = parts.pop("slots", 0), parts.pop("checkpoint", 0)
    training = sum(size for part, size in parts.items() if not (at_least and part in _PASSING))
    needed = {TRAINING: training + local * PROCESS_BYTES, SLOTS: slots, SAVING: saving, ACTORS: 0}
    if actors := config.started_actors:
        # Its weights, and the version that it receives meanwhile.
        weights = 0 if trains_on_gpu() else 2 * version_bytes(config, args)
        needed[ACTORS] = actors * (PROCESS_BYTES + weights)
    return needed


def check_memory(check: Check, args: ModelArgs) -> None:
    """Refuse a run that cannot fit on this machine, and more threads than it has cores."""
    if check.planning:
        return
    for key in ("training.threads", "inference.threads_per_actor"):
        threads, cores = check.get(key), machine_cores()
        check.refuse(key, isinstance(threads, int) and threads > cores, f"must be at most this machine's {cores} cores")
    try:
        needed, memory = host_bytes(check.config, args, check.ranks, at_least=True), host_memory()
    except UserError:  # a teacher's shape; check_stage() reports it
        return
    if sum(needed.values()) > memory.limit:
        text = f"the run needs at least {_listed(needed)}, and this machine allows {size_text(memory.limit)}"
        check.refuse(max(needed, key=lambda key: needed[key]), True, f"{text} ({memory.source})")


def tight_memory(config: JobConfig, ranks: int) -> str:
    """Return what to say of a run that may not fit into the memory that is available now; else an empty string."""
    args, memory = read_shape(config), host_memory()
    needed = host_bytes(config, args, ranks)
    if sum(needed.values()) <= CLOSE * memory.available:
        return ""
    return (
        f"the run may need {_listed(needed)}, and of this machine's memory {size_text(memory.available)} are available "
        f"now ({memory.source}): the kernel kills processes when it is used up"
    )


def connections(config: JobConfig) -> int:
    """Return the most connections that rank 0 has at a time: one for each request to an actor, which generates at least
    one sequence, and one to look at each actor. What agents in isolated workers ask passes through rank 0, too, by two
    more."""
    if not config.has_engines or config.is_colocated:
        return 0
    actors = len(config.inference.servers) or config.started_actors or 1
    requests = actors * (config.inference.max_sequences + 1)
    return actors + requests * (3 if config.environment.uses_gateway else 1)


def few_descriptors(config: JobConfig) -> str:
    """Return what to say of a run that may need more connections than a process may have here; else an empty string."""
    wanted, most = connections(config) + OTHER_DESCRIPTORS, possible_descriptors()
    if wanted <= most:
        return ""
    return (
        f"rank 0 may need {wanted:,} files and connections at a time (inference.max_sequences = "
        f"{config.inference.max_sequences} for each actor), and a process may have {most:,} here: raise the hard limit "
        "(ulimit -Hn), or lower inference.max_sequences"
    )


def _listed(needed: dict[str, int]) -> str:
    parts = ", ".join(f"{size_text(size)} {WHAT[key]}" for key, size in needed.items() if size)
    return f"{size_text(sum(needed.values()))} of memory ({parts})"


def size_text(count: int) -> str:
    """Format a number of bytes."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"
