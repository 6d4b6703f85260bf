"""Outputs for a run's metrics: metrics.jsonl, completions.jsonl, its boards, and log lines. Only rank 0 writes
metrics."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.config.job_config import JobConfig
from torchtitan.config.reward_names import reward_labels
from torchtitan.errors import UserError
from torchtitan.inference.types import Completion, sampled_segments
from torchtitan.report.boards import Boards
from torchtitan.report.console import make_console
from torchtitan.rollout.types import Batch, Sample
from torchtitan.utils.json_lines import JsonLines, JsonTail, write_whole
from torchtitan.utils.logs import SafeFormatter, log_to

if TYPE_CHECKING:
    from torchtitan.rollout.conversation.tokenizer import Tokenizer

logger = logging.getLogger("torchtitan.metrics")

METRICS_FILE = "metrics.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
ACTORS_FILE = "actors.json"
# The first DETAILED_SAMPLES completions of each step are written token by token, up to DETAILED_TOKENS tokens each.
DETAILED_SAMPLES = 4
DETAILED_TOKENS = 512

# Other tools rely on these keys: every step's object has all of them, with null for a missing value.
REQUIRED_KEYS = (
    "step", "policy_version", "loss", "grad_norm", "reward/mean", "reward/std", "entropy", "mismatch_kl",
    "staleness/mean", "staleness/max", "completion/length_mean", "completion/truncated_fraction",
    "groups/zero_variance_fraction", "time/step_s", "time/data_wait_s", "time/train_s", "time/snapshot_s",
    "time/sync_stall_s", "tokens_per_s", "weight_sync/versions_published", "weight_sync/versions_skipped",
)  # fmt: skip

Figure = float | int | None


class MetricsLogger:
    """Writes the metrics of a run; exists on rank 0 only.

    With resumed_step, the rows of later steps, which the interrupted launch wrote, are removed first.
    """

    def __init__(
        self, config: JobConfig, run_dir: str | Path, resumed_step: int | None = None, boards: Boards | None = None
    ):
        """boards: also show the figures; closed with this object."""
        self.config = config
        self.run_dir = Path(run_dir)
        self._closing = contextlib.ExitStack()
        self._boards = boards
        if boards is not None:
            self._closing.callback(boards.close)
        for name in (METRICS_FILE, COMPLETIONS_FILE):
            cut_after(self.run_dir / name, -1 if resumed_step is None else resumed_step)
        self._rows = self._closing.enter_context(JsonLines(self.run_dir / METRICS_FILE, allow_nan=False))
        self._completions = self._closing.enter_context(JsonLines(self.run_dir / COMPLETIONS_FILE, ensure_ascii=False))
        self._console = make_console(config.training.steps, resumed_step or 0)
        self._closing.callback(self._console.close)

    def log_step(self, step: int, figures: Mapping[str, Figure], actors: Mapping[str, str] | None = None) -> None:
        """Write the metrics of one trained batch, and the current actors (name → state) to actors.json."""
        row = self._write(dict.fromkeys(REQUIRED_KEYS) | dict(figures) | {"step": step})
        if step % self.config.metrics.log_freq == 0 or step == self.config.training.steps:
            self._console.step(step, row, actors or {})
        if actors:
            write_whole(self.run_dir / ACTORS_FILE, json.dumps({"step": step, "actors": dict(actors)}))

    def log_evaluation(self, step: int, figures: Mapping[str, Figure]) -> None:
        """Write an evaluation as a separate object with `eval/…` keys; it ran after the given step."""
        self._console.evaluation(step, self._write({"step": step} | dict(figures)))

    def log_completions(self, step: int, batch: Batch, tokenizer: Tokenizer) -> None:
        """Write samples of a batch as text, at most metrics.completions_per_step (all if negative): the first of every
        group, then the second ones."""
        limit, labels = self.config.metrics.completions_per_step, reward_labels(self.config)
        by_turns = itertools.chain(*itertools.zip_longest(*(group.samples for group in batch.groups)))
        samples = [sample for sample in by_turns if sample is not None]
        sources = {id(sample): group.source for group in batch.groups for sample in group.samples}
        for number, sample in enumerate(samples[: None if limit < 0 else limit]):
            row = describe_sample(step, batch.version, sample, tokenizer, labels)
            self._write_sample(number, row, sources[id(sample)], sample, tokenizer)

    def log_evaluated(
        self, name: str, tokenizer: Tokenizer, step: int, version: int, samples: Iterable[tuple[Sample, bool]]
    ) -> None:
        """Write all samples of an evaluation set as text; the second of each pair: whether it is greedy."""
        labels = reward_labels(self.config)
        for number, (sample, greedy) in enumerate(samples):
            row = describe_sample(step, version, sample, tokenizer, labels) | {"greedy": greedy}
            self._write_sample(number, row, name, sample, tokenizer)

    def close(self) -> None:
        """Close the files and the display; calling it again does nothing."""
        self._closing.close()

    def _write_sample(
        self, number: int, row: dict[str, Any], source: str, sample: Sample, tokenizer: Tokenizer
    ) -> None:
        named = {"source": source} if source else {}
        detail = describe_tokens(sample, tokenizer) if number < DETAILED_SAMPLES else {}
        self._completions.write(row | named | detail)

    def _write(self, figures: dict[str, Figure]) -> dict[str, Figure]:
        row = {name: finite(value) for name, value in figures.items()}
        self._rows.write({"step": row["step"], "time": round(time.time(), 3)} | row)
        numbers = {name: value for name, value in row.items() if value is not None and name != "step"}
        if self._boards is not None:
            self._boards.write(numbers, int(row["step"] or 0))
        return row


def finite(value: Figure) -> Figure:
    """Return a number that JSON can represent; None for NaN and infinities."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if isinstance(value, int) else float(value)


def describe_sample(
    step: int, version: int, sample: Sample, tokenizer: Tokenizer, labels: Mapping[str, str]
) -> dict[str, Any]:
    """Return one row of completions.jsonl; labels: what rewards are called. A conversation also has its `segments`."""
    row: dict[str, Any] = {}
    if len(sampled_segments(sample.branches)) != 1:
        row["segments"] = _segments(sample, tokenizer)
    if sample.extra:
        row["extra"] = sample.extra
    return row | {
        "step": step,
        "trainer_version": version,
        "prompt": tokenizer.decode(sample.prompt_ids, skip_special=False),
        "completion": tokenizer.decode(sample.completion_ids, skip_special=False),
        "reward": finite(sample.reward),
        "rewards": {labels.get(name, name): finite(value) for name, value in sample.rewards.items()},
        "advantage": finite(sample.advantage),
        "versions": [{"version": span.version, "tokens": span.end - span.start} for span in sample.spans],
        "finish_reason": sample.finish_reason,
        "tokens": len(sample.completion_ids),
    }


def _segments(sample: Sample, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the segments after the prompt, branch by branch; sampled ones have their token count and versions."""
    rows = []
    for number, branch in enumerate(sample.branches):
        for segment in branch.segments[number == 0 :]:
            row: dict[str, Any] = {"branch": number, "text": tokenizer.decode(segment.token_ids, skip_special=False)}
            if isinstance(segment, Completion):
                row |= {"tokens": len(segment.token_ids), "versions": [span.version for span in segment.spans]}
            rows.append(row)
    return rows


def describe_tokens(sample: Sample, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the text and the engine's log-prob of each of the first tokens, and the trainer's log-prob if known."""
    ids = sample.completion_ids[:DETAILED_TOKENS]
    trainer: list[float] = []
    for branch in sample.branches:
        if branch.trainer_log_probs is None:
            trainer = []
            break
        trainer += branch.trainer_log_probs.tolist()
    return {
        "token_texts": token_texts(ids, tokenizer),
        "log_probs": _rounded(sample.log_probs[: len(ids)]),
        "trainer_log_probs": _rounded(trainer[: len(ids)]),
    }


def _rounded(values: Sequence[float]) -> list[float | None]:
    return [round(value, 4) if math.isfinite(value) else None for value in values]


def token_texts(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    """Return what each token adds to the text; of the tokens that form one character, only the last adds it."""
    texts = []
    before = done = 0
    for end in range(1, len(ids) + 1):
        # Decode together with the preceding token: some decoders drop the leading space of the first one.
        text = tokenizer.decode(ids[before:end], skip_special=False)
        if text.endswith("�") and end - done < 4 and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(tokenizer.decode(ids[before:done], skip_special=False)) :])
        before, done = done, end
    return texts


def run_folder(path: str | Path) -> Path:
    """Return the path of a run's folder. Raises UserError if it does not exist."""
    if not Path(path).is_dir():
        raise UserError(f"there is no run folder {path}")
    return Path(path)


def check_rows(run_dir: Path) -> None:
    """Raise UserError if a row of a run that is to go on is damaged. Nothing is changed."""
    for name in (METRICS_FILE, COMPLETIONS_FILE):
        deque(JsonTail(run_dir / name, needs="step").read(), maxlen=0)


def cut_after(path: Path, step: int) -> None:
    """Drop the rows of later steps, and a line truncated by a kill, from a JSON-lines file. The rename is atomic."""
    if not path.is_file():
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(b"")
    with JsonLines(temporary, ensure_ascii=False) as file:
        for row in JsonTail(path, needs="step").read():
            if row["step"] <= step:
                file.write(row)
    os.replace(temporary, path)


class LogFile(logging.FileHandler):
    """Where it cannot be written any more this is said once, not with a traceback for every line: the console has them
    all, and what stops the run is that its records cannot be written."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            print(f"{self.baseFilename} cannot be written any more: {error}", file=sys.stderr, flush=True)


def set_up_logging(run_dir: Path, rank: int) -> None:
    """Log to stderr and to {run_dir}/logs/rank-N.log; libraries log only warnings and errors."""
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [
        logging.StreamHandler(),
        LogFile(folder / f"rank-{rank}.log", encoding="utf-8"),
    ]
    line = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
    log_to(handlers, logging.WARNING, line, "%H:%M:%S")
    handlers[1].setFormatter(SafeFormatter(line))  # files outlive the day
    logging.getLogger("torchtitan").setLevel(logging.INFO)
