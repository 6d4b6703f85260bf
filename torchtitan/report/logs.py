"""Logging of a rank: its console lines, and a file in the run folder."""

from __future__ import annotations

import logging
from pathlib import Path


def set_up_logging(run_dir: Path, rank: int) -> None:
    """Log to stderr and to {run_dir}/logs/rank-N.log; libraries only from warnings on."""
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    formatter = logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", datefmt="%H:%M:%S")
    handlers: list[logging.Handler] = [
        logging.StreamHandler(),
        logging.FileHandler(folder / f"rank-{rank}.log", encoding="utf-8"),
    ]
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    logging.getLogger("torchtitan").setLevel(logging.INFO)
