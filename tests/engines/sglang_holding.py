"""A plugin of SGLang for tests: its second tensor-parallel worker does not begin to read files while a file exists."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "TORCHTITAN_TEST_HOLD"
GROUP, FUNCTION = "sglang.srt.plugins", "tests.engines.sglang_holding:plug_in"


def plug_in() -> None:
    """Called in each of SGLang's processes."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    hold = Path(os.environ[VARIABLE])
    update = WeightUpdater.update_weights_from_disk

    def held(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.tp_rank == 1 and hold.exists():
            hold.with_suffix(".begun").touch()
            while hold.exists():
                time.sleep(0.02)
        return update(self, *arguments, **named)

    WeightUpdater.update_weights_from_disk = held
