"""Layouts against one rank: the same tokens give the same loss, gradient norm, step and export."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import make_checkpoint
from tests.distributed_launcher import run_distributed
from tests.patience import until
from tests.roundings import forward_rounding
from torchtitan.config.job_config import JobConfig, Optimizer, Parallelism
from torchtitan.distributed import collectives, device
from torchtitan.distributed.placement import ParallelDims, copy_full_, full_tensor
from torchtitan.errors import UserError
from torchtitan.models import hf_checkpoint
from torchtitan.models.decoder import Decoder
from torchtitan.models.head.logit_tiles import KeptTokens
from torchtitan.models.hf_checkpoint import export_policy
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.parallelize import build_policy
from torchtitan.models.roles import Role, role_of
from torchtitan.models.shape.checkpoint_shape import read_args
from torchtitan.trainer import muon
from torchtitan.trainer.optimizer import build_optimizer

# Odd and even totals, for one data-parallel rank and for two and four.
LENGTHS = [5, 9, 3, 12, 8, 4, 6, 2]
TEMPERATURE = 0.7
REFERENCE = "reference.safetensors"
# Sizes that no layout divides: 54 norm weights over 4 ranks, 131 tokens over 2, 45 rows of a half MLP over 2.
UNEVEN = {"vocab_size": 131, "hidden_size": 54, "intermediate_size": 90, "head_dim": 16}

Layout = dict[str, Any]
TP, CP = "parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree"
EP, REPLICATE = "parallelism.expert_parallel_degree", "parallelism.data_parallel_replicate_degree"
RECOMPUTED, COMPILED = {"activation_checkpoint.mode": "full"}, {"compile.enable": True}
TWO_RANKS: list[Layout] = [
    {"name": "fsdp"},
    {"name": "tp", TP: 2},
    {"name": "replicate", REPLICATE: 2},
    {"name": "tp, full, compiled", TP: 2, **RECOMPUTED, **COMPILED},
    {"name": "cp", CP: 2},
    {"name": "fsdp, offloaded", "training.enable_cpu_offload": True, "parallelism.fsdp_reshard_after_forward": "never"},
]
COMPILED_TWO_RANKS: list[Layout] = [
    {"name": "fsdp, selective", "activation_checkpoint.mode": "selective", **COMPILED},
    {"name": "cp, full, compiled", CP: 2, **RECOMPUTED, **COMPILED},
]
FOUR_RANKS: list[Layout] = [
    {"name": "fsdp", "parallelism.fsdp_reshard_after_forward": "always"},
    {"name": "2 x 2", TP: 2},
    {"name": "cp x fsdp", CP: 2},
    {"name": "cp x tp", CP: 2, TP: 2},
    {"name": "cp, more ranks than key heads", CP: 4},
    {"name": "hsdp", REPLICATE: 2},
    {"name": "replicas of tp", REPLICATE: 2, TP: 2, "training.enable_cpu_offload": True},
]


def _config(directory: str, layout: Layout) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path = directory
    config.compile.backend = "aot_eager"
    for key, value in layout.items():
        if key != "name":
            section, field = key.split(".")
            setattr(getattr(config, section), field, value)
    return config


def _data(vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Sequences with a weight per token; some tokens were sampled from a truncated vocabulary."""
    generator = torch.Generator().manual_seed(1)
    sequences = []
    for length in LENGTHS:
        targets = torch.randint(0, vocabulary, (length,), generator=generator)
        kept = [
            torch.cat((target, torch.randint(0, vocabulary, (5,), generator=generator))) for target in targets.split(1)
        ]
        kept = [row.unique() if place % 3 == 0 else row[:0] for place, row in enumerate(kept)]
        sequences.append(
            {
                "tokens": torch.randint(0, vocabulary, (length,), generator=generator),
                "targets": targets,
                "weights": torch.randn(length, generator=generator),
                "counts": torch.tensor([len(row) for row in kept]),
                "kept": torch.cat(kept),
            }
        )
    return sequences


def _step(policy: Decoder, dims: ParallelDims) -> tuple[float, float, float]:
    """One optimizer step on this rank's share of the data; returns the loss, entropy and gradient norm of the whole."""
    sequences = _data(policy.args.vocab_size)
    own_sequences = sequences[dims.dp_rank :: dims.dp_size]
    pack = {key: torch.cat([sequence[key] for sequence in own_sequences]) for key in sequences[0]}
    layout = PackedLayout([len(sequence["tokens"]) for sequence in own_sequences])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), pack["counts"].cumsum(0)))
    kept = KeptTokens(offsets, pack["kept"])
    log_probs, entropy = policy(pack["tokens"], layout, pack["targets"], TEMPERATURE, kept)
    assert type(log_probs) is torch.Tensor and log_probs.shape == entropy.shape == (layout.total,)
    loss = -(pack["weights"] * log_probs).sum() / sum(LENGTHS)
    loss.backward()
    sums = collectives.all_reduce_sum(torch.stack((loss.detach(), entropy.sum()))) / (dims.tp * dims.cp)
    norm, votes = collectives.gradient_norm_and_votes(policy.parameters(), torch.tensor([1.0, 0.0]))
    assert votes.tolist() == [float(dims.world_size), 0.0]
    # A bit below, so that clipping counts.
    collectives.clip_gradients_(policy.parameters(), norm, 0.9 * norm.item())
    torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-4, fused=True).step()
    return sums[0].item(), sums[1].item(), norm.item()


def _muon(policy: Decoder, start: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Muon from the `start`: the whole parameters after a step in fp32 on the gradients that they have ("real"), and
    after two in bfloat16, in small buckets, on gradients that every layout has alike ("alike"); and the work that each
    matrix is which this rank orthogonalised."""
    result: dict[str, torch.Tensor] = {}
    owned: list[int] = []
    for case, precision, size, steps in (("real", torch.float32, 1 << 28, 1), ("alike", torch.bfloat16, 1 << 13, 2)):
        with patch("torchtitan.trainer.optimizer.EPS", 1e-4):
            optimizer = build_optimizer(policy, Optimizer(name="Muon", lr=1e-3, weight_decay=0.1))
        generator = torch.Generator().manual_seed(2)
        for name, parameter in policy.named_parameters():
            copy_full_(parameter, start[name])
        with patch.multiple(muon, PRECISION=precision, MUON_BUCKET_BYTES=size):
            for _ in range(steps):
                for _, parameter in sorted(policy.named_parameters()) if case == "alike" else ():
                    copy_full_(parameter.grad, torch.randn(parameter.shape, generator=generator))
                optimizer.step()
        result |= {f"{case}.{name}": full_tensor(tensor.detach()).clone() for name, tensor in policy.named_parameters()}
        buckets = optimizer._parts[0]._buckets  # type: ignore[attr-defined]
        assert len(buckets) == 1 if case == "real" else len(buckets) > 1
        owned = owned or [matrix.work for matrix in buckets[0].owned]
    return result, owned


def _muon_errors(policy: Decoder, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """How far each case of `_muon` is from one rank's, relative to the parameter's largest value."""
    after = {name.removeprefix("after."): tensor for name, tensor in expected.items() if name.startswith("after.")}
    result, owned = _muon(policy, after)
    errors = {name: (value - expected[name]).abs().max() / expected[name].abs().max() for name, value in result.items()}
    changed = all(not torch.equal(result[f"real.{name}"], tensor) for name, tensor in after.items())
    worst = {c: max(error.item() for name, error in errors.items() if name.startswith(c)) for c in ("real", "alike")}
    matrices = [n for n, _ in policy.named_parameters() if role_of(policy, n) is Role.MATRIX]
    equal = all(torch.equal(result[f"alike.{name}"], expected[f"alike.{name}"]) for name in matrices)
    return {"muon_errors": worst, "muon_equal": equal and changed, "owned": owned}


def compare_layouts(directory: str, layouts: list[Layout], reference: str, scratch: str) -> list[dict[str, Any]]:
    """On every rank: for each layout load, export, step, and how far the result is from the reference."""
    _check_collectives(Path(scratch))
    expected = load_file(reference)
    original = load_file(Path(directory) / "model.safetensors")
    report = []
    for number, layout in enumerate(layouts):
        config = _config(directory, layout)
        dims = ParallelDims.from_config(config.parallelism, device.world_size(), device.rank())
        read = _counted_reads()
        policy = build_policy(config, dims)
        held = sum(parameter.to_local().numel() for parameter in policy.parameters())  # type: ignore[attr-defined]
        names = [name for name, _ in policy.named_parameters()]
        folder = Path(scratch) / f"{device.world_size()}-{number}"
        export_policy(policy, folder, max_file_bytes=20_000)
        exported: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            exported |= load_file(path)
        with torch.no_grad():
            tokens = torch.arange(14).view(2, 7)
            logits_error = (policy.logits(tokens) - expected["logits"]).abs().max().item()
        loss, entropy, norm = _step(policy, dims)
        errors = [
            (full_tensor(parameter.detach()) - expected["after." + name]).abs().max().item()
            for name, parameter in policy.named_parameters()
        ]
        report.append(
            {
                "name": layout["name"],
                "loss": loss,
                "entropy": entropy,
                "norm": norm,
                "logits_error": logits_error,
                "parameter_error": max(errors),
                **_muon_errors(policy, expected),
                "read": sum(read),
                "held": held,
                "names": names,
                "files": len(list(folder.glob("*.safetensors"))),
                "export_equal": exported.keys() == original.keys()
                and all(torch.equal(exported[name], original[name]) for name in original),
            }
        )
    _check_deadline(dims, Path(scratch))
    return report


def _check_deadline(dims: ParallelDims, scratch: Path) -> None:
    """The last thing that these ranks do together: a collective that a rank stays away from ends in time."""
    device.set_timeouts(1, dims.groups)
    ended = scratch / "it ended"
    if device.rank() == 0:
        with pytest.raises(RuntimeError, match="[Tt]imed out waiting 1000ms"):
            collectives.all_reduce_sum(torch.ones(1))
        ended.touch()
    else:
        # A rank that left would end it by its closed connection.
        until(ended.exists)


def _check_collectives(scratch: Path) -> None:
    """What needs several ranks and no model of its own."""
    rank, ranks = device.rank(), device.world_size()
    for data in (b"", b"x", bytes(range(256)) * 1000):
        assert collectives.broadcast_bytes(data if rank == 0 else None) == data
    value = torch.tensor([rank + 1.0])
    assert collectives.all_reduce_sum(value).item() == ranks * (ranks + 1) / 2 and value.item() == rank + 1
    # Rank 0 alone sees that the export cannot be written; all ranks must hear of it.
    dims = ParallelDims(1, ranks, 1, ranks, rank)
    config = JobConfig()
    config.model.name, config.model.flavor = "qwen3", "debug"
    policy = build_policy(config, dims)
    target = scratch / "a file"
    target.write_text("not a directory")
    with pytest.raises(UserError, match="is a file" if rank == 0 else "failed on rank 0"):
        export_policy(policy, target)
    # Random weights do not depend on the layout.
    alone = Decoder(policy.args)
    alone.initialize_weights(config.training.seed)
    for name, parameter in policy.named_parameters():
        assert torch.equal(full_tensor(parameter.detach()), alone.get_parameter(name)), name


def _counted_reads() -> list[int]:
    """Elements of every read from a checkpoint from now on."""
    counts: list[int] = []
    read = getattr(hf_checkpoint._read, "counted", hf_checkpoint._read)

    def counted(stored: Any, region: tuple[slice, ...]) -> torch.Tensor:
        tensor = read(stored, region)
        counts.append(tensor.numel())
        return tensor

    counted.counted = read  # type: ignore[attr-defined]
    hf_checkpoint._read = counted
    return counts


def _reference(directory: Path, path: Path) -> tuple[float, float, float]:
    """The step on one rank, without a process group; tensors go to `path`."""
    dims = ParallelDims(1, 1, 1, world_size=1)
    policy = build_policy(_config(str(directory), {}), dims)
    with torch.no_grad():
        tensors = {"logits": policy.logits(torch.arange(14).view(2, 7))}
    values = _step(policy, dims)
    after = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    tensors |= {"after." + name: tensor for name, tensor in after.items()} | _muon(policy, after)[0]
    save_file(tensors, path)
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "family", "tied", "layouts"),
    [
        pytest.param(2, "qwen3", True, TWO_RANKS, id="two ranks, tied"),
        pytest.param(2, "qwen3", True, COMPILED_TWO_RANKS, id="compiled", marks=pytest.mark.exhaustive),
        pytest.param(4, "qwen2", False, FOUR_RANKS, id="four ranks, untied"),
    ],
)
def test_layouts_agree(world_size: int, family: str, tied: bool, layouts: list[Layout], tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "checkpoint", family, tied, **UNEVEN)
    ranks = check_layouts("distributed.test_parallel:compare_layouts", world_size, directory, layouts, tmp_path)
    expected_names = [
        name.removeprefix("after.") for name in load_file(tmp_path / REFERENCE) if name.startswith("after.")
    ]
    for row in (row for rank in ranks for row in rank):
        assert row["files"] > 3 and sorted(row["names"]) == sorted(expected_names)
        # Every rank reads what it holds and no more.
        assert row["read"] == row["held"], row["name"]


def check_layouts(
    function: str, world_size: int, directory: Path, layouts: list[Layout], scratch: Path, rounding: float | None = None
) -> list[list[dict[str, Any]]]:
    """What the function of a unit test gives for every layout on every rank, after it was compared with one rank's.

    rounding: of a logit, where it is held to less than what a forward may round by.
    """
    reference = scratch / REFERENCE
    loss, entropy, norm = _reference(directory, reference)
    assert abs(loss) > 0.01 and norm > 0.1
    ranks = run_distributed(
        f"tests.unit_tests.{function}",
        world_size,
        directory=str(directory),
        layouts=layouts,
        reference=str(reference),
        scratch=str(scratch),
    )
    if rounding is None:
        rounding = forward_rounding(read_args(directory), load_file(reference)["logits"].abs().max().item())
    for number, layout in enumerate(layouts):
        rows = [rank[number] for rank in ranks]
        for row in rows:
            message = json.dumps(row)
            assert row["name"] == layout["name"]
            assert row["loss"] == pytest.approx(loss, abs=1e-5), message
            assert row["entropy"] == pytest.approx(entropy, rel=1e-5), message
            assert row["norm"] == pytest.approx(norm, rel=1e-4), message
            assert row["logits_error"] < rounding and row["parameter_error"] < 1e-5, message
            assert row["export_equal"], message
            assert row["muon_equal"] and max(row["muon_errors"].values()) < 3e-6, message
        work = [sum(row["owned"]) for row in rows]
        assert max(work) <= sum(work) / len(work) + max(itertools.chain(*(row["owned"] for row in rows)))
        assert len({(row["loss"], row["norm"]) for row in rows}) == 1, "ranks disagree"
    return ranks


@pytest.mark.slow
def test_mixed_precision_and_offload_on_one_rank(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "checkpoint", "llama3", True)
    dims = ParallelDims(1, 1, 1, world_size=1)
    expected = _step(build_policy(_config(str(directory), {}), dims), dims)
    layout = {"training.mixed_precision_param": "bfloat16", "training.enable_cpu_offload": True}
    try:
        policy = build_policy(_config(str(directory), layout), dims)
        assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
        values = _step(policy, dims)
        assert values != expected
        # The loss is a sum of log-probs of about 8 with weights of both signs: bfloat16 carries each to 2^-8.
        assert values[0] == pytest.approx(expected[0], abs=8 * 2**-8)
        assert values[1:] == pytest.approx(expected[1:], rel=0.05)
    finally:
        device.shutdown()


@pytest.mark.parametrize(
    ("degrees", "world_size", "expected"),
    [
        ((1, -1, 1), 1, (1, 1, 1)),
        ((1, -1, 2), 8, (1, 4, 2)),
        ((2, -1, 2), 8, (2, 2, 2)),
        ((2, 2, 1), 4, (2, 2, 1)),
    ],
)
def test_parallel_dims(degrees: tuple[int, int, int], world_size: int, expected: tuple[int, int, int]) -> None:
    parallelism = Parallelism(
        data_parallel_replicate_degree=degrees[0],
        data_parallel_shard_degree=degrees[1],
        tensor_parallel_degree=degrees[2],
    )
    ranks = [ParallelDims.from_config(parallelism, world_size, rank) for rank in range(world_size)]
    assert (ranks[0].dp_replicate, ranks[0].dp_shard, ranks[0].tp) == expected
    assert [(dims.dp_rank, dims.rank % dims.tp) for dims in ranks] == [
        (data, part) for data in range(expected[0] * expected[1]) for part in range(expected[2])
    ]
    assert ranks[0].fsdp_enabled == (world_size > 1)
