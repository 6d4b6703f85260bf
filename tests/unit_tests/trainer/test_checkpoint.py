"""Checkpoints: bit-identical resume, atomicity, limits on what is read back, other layouts."""

from __future__ import annotations

import contextlib
import enum
import json
import pickle
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.distributed_launcher import run_distributed
from tests.patience import PATIENCE_S
from torchtitan.config.job_config import Checkpoint, LRScheduler, Optimizer
from torchtitan.distributed import device
from torchtitan.distributed.offload import OptimizerOffload
from torchtitan.errors import UserError
from torchtitan.trainer import checkpoint
from torchtitan.trainer.checkpoint import Checkpointer
from torchtitan.trainer.job import TrainingJob
from torchtitan.trainer.optimizer import BatchLRScheduler, build_optimizer
from torchtitan.trainer.run_dir import MARKER, describe_file, encode_marker, go_back_to, whole_steps


class Policy(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(5, width)
        self.outer = nn.Linear(width, 3)
        self.unused = nn.Linear(2, 2)  # never gets a gradient
        self.dropout = nn.Dropout(0.5)  # makes training depend on the random state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.dropout(self.inner(x).tanh()))


class Run:
    """A tiny training run whose every bit depends on everything that a checkpoint holds."""

    def __init__(self, run_dir: Path, seed: int = 0, width: int = 6, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.policy = Policy(width)
        self.attach(run_dir, **settings)

    def attach(self, run_dir: Path, offloads: bool = False, **settings: Any) -> None:
        self.optimizer = build_optimizer(self.policy, Optimizer(lr=0.05, weight_decay=0.1))
        if offloads:
            OptimizerOffload(self.optimizer).between_steps()
        self.scheduler = BatchLRScheduler(
            self.optimizer, LRScheduler(warmup_steps=3, decay_type="cosine"), total_batches=20
        )
        config = Checkpoint(enable=True, interval=2, **settings)
        self.checkpointer = Checkpointer(config, run_dir, self.policy, self.optimizer, self.scheduler)

    def train(self, steps: int, without_dropout: bool = False) -> list[float]:
        self.policy.train(not without_dropout)
        losses = []
        for _ in range(steps):
            loss = self.policy(torch.randn(4, 5)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def save(self, step: int) -> None:
        self.checkpointer.save(step, rollout=b"unused groups \x00\xff")


@pytest.mark.parametrize(
    ("async_mode", "offloads"), [("disabled", False), ("async", False), ("disabled", True), ("async", True)]
)
def test_resumed_run_is_bit_identical(tmp_path: Path, async_mode: str, offloads: bool) -> None:
    run = Run(tmp_path, async_mode=async_mode, offloads=offloads)
    run.train(3)
    run.save(3)
    expected = run.train(4)  # in async mode the save goes on meanwhile
    run.checkpointer.wait()
    # Where the optimizer's state lies changes no bit, and may be changed.
    for elsewhere in (offloads, not offloads):
        resumed = Run(tmp_path, seed=99, offloads=elsewhere)
        restored = resumed.checkpointer.load()
        assert restored.version == 3
        assert restored.rollout == b"unused groups \x00\xff"
        assert resumed.train(4) == expected
        for ours, original in zip(resumed.policy.parameters(), run.policy.parameters(), strict=True):
            assert torch.equal(ours, original)


def test_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpointer.save(0)
    expected = run.train(3)
    resumed = Run(tmp_path, seed=99)
    assert resumed.checkpointer.load().rollout is None
    assert resumed.train(3) == expected


def test_async_save_holds_the_state_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, async_mode="async")
    run.train(2)
    expected = [parameter.detach().clone() for parameter in run.policy.parameters()]
    go_on = threading.Event()
    begin = checkpoint.begin_checkpoint  # type: ignore[attr-defined]
    monkeypatch.setattr(checkpoint, "begin_checkpoint", lambda *args: (go_on.wait(PATIENCE_S), begin(*args))[1])
    run.save(2)
    run.train(3)  # changes every parameter before anything is written
    assert whole_steps(run.checkpointer.folder) == []
    go_on.set()
    run.checkpointer.wait()
    resumed = Run(tmp_path, seed=1)
    resumed.checkpointer.load()
    for ours, original in zip(resumed.policy.parameters(), expected, strict=True):
        assert torch.equal(ours, original)


@pytest.mark.parametrize(
    ("mode", "expected"), [("async", ["cuda:3", "beside cuda:3"]), ("disabled", ["cpu", "beside cpu"])]
)
def test_background_saves_wait_for_no_computation(
    mode: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has it another GPU's stream; a save that the run waits for reads what was computed, so it must wait."""
    calls = list[str]()

    def in_background(where: torch.device) -> contextlib.AbstractContextManager[None]:
        calls.append(f"beside {where}")
        return contextlib.nullcontext()

    monkeypatch.setattr(device, "device", lambda: torch.device("cuda", 3))
    monkeypatch.setattr(device, "use", lambda where: calls.append(str(where)))
    monkeypatch.setattr(device, "in_background", in_background)
    run = Run(tmp_path, async_mode=mode)
    run.train(1)
    run.save(1)
    run.checkpointer.wait()
    assert calls == expected and whole_steps(run.checkpointer.folder) == [1]


def test_keeps_the_latest_and_loads_a_chosen_step(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_latest_k=2)
    saved = {}
    for step in (1, 2, 3):
        run.train(1)
        run.save(step)
        saved[step] = run.policy.inner.weight.detach().clone()
    folder = run.checkpointer.folder
    assert whole_steps(folder) == [2, 3]
    with pytest.raises(UserError, match=r"no whole checkpoint of step 1 .*; whole steps there: \[2, 3\]"):
        Run(tmp_path).checkpointer.load(1)
    resumed = Run(tmp_path, keep_latest_k=2)
    assert resumed.checkpointer.load(2).version == 2
    assert torch.equal(resumed.policy.inner.weight, saved[2])
    assert whole_steps(folder) == [2, 3]  # something else may still refuse the resume
    # The way not taken must not be what the next resume finds as the newest.
    go_back_to(folder.parent, 2)
    assert whole_steps(folder) == [2]
    assert (folder / "abandoned-step-3" / "state.json").is_file()


@pytest.mark.parametrize("before", ["_agree_on_step", "_check_files", "_read_facts", "_distributed"])
def test_an_evaluation_goes_on_where_a_checkpoint_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """A run that still trains deletes its older checkpoints, at any time."""
    run = Run(tmp_path)
    for step in (1, 2, 3):
        run.train(1)
        run.save(step)
    other = Run(tmp_path)
    job = cast("TrainingJob", SimpleNamespace(sync=None, checkpointer=other.checkpointer, version=0))
    folder = run.checkpointer.folder
    original = getattr(other.checkpointer, before)

    def after_deletion(*arguments: Any, **options: Any) -> Any:
        shutil.rmtree(folder / "step-1", ignore_errors=True)
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(other.checkpointer, before, after_deletion)
        assert not TrainingJob.load(job, folder, 1)
    assert TrainingJob.load(job, folder, 3) and job.version == 3
    assert torch.equal(other.policy.inner.weight, run.policy.inner.weight)
    (folder / "step-2" / "state.json").write_text("{")  # damaged, but there
    with pytest.raises(UserError, match="is damaged"):
        TrainingJob.load(job, folder, 2)


def test_interrupted_saves_are_ignored_and_removed(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_latest_k=1)
    run.train(1)
    run.save(1)
    folder = run.checkpointer.folder
    for name in ("step-7.tmp", "step-9", "step-5.removed"):  # cut off: while writing, without marker, while deleting
        (folder / name).mkdir()
        (folder / name / "state.json").write_text("{}")
    assert whole_steps(folder) == [1]
    assert Run(tmp_path).checkpointer.load().version == 1
    go_back_to(folder.parent, 1)
    assert [entry.name for entry in folder.iterdir()] == ["step-1"]


def test_the_last_whole_one_survives_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("disabled", "async"):
        run = Run(tmp_path / mode, keep_latest_k=1, async_mode=mode)
        run.train(1)
        run.save(1)
        run.checkpointer.wait()

        def fail(*_: object, **__: object) -> None:
            raise OSError("No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("torchtitan.trainer.checkpoint.FileSystemWriter.write_data", fail)
            message = r"\(\d+ MiB are free there\) could not be written: No space left on device$"
            with pytest.raises(UserError, match=message):
                run.save(2)
                run.checkpointer.wait()
        assert whole_steps(run.checkpointer.folder) == [1]
        run.save(2)  # the next attempt is not stopped by the remains of the failed one
        run.checkpointer.wait()
        assert whole_steps(run.checkpointer.folder) == [2]


def test_a_damaged_checkpoint_is_named_with_one_that_can_be_loaded(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (1, 2, 3):
        run.train(1)
        run.save(step)
    folder = run.checkpointer.folder
    (file,) = (folder / "step-3").glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    message = rf"step-3 is damaged: __0_0.distcp has {len(whole) - 7} of {len(whole)} bytes.*\.resume = .*/step-2$"
    with pytest.raises(UserError, match=message):
        Run(tmp_path).checkpointer.load()
    # A copy without the position in the data would begin with the first prompt again.
    (folder / "step-2" / "rollout.bin").unlink()
    with pytest.raises(UserError, match=r"step-2 is damaged: rollout.bin cannot be read .*\.resume = .*/step-1$"):
        Run(tmp_path).checkpointer.load(2)
    with pytest.raises(UserError, match=r"step-3 is damaged: .*\.resume = .*/step-1$"):
        Run(tmp_path).checkpointer.load()
    assert Run(tmp_path).checkpointer.load(1).version == 1
    marker = folder / "step-1" / MARKER
    marker.write_text('{"format": 1, "step": 1, "sizes": {}, "ranks": 1}')
    with pytest.raises(UserError, match=r"step-1 has checkpoint format 1, .* no other checkpoint that can be read"):
        Run(tmp_path).checkpointer.load(1)


def test_no_flipped_bit_is_loaded(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)
    run.save(1)
    folder = run.checkpointer.folder / "step-1"
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [".metadata", "__0_0.distcp", MARKER, "rollout.bin", "state.json"]
    bits = random.Random(1)
    for number in range(500):
        file = files[number % len(files)]
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[bits.randrange(len(whole))] ^= 1 << bits.randrange(8)
        file.write_bytes(flipped)
        with pytest.raises(UserError, match=rf"step-1 is damaged: {file.name} (is not as|cannot be read)"):
            run.checkpointer.load()
        file.write_bytes(whole)
    assert run.checkpointer.load().version == 1


def test_another_model_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)
    run.save(1)
    with pytest.raises(UserError, match=r"another model: model.inner.weight should have shape \[7, 5\], found .*6, 5"):
        Run(tmp_path, width=7).checkpointer.load()
    with pytest.raises(UserError, match="no whole checkpoint in"):
        Run(tmp_path / "elsewhere").checkpointer.load()
    other = Run(tmp_path)
    other.checkpointer.optimizer = torch.optim.SGD(other.policy.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UserError, match=r"another optimizer, .*momentum_buffer: resume with its optimizer.name"):
        other.checkpointer.load()


class Payload:
    """Is pickled as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple:
        return self._call


class OlderPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def seal(checkpoint: Path) -> None:
    """Write the checksums of changed files into the marker."""
    marker = json.loads((checkpoint / MARKER).read_bytes())
    marker["files"] = {name: describe_file(checkpoint / name) for name in marker["files"]}
    (checkpoint / MARKER).write_bytes(encode_marker(marker))


def test_metadata_of_an_older_python_is_read(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    path = run.checkpointer.folder / "step-1" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    with path.open("wb") as file:
        OlderPickler(file).dump(metadata)
    assert b"getattr" in path.read_bytes()
    seal(path.parent)
    assert Run(tmp_path, seed=1).checkpointer.load() is not None
    path.write_bytes(pickle.dumps(Payload(getattr, type(metadata), "__init__")))
    seal(path.parent)
    with pytest.raises(UserError, match="'__init__' of .* has no place"):
        Run(tmp_path).checkpointer.load()


def test_a_crafted_pickle_is_not_executed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    metadata = run.checkpointer.folder / "step-1" / ".metadata"
    metadata.write_bytes(pickle.dumps(Payload(Path.touch, tmp_path / "executed")))
    seal(metadata.parent)
    with pytest.raises(UserError, match="cannot be read"):
        Run(tmp_path).checkpointer.load()
    assert not (tmp_path / "executed").exists()


def test_due_and_repeated_saves(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert [step for step in range(5) if run.checkpointer.due(step)] == [2, 4]
    run.save(2)
    written = (run.checkpointer.folder / "step-2" / MARKER).stat().st_mtime_ns
    run.save(2)
    marker = run.checkpointer.folder / "step-2" / MARKER
    assert marker.stat().st_mtime_ns == written and json.loads(marker.read_text())["ranks"] == 1


def sharded_run(run_dir: str) -> dict[str, list]:
    """On every rank: train with FSDP2, save in the background, go on; resume in the same layout and go on alike."""
    from torch.distributed.fsdp import fully_shard

    def build(offloads: bool = False) -> Run:
        run = Run.__new__(Run)
        torch.manual_seed(0)
        run.policy = Policy(width=7)  # does not divide by two
        fully_shard(run.policy)
        run.policy.set_force_sum_reduction_for_comms(True)
        run.attach(Path(run_dir), offloads, async_mode="async")
        return run

    def full(run: Run) -> dict[str, list]:
        return {name: parameter.full_tensor().tolist() for name, parameter in run.policy.named_parameters()}  # type: ignore[attr-defined]

    run = build()
    run.train(3, without_dropout=True)
    run.save(3)
    run.train(2, without_dropout=True)
    run.checkpointer.wait()
    expected = full(run)
    resumed = build(offloads=True)
    restored = resumed.checkpointer.load()
    assert (restored.rollout is not None) == (resumed.checkpointer.rank == 0)
    resumed.train(2, without_dropout=True)
    assert full(resumed) == expected
    shard = resumed.checkpointer.folder / "step-3" / "__1_0.distcp"
    flip(shard, when=resumed.checkpointer.rank == 0)
    with pytest.raises(UserError, match="step-3 is damaged: __1_0.distcp is not as it was written"):
        build().checkpointer.load()
    flip(shard, when=resumed.checkpointer.rank == 0)
    return expected


def flip(file: Path, when: bool) -> None:
    """Flip a bit on one rank while the others wait."""
    torch.distributed.barrier()
    if when:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    torch.distributed.barrier()


def test_two_ranks_to_one(tmp_path: Path) -> None:
    first, second = run_distributed("tests.unit_tests.trainer.test_checkpoint:sharded_run", 2, run_dir=str(tmp_path))
    assert first == second
    single = Run(tmp_path, seed=5, width=7)
    assert single.checkpointer.load().version == 3
    single.train(2, without_dropout=True)
    for name, parameter in single.policy.named_parameters():
        torch.testing.assert_close(parameter.detach(), torch.tensor(first[name]), rtol=1e-6, atol=1e-7)
