"""What the plan of a run says, by hand and by its command."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tomli

from tests.unit_tests.conftest import WriteConfig
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.models.shape.costs import MemoryEstimate, estimate_memory, on_device
from torchtitan.preflight import memory
from torchtitan.preflight.__main__ import main
from torchtitan.preflight.plan import describe_plan
from torchtitan.preflight.validate import load_config


def estimate(config: JobConfig, ranks: int = 1) -> MemoryEstimate:
    args = read_shape(config)
    assert args is not None
    return estimate_memory(config, args, ranks)


def test_dry_run_and_help(write_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write_config()
    assert main(["--dry_run", *arguments, "--training.steps", "5"]) == 0
    printed = capsys.readouterr().out
    # The plan stands first, and then what the file and the command line say, each with its value.
    assert printed.startswith("# Plan\n") and "\nsteps = 5  # command line\n" in printed
    loaded = tomli.loads(printed)
    assert loaded.pop("training") == tomli.loads(Path("job.toml").read_text())["training"] | {"steps": 5}
    assert loaded.keys() <= tomli.loads(Path("job.toml").read_text()).keys()
    assert main(["--dry-run", "all", *arguments]) == 0
    # All of it is itself the configuration; arrays of tables that it has none of are not there.
    loaded = tomli.loads(capsys.readouterr().out) | {"source": []}
    loaded["eval"]["set"] = []
    assert loaded == asdict(load_config(arguments))
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    assert "--weight_sync.num_slots INT" in capsys.readouterr().out


def test_dry_run_names_keys_whose_feature_is_not_in_use(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "[sft]\nloss_on = 'all'\n[inference.vllm]\nmemory_gb = 1\n[eval]\nnum_prompts = 0\ninterval = 8\n"
    more += "[[source]]\nname = 'sums'\n"
    assert main([*write_config(more=more), "--dry-run", "--environment.max_turns", "3"]) == 0
    printed = capsys.readouterr().out
    _, _, notes = printed.partition("# Set, but without effect in this run:\n")
    notes, _, settings = notes.partition("\n\n")
    assert [note.partition(" = ")[0].split()[-1] for note in notes.splitlines()] == [
        "sft.loss_on", "inference.vllm.memory_gb", "eval.interval", "environment.max_turns"
    ]  # fmt: skip
    assert 'inference.vllm.memory_gb = 1: inference.backend is "embedded"' in notes
    assert '[[source]]\nname = "sums"\n' in settings


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        ("--grpo.loss_type reinforce --grpo.epsilon_high 0.3", ["epsilon_high = 0.3: loss_type reinforce does not"]),
        ("--grpo.loss_type cispo --grpo.epsilon_low 0.1 --grpo.epsilon_high 4", ["epsilon_low = 0.1: loss_type cispo"]),
        ("--grpo.loss_type sapo --grpo.delta 2", ["grpo.delta = 2: loss_type sapo does not use it"]),
        ("--grpo.epsilon_low 0.1 --grpo.epsilon_high 0.3 --grpo.delta 2", []),
        ("--lr_scheduler.min_lr_factor 0.1", ['min_lr_factor = 0.1: lr_scheduler.decay_type is "constant"']),
        ("--lr_scheduler.min_lr_factor 0.1 --lr_scheduler.decay_type cosine", []),
        ("--rollout.held_out_fraction 0.2 --eval.dataset guess", ["held_out_fraction = 0.2: eval.dataset has"]),
        ("--rollout.held_out_fraction 0.2", []),
    ],
)
def test_dry_run_names_keys_that_the_value_of_another_makes_useless(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str], words: str, reasons: list[str]
) -> None:
    assert main([*write_config(), "--dry-run", *words.split()]) == 0
    _, _, notes = capsys.readouterr().out.partition("# Set, but without effect in this run:\n")
    lines = notes.partition("\n\n")[0].splitlines()
    assert len(lines) == len(reasons) and all(reason in line for reason, line in zip(reasons, lines, strict=True))


@pytest.mark.parametrize(
    "more",
    [
        "[job]\nstage = 'distill'\n[distill]\nhint = 'success'\ndivergence = 'jsd'\n",
        "[environment]\nmax_turns = 3\n[eval]\nnum_prompts = 2\n[[eval.set]]\nname = 'games'\ndataset = 'guess'\n"
        "environment.factory = 'torchtitan.rollout.environments.builtin_environments:Guess'\n",
    ],
)
def test_dry_run_has_no_note_on_keys_of_a_self_teacher_or_of_an_evaluation_set(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str], more: str
) -> None:
    decays = ["--grpo.reference_ema_decay", "0.9"] if "distill" in more else []
    assert main([*write_config(more=more), "--dry-run", *decays]) == 0
    assert "without effect" not in capsys.readouterr().out


def test_plan_of_a_small_model_by_hand(write_config: WriteConfig) -> None:
    config = load_config([*write_config(), "--inference.dtype", "bfloat16", "--weight_sync.num_slots", "4"])
    # Per layer: q 32×16, k and v 16×16 each, o 16×32, two head norms of 8, three 16×24 matrices, two norms of 16.
    layer = 512 + 2 * 256 + 512 + 16 + 3 * 384 + 32
    parameters = 2 * layer + 50 * 16 + 16
    text = describe_plan(config, 1)
    assert f"model: {parameters:,} parameters\n# bytes per weight version: {2 * parameters:,} (" in text
    assert "batch: 4 groups × 8 = 32 completions" in text
    assert "tokens per step: at most 2,048, of which at most 1,024 are generated; 1,152 are computed where" in text
    memory = estimate(config)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (4 * parameters, 4 * parameters, 8 * parameters)
    assert (memory.slots, memory.gathered) == (4 * 2 * parameters, 0)
    assert memory.logits == 4 * 4 * 256 * 50
    assert memory.activations == 4 * 256 * 2 * (5 * 16 + 3 * 32 + 4 * 16 + 4 * 24)
    assert memory.total == sum(vars(memory).values()) and memory.checkpoint == 0


@pytest.mark.parametrize(
    ("where", "mode", "copied"), [("cuda", "", True), ("cuda", "disabled", False), ("cpu", "", False)]
)
def test_plan_counts_the_copy_that_a_checkpoint_is_written_from(
    where: str, mode: str, copied: bool, write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTITAN_DEVICE", where)
    words = ["--checkpoint.enable", "true", *(["--checkpoint.async_mode", mode] if mode else [])]
    config = load_config([*write_config(), "--dry-run", *words])
    memory = estimate(config)
    assert memory.checkpoint == copied * (memory.parameters + memory.optimizer)
    assert memory.total - on_device(config, memory) == memory.slots + memory.checkpoint


def test_plan_of_the_optimizers_state(write_config: WriteConfig) -> None:
    config = load_config(write_config())
    layers, root = 2 * (512 + 2 * 256 + 512 + 3 * 384), 50 * 16
    config.optimizer.name = "Muon"
    # The other elements are those of norms.
    assert estimate(config).optimizer == pytest.approx(4 * (layers + 2 * root), rel=0.03)
    assert "while Muon orthogonalises: " in describe_plan(config, 1)
    config.optimizer.name = "AdamW8bit"
    assert estimate(config).optimizer == pytest.approx(2 * (layers + root) * (1 + 4 / 256), rel=0.03)


def test_a_teacher_that_is_not_there_is_named_by_its_own_key(write_config: WriteConfig) -> None:
    config = load_config([*write_config(), "--job.stage", "distill", "--distill.teacher", "nowhere", "--dry-run"])
    with pytest.raises(UserError, match='^distill.teacher = "nowhere": there is no config.json in it'):
        describe_plan(config, 1)


def test_plan_over_ranks(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = write_config()
    monkeypatch.setenv("WORLD_SIZE", "8")
    words = ["--parallelism.tensor_parallel_degree", "2", "--parallelism.data_parallel_replicate_degree", "2"]
    config = load_config([*arguments, *words, "--training.global_batch_size=64"])
    memory, alone = estimate(config, 8), estimate(replace(config, parallelism=JobConfig().parallelism))
    assert memory.parameters * 4 == pytest.approx(alone.parameters, rel=1e-3)
    text = describe_plan(config, 8)
    assert "# ranks: 8\n# mesh: 2 replicate × 2 shard × 2 tensor parallel" in text
    assert "tokens per step: at most 4,096, of which at most 2,048 are generated" in text


def test_plan_of_a_public_shape_needs_no_files(write_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    write_config()
    words = ["--dry-run", "--model.name", "qwen3", "--model.flavor", "8B", "--inference.dtype", "bfloat16"]
    assert main([*words, "--weight_sync.tcp.delta", "true"]) == 0
    # 8.19 billion, as published; 61.03 GiB are four times 15.26.
    text = capsys.readouterr().out
    assert "# bytes per weight version: 16,381,470,720 (15.26 GiB, bfloat16)" in text
    assert "# slots per rank: 4, together 61.03 GiB of host memory" in text
    assert "# base of deltas per rank: 15.26 GiB, one of the slots" in text
    assert "# second set of weights per actor: 15.26 GiB of host memory\n" in text
    assert main([*words, "--weight_sync.tcp.relay", "true", "--lora.rank", "8"]) == 0
    assert "# staging (relays read whole buckets, adapters are merged; copied) per actor: " in capsys.readouterr().out
    assert main(["--model.name", "qwen3", "--model.flavor", "8B"]) == 2


# Configurations for GPUs -> their ranks; they are planned by a public shape.


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_defaults_are_those_of_the_device_where_no_value_is_given(
    on_gpu: bool,
    engine: str,
    write_config: WriteConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*write_config(), "--inference.backend", engine, "--dry-run", "all"]
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda" if on_gpu else "cpu")
    assert main(arguments) == 0
    output = capsys.readouterr().out
    computed = "bfloat16" if on_gpu else "float32"
    assert f'mixed_precision_param = "{computed}"' in output
    assert f"{computed} products, float32 masters, float32 reduction, AdamW" in output
    config = load_config(arguments)
    assert config.inference.dtype == (computed if engine == "vllm" else "float32")
    # What is named wins, and master weights that lose updates are not passed over in silence.
    config = load_config([*arguments, "--training.mixed_precision_param", "float32"])
    assert config.training.mixed_precision_param == "float32"
    assert "WARNING" not in output and main([*arguments, "--training.dtype", "bfloat16"]) == 0
    assert "WARNING: training.dtype" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        ("--lr_scheduler.warmup_steps 7", True),
        ("--lr_scheduler.warmup_steps 1000", True),
        ("--lr_scheduler.warmup_steps 6", False),
        ("--training.steps 1", False),
        ("--lr_scheduler.warmup_steps 1000 --job.stage sft --sft.epochs 2", False),  # the steps are not known yet
    ],
)
def test_a_warmup_that_never_ends_is_named(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str], words: str, warns: bool
) -> None:
    assert main([*write_config(), "--dry-run", *words.split()]) == 0
    assert ("WARNING: lr_scheduler.warmup_steps = " in capsys.readouterr().out) == warns


def test_plan_says_how_many_connections_a_run_needs(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*write_config(), "--inference.num_actors", "2", "--inference.max_sequences", "1000"]
    monkeypatch.setattr(memory, "possible_descriptors", lambda: 1_024)
    text = describe_plan(load_config(arguments), 1)
    # A request has at least one sequence; with one more than an actor computes at a time, and a look at each actor.
    assert "connections: rank 0 has at most 2,004 with actors, and some 256 other files" in text
    assert "# WARNING: rank 0 may need 2,260 files and connections at a time" in text and "ulimit -Hn" in text
    monkeypatch.setattr(memory, "possible_descriptors", lambda: 65_536)
    assert "files and connections at a time" not in describe_plan(load_config(arguments), 1)
