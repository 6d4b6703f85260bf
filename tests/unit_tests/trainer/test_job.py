"""A job's traces of single steps: when, where, and of what; and how long its ranks wait for each other."""

from __future__ import annotations

import errno
import itertools
import json
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.patience import PATIENCE_S
from torchtitan import grpo_train
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed import device
from torchtitan.distributed.placement import ParallelDims
from torchtitan.errors import ConfigError, Unreachable, UserError
from torchtitan.rollout.types import Batch
from torchtitan.trainer import job, weight_path
from torchtitan.trainer.job import TrainingJob, profile
from torchtitan.trainer.signals import SignalFlags
from torchtitan.trainer.weight_path import open_weight_path
from torchtitan.utils.json_lines import EventLog, JsonLines, read_json_lines


@pytest.mark.parametrize(("every", "resumed", "recorded"), [(3, 0, [3, 6]), (2, 20, [22, 24])])
def test_every_so_many_steps_one_is_recorded(every: int, resumed: int, recorded: list[int], tmp_path: Path) -> None:
    with profile(every, tmp_path, 1, resumed) as profiler:
        assert profiler is not None
        for step in range(resumed + 1, recorded[-1] + 1):
            with torch.profiler.record_function(f"own {step}"):
                torch.ones(step).sum()
            profiler.step()
    for step in recorded:
        trace = json.loads((tmp_path / f"profile_traces/step-{step}/rank-1.json").read_text())
        names = {str(event.get("name")) for event in trace["traceEvents"]}
        assert "aten::sum" in names and {name for name in names if name.startswith("own ")} == {f"own {step}"}
    assert len(list(tmp_path.rglob("*.json"))) == 2
    with profile(0, tmp_path, 0, 0) as nothing:
        assert nothing is None


def test_a_rank_with_other_values_than_rank_0_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = JobConfig()
    other.optimizer.lr, other.job.config_file, other.training.threads = 0.5, "elsewhere.toml", 3
    monkeypatch.setattr(job, "gather_bytes", lambda data: [data, json.dumps(asdict(other)).encode()])
    with pytest.raises(
        UserError, match=r"rank 1 and rank 0 have different configurations: optimizer.lr = 0.5 -> 1e-06 on rank 0"
    ):
        TrainingJob(JobConfig())._agree_on_start()


@pytest.mark.parametrize("error", [UserError("no such bucket"), Unreachable("it does not answer")])
def test_ranks_end_with_the_exit_code_of_the_one_that_cannot_publish(
    error: UserError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the launcher, which looks at the first that has ended, would take what may pass for a mistake."""
    broadcasts, codes = list[bytes](), list[int]()

    def broadcast(data: bytes | None) -> bytes:
        broadcasts.extend([data] if data is not None else [])
        return broadcasts[0]

    def cannot(*_arguments: object, **_named: object) -> None:
        raise error

    monkeypatch.setattr(weight_path, "broadcast_bytes", broadcast)
    monkeypatch.setattr(weight_path, "WeightSync", cannot)
    monkeypatch.setattr(weight_path, "synced_parameters", lambda _: {})
    monkeypatch.setattr(weight_path, "applied_bytes", lambda *_: 0)
    for rank in (0, 1):
        monkeypatch.setattr(device, "rank", lambda rank=rank: rank)
        policy: Any = SimpleNamespace(args=None)
        with pytest.raises(UserError) as raised, open_weight_path(JobConfig(), policy, "e", "token", tmp_path):
            pass
        codes.append(raised.value.exit_code)
    assert codes == [error.exit_code] * 2


def test_clock_that_is_set_anew_changes_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two that a step's time is without: evaluations of demonstrations, and the probe."""
    hours, durations = itertools.count(step=3600.0), list[float]()
    monkeypatch.setattr(time, "time", lambda: next(hours))
    training = TrainingJob(JobConfig())
    figures = SimpleNamespace(cross_entropy=lambda _: {}, score=lambda _: [], next_log_probs=lambda *_: [])
    evaluations = SimpleNamespace(take_loss=lambda _version, _figures, _began, seconds: durations.append(seconds))
    controller = SimpleNamespace(evaluations=evaluations, expect=lambda *_: None)
    recorder = SimpleNamespace(add=lambda *_: None)
    for name, value in {"trainer": figures, "controller": controller, "_recorder": recorder, "_probe": [1, 2]}.items():
        monkeypatch.setattr(training, name, value, raising=False)
    training.evaluate(Batch(0, []))
    training._offered(True, 0.0)
    assert all(0.0 <= seconds < PATIENCE_S for seconds in (*durations, training._probe_s)) and len(durations) == 1


@pytest.mark.parametrize(("stepped", "after"), [(False, 300), (True, 120)])
def test_ranks_wait_for_rank_0s_disk_longer_than_for_a_step(
    stepped: bool, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a checkpoint of many gigabytes is exported."""
    calls: list[object] = []

    class Fails:
        def export_hf(self, step: int, assets_from: str | None, end_token_ids: list[int]) -> None:
            calls.append(step)
            raise UserError("no room")

    run = TrainingJob(JobConfig())
    run.dims, run.checkpointer, run._stepped = ParallelDims(1, 1, 1, 1, 0), Fails(), stepped  # type: ignore[assignment]
    run._end_token_ids = []
    monkeypatch.setattr(device, "set_timeouts", lambda seconds, groups: calls.append(seconds))
    run.export_on_demand()
    assert calls == [1800, 0, after]


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (None, 0, "all steps are trained"),
        (UserError("no data came for 600 s"), 1, "no data came for 600 s"),
        (ConfigError(["grpo.group_size = 1"]), 2, "configuration problem:\n  - grpo.group_size = 1"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 1, "OSError(28, 'No space left on device')"),
        (RuntimeError("connection closed by peer"), 75, "RuntimeError('connection closed by peer')"),
    ],
)
def test_why_a_run_ended_is_recorded(error: Exception | None, code: int, reason: str, tmp_path: Path) -> None:
    config = JobConfig()
    config.training.steps = 7
    run = TrainingJob(config)
    run.signals, run.version = SignalFlags(1.0), 7
    run._closing.callback(lambda: order.append(read_json_lines(tmp_path / "events.jsonl")[-1]["kind"]))
    order: list[str] = []
    run._record_start(EventLog(tmp_path / "events.jsonl"))
    run.__exit__(type(error), error, None)
    started, ended = read_json_lines(tmp_path / "events.jsonl")
    assert (started["kind"], started["version"], started["ranks"]) == ("run_started", 7, 1)
    assert started["program"].startswith("torchtitan-grpo ")
    # The metadata of wheels from PyPI leave out which build they are ("+cu132").
    assert started["torch"] and torch.__version__.startswith(started["torch"])
    assert shlex.split(started["command"]) == psutil.Process().cmdline() and started["host"]
    assert {name: ended[name] for name in ("kind", "code", "reason", "version")} == {
        "kind": "run_ended", "code": code, "reason": reason, "version": 7
    }  # fmt: skip
    assert order == ["run_ended"], "the report is drawn after it"


def test_a_disk_that_is_full_ends_the_run_with_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(config: JobConfig) -> TrainingJob:
        JsonLines("/dev/full").write({"step": 1})
        raise AssertionError

    monkeypatch.setattr(job, "TrainingJob", opened)
    with pytest.raises(UserError, match="can no longer be written: .*No space left on device: '/dev/full'.*resume"):
        grpo_train.run_job(JobConfig())


def test_ctrl_c_before_there_is_a_run_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    codes: list[int] = []
    monkeypatch.setattr(grpo_train, "main", interrupted)
    monkeypatch.setattr(grpo_train, "leave", codes.append)
    grpo_train.entry_point()
    assert codes == [130] and capsys.readouterr().err == ""
