"""Boards show the figures of metrics.jsonl, and whatever happens to them costs the run nothing."""

from __future__ import annotations

import errno
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.report import boards as module
from torchtitan.report.boards import Boards
from torchtitan.report.live_server import LivePage
from torchtitan.report.metrics import MetricsLogger
from torchtitan.utils.json_lines import EventLog, read_json_lines


class Wandb:
    """wandb as far as boards use it: an online run keeps a row only if its `step` is none that has passed, or counts by
    itself. With `fails_at`, its service has died before that row."""

    def __init__(self) -> None:
        self.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
        self.rows: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}
        self.metrics: list[tuple[str, str | None]] = []
        self.finished = 0
        self.newest = -1
        self.fails_at: float = float("inf")
        self.refuses: Exception | None = None
        self.hangs: threading.Event | None = None

    def init(self, **settings: Any) -> Wandb:
        if self.refuses is not None:
            raise self.refuses
        self.settings = settings
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, row: dict[str, Any], step: int | None = None) -> None:
        if self.hangs is not None:
            self.hangs.wait(PATIENCE_S)
        if len(self.rows) >= self.fails_at:
            raise ConnectionResetError("Connection lost")
        if step is None or step >= self.newest:
            self.rows.append(row)
            self.newest = self.newest + 1 if step is None else step

    def finish(self) -> None:
        self.finished += 1
        if len(self.rows) >= self.fails_at:
            raise ConnectionResetError("Connection lost")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture(autouse=True)
def excepthook() -> Iterator[None]:
    before = threading.excepthook
    yield
    assert threading.excepthook is before


def start(
    folder: Path, resumed: int | None = None, live_page: LivePage | None = None, loggers: Sequence[str] = ()
) -> MetricsLogger:
    config = JobConfig()
    config.metrics.loggers = list(loggers)
    events = EventLog(folder / "events.jsonl")
    describe_page = live_page and live_page.describe_end
    return MetricsLogger(config, folder, resumed, Boards(config, folder, events, resumed, describe_page))


def figures(step: int) -> dict[str, float | None]:
    return {"loss": 0.5 * step, "reward/mean": 0.25}


def dropped(folder: Path) -> list[tuple[str, int, str]]:
    events = read_json_lines(folder / "events.jsonl")
    return [(event["board"], event["step"], event["reason"]) for event in events if event["kind"] == "board_dropped"]


def steps_of(folder: Path) -> list[int]:
    return [row["step"] for row in read_json_lines(folder / "metrics.jsonl")]


def test_tensorboard_has_the_same_figures(tmp_path: Path) -> None:
    logger = start(tmp_path, loggers=["tensorboard"])
    for step in (1, 2):
        logger.log_step(step, figures(step))
    logger.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 1.0)]
    assert "grad_norm" not in events.Tags()["scalars"]  # null is not a point
    assert not dropped(tmp_path)


def test_wandb_has_the_same_figures_also_after_going_back(tmp_path: Path, wandb: Wandb) -> None:
    for first, last, resumed in ((1, 4, None), (3, 5, 2)):
        logger = start(tmp_path, resumed, loggers=["wandb"])
        for step in range(first, last + 1):
            logger.log_step(step, figures(step) | {"loss": float(resumed or 0)})
        logger.log_evaluation(last, {"eval/pass@1": 0.5})
        logger.close()
    assert wandb.settings["id"] == tmp_path.name and wandb.settings["config"]["training"]["steps"] > 0
    assert wandb.metrics == 2 * [("step", None), ("*", "step")] and wandb.finished == 2
    # Both the abandoned rows and those that replace them, each with its step.
    trained = [(row["step"], row["loss"]) for row in wandb.rows if "loss" in row]
    assert trained == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 0.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert [row for row in wandb.rows if "loss" not in row] == [{"eval/pass@1": 0.5, "step": last} for last in (4, 5)]


@pytest.mark.parametrize("kind", ["log_step", "log_evaluation"])
@pytest.mark.parametrize("dead_after", [0, 2])
def test_a_dead_wandb_service_costs_its_board(tmp_path: Path, wandb: Wandb, kind: str, dead_after: int) -> None:
    wandb.fails_at = dead_after
    logger = start(tmp_path, loggers=["wandb", "tensorboard"])
    for step in range(1, 6):
        getattr(logger, kind)(step, figures(step))
        # Its thread has taken the row, so that the next one finds it dropped.
        until(lambda step=step: len(wandb.rows) == min(step, dead_after) and (step <= dead_after or wandb.finished))
    logger.close()
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5] and wandb.finished == 1
    ((board, step, reason),) = dropped(tmp_path)
    assert (board, reason) == ("wandb", "ConnectionResetError: Connection lost")
    assert step in (dead_after + 1, dead_after + 2)  # it is noticed with that row or the next


def test_a_hanging_board_holds_nothing(tmp_path: Path, wandb: Wandb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 3)
    monkeypatch.setattr(module.Board.close, "__defaults__", (0.0,))
    wandb.hangs = threading.Event()
    logger = start(tmp_path, loggers=["wandb"])
    for step in range(1, 9):
        logger.log_step(step, figures(step))
    assert [(board, reason) for board, _, reason in dropped(tmp_path)] == [("wandb", "it hangs: 3 rows wait for it")]
    logger.close()
    logger = start(tmp_path / "short", loggers=["wandb"])
    logger.log_step(1, figures(1))
    logger.close()
    assert dropped(tmp_path / "short") == [("wandb", 1, "it has not ended within 0 s")]
    wandb.hangs.set()
    assert steps_of(tmp_path) == list(range(1, 9))


def test_a_disk_that_is_full_for_tensorboard_costs_its_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback comes from TensorBoard's own thread."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    printed: list[object] = []
    monkeypatch.setattr(threading, "__excepthook__", printed.append)
    monkeypatch.setattr(module.Board.close, "__defaults__", (5.0,))
    logger = start(tmp_path, loggers=["tensorboard"])
    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "write", no_space)
        for step in range(1, 60):
            logger.log_step(step, figures(step))
        logger.close()
    assert not printed and steps_of(tmp_path) == list(range(1, 60))
    ((board, _, reason),) = dropped(tmp_path)
    assert board == "TensorBoard" and "No space left on device" in reason


@pytest.mark.parametrize("resumed", [None, 2])
def test_a_board_that_does_not_start_is_refused_at_first_and_dropped_by_a_run_that_goes_on(
    tmp_path: Path, wandb: Wandb, resumed: int | None
) -> None:
    wandb.refuses = wandb.errors.Error("api_key not configured")
    if resumed is None:
        with pytest.raises(UserError, match="wandb could not start: api_key not configured"):
            start(tmp_path, loggers=["wandb"])
        return
    logger = start(tmp_path, resumed, loggers=["wandb"])
    logger.log_step(3, figures(3))
    logger.close()
    ((board, step, reason),) = dropped(tmp_path)
    assert (board, step) == ("wandb", 2) and "WANDB_MODE=offline" in reason
    assert steps_of(tmp_path) == [3]


def test_a_live_page_that_ends_or_does_not_start_again_is_named_once(tmp_path: Path) -> None:
    page = LivePage(tmp_path, 0)
    logger = start(tmp_path, live_page=page)
    try:
        logger.log_step(1, figures(1))
        assert page._process is not None and not dropped(tmp_path)
        page._process.kill()
        page._process.wait(PATIENCE_S)
        for step in (2, 3):
            logger.log_step(step, figures(step))
    finally:
        logger.close()
        page.close()
    log_file = tmp_path / "logs" / "live.log"
    assert dropped(tmp_path) == [("live page", 2, f"its process ended with code -9, see {log_file}")]
    # A port that is not to be had. The run that goes on has been told nothing else.
    page = LivePage(tmp_path, 1 << 20, must_start=False)
    logger = start(tmp_path, 3, page)
    logger.log_step(4, figures(4))
    logger.close()
    page.close()
    assert dropped(tmp_path)[1][:2] == ("live page", 4) and "cannot listen" in dropped(tmp_path)[1][2]
