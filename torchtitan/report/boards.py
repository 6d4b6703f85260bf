"""Boards show a run's figures elsewhere: wandb, TensorBoard and the live page. A run can do without them: one that
fails or hangs is dropped with a warning and an event, and training goes on."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.utils.json_lines import EventLog

TENSORBOARD_FOLDER = "tb"
# The figure by which wandb orders rows: its own count of rows never goes back, as a resumed run does.
STEP_METRIC = "step"
# A board that has fallen behind by this many rows is dropped.
MAX_ROWS = 1000
# How long the end of a run waits for what boards have not shown yet.
CLOSE_TIMEOUT_S = 60.0

Figures = Mapping[str, float | int | None]
Show = Callable[[Figures, int], None]
"""Shows the figures of one row, and their step"""
End = Callable[[], None]


class Board:
    """Shows rows in a thread of its own, so that a board that hangs does not hold the trainer."""

    def __init__(self, name: str, show: Show, end: End):
        """end: called once, after the last row or a failure."""
        self.name = name
        self.problem = ""
        """Why it shows nothing any more"""
        self._show, self._end = show, end
        self._rows: queue.Queue[tuple[Figures, int] | None] = queue.Queue(MAX_ROWS)
        self._thread = threading.Thread(target=self._work, name=f"board-{name}", daemon=True)
        self._thread.start()

    def write(self, figures: Figures, step: int) -> None:
        """Show a row; returns at once. Look at `problem` afterwards."""
        self._put((figures, step))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Show what has been written, and end. Look at `problem` afterwards."""
        self._put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive() and not self.problem:
            self.problem = f"it has not ended within {timeout_s:g} s"

    def _put(self, row: tuple[Figures, int] | None) -> None:
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.problem = self.problem or f"it hangs: {MAX_ROWS} rows wait for it"

    def _work(self) -> None:
        for part in (self._show_rows, self._end):
            try:
                part()
            except Exception as error:  # other people's code, which the run can do without
                self.problem = self.problem or f"{type(error).__name__}: {error}"

    def _show_rows(self) -> None:
        while not self.problem and (row := self._rows.get()) is not None:
            self._show(*row)


class Boards:
    """All boards of a run, on rank 0. For one thread at a time."""

    def __init__(
        self,
        config: JobConfig,
        run_dir: Path,
        events: EventLog,
        resumed_step: int | None = None,
        describe_live_page: Callable[[], str] | None = None,
    ):
        """resumed_step: the step from which a run goes on; a board that does not start is then dropped like one that
        fails later. describe_live_page: returns why the live page shows nothing any more, if there is one.

        Raises:
            UserError, OSError: a board of a run that begins does not start.
        """
        self._events = events
        self._describe_live_page = describe_live_page
        self._step = resumed_step or 0
        self._boards: list[Board] = []
        self._excepthook: Callable[[threading.ExceptHookArgs], Any] | None = None
        if "tensorboard" in config.metrics.loggers:
            self._excepthook, threading.excepthook = threading.excepthook, without_tensorboard
        for name, wanted, start in (
            ("wandb", "wandb" in config.metrics.loggers, _start_wandb),
            ("TensorBoard", "tensorboard" in config.metrics.loggers, _start_tensorboard),
        ):
            if wanted:
                try:
                    self._boards.append(Board(name, *start(config, run_dir, resumed_step)))
                except (UserError, OSError) as error:
                    if resumed_step is None:
                        raise
                    self._report(name, str(error))

    def write(self, figures: Figures, step: int) -> None:
        """Show the figures of a step on every board that still works."""
        self._step = step
        for board in self._boards:
            board.write(figures, step)
        self._drop_failed()

    def close(self) -> None:
        """Wait until the boards have shown everything, at most CLOSE_TIMEOUT_S each. May be called twice."""
        for board in self._boards:
            board.close()
        self._drop_failed()
        self._boards = []
        if self._excepthook is not None:
            threading.excepthook, self._excepthook = self._excepthook, None

    def _drop_failed(self) -> None:
        for board in [board for board in self._boards if board.problem]:
            self._boards.remove(board)
            self._report(board.name, board.problem)
        if self._describe_live_page is not None and (ended := self._describe_live_page()):
            self._describe_live_page = None
            self._report("live page", ended)

    def _report(self, board: str, reason: str) -> None:
        self._events.write("board_dropped", level=logging.WARNING, board=board, step=self._step, reason=reason)


def without_tensorboard(arguments: threading.ExceptHookArgs) -> None:
    """Print a thread's traceback, but not for TensorBoard's writer thread: the next call to it raises its error."""
    if type(arguments.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(arguments)


def _start_tensorboard(_config: JobConfig, run_dir: Path, resumed_step: int | None) -> tuple[Show, End]:
    from torch.utils.tensorboard import SummaryWriter

    purge = None if resumed_step is None else resumed_step + 1
    writer = SummaryWriter(str(run_dir / TENSORBOARD_FOLDER), purge_step=purge)

    def show(figures: Figures, step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return show, writer.close


def _start_wandb(config: JobConfig, run_dir: Path, _resumed_step: int | None) -> tuple[Show, End]:
    import wandb

    try:
        run = wandb.init(
            project=config.job.name,
            name=run_dir.name,
            id=run_dir.name,
            dir=str(run_dir),
            config=dataclasses.asdict(config),
            resume="allow",
        )
        run.define_metric(STEP_METRIC)
        run.define_metric("*", step_metric=STEP_METRIC)
    except (wandb.errors.Error, OSError) as error:
        raise UserError(
            f"wandb could not start: {error}. Log in with `wandb login`, set WANDB_MODE=offline, or take "
            "wandb out of metrics.loggers"
        ) from error
    return lambda figures, step: run.log({**figures, STEP_METRIC: step}), run.finish
