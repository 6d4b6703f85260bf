"""Who a job is: an epoch per launch, written down before it is used, and a secret per job."""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path


def mint_epoch(run_dir: Path) -> str:
    """A new epoch, durable before it is returned: two launches, even of one checkpoint, never share one."""
    folder = run_dir / "weight_sync"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "epochs.jsonl"
    launches = len(path.read_text().splitlines()) if path.exists() else 0
    epoch = f"{launches + 1}-{secrets.token_hex(4)}"
    with path.open("a") as file:
        file.write(json.dumps({"epoch": epoch, "time": time.time()}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return epoch


def new_token() -> str:
    """A secret for the job's own connections."""
    return secrets.token_urlsafe(32)
