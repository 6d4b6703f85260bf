"""The embedded engine's actor, which notes all that it has sampled in the file that RECORD names."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from torchtitan.inference.engines.embedded.__main__ import main
from torchtitan.inference.engines.embedded.server import EngineServer
from torchtitan.inference.types import Completion, GenerateRequest

RECORD = "TORCHTITAN_TEST_RECORD"
_run = EngineServer._run


async def _recorded(self: EngineServer, request: GenerateRequest) -> list[Completion]:
    completions = await _run(self, request)
    _note(request, completions)
    return completions


def _note(request: GenerateRequest, completions: list[Completion]) -> None:
    lines = [json.dumps([request.request_id, request.prompt_ids, sample.to_json()]) + "\n" for sample in completions]
    # In one write, so that actors which note in the same file do not mix their lines.
    with Path(os.environ[RECORD]).open("ab", buffering=0) as file:
        file.write("".join(lines).encode())


if __name__ == "__main__":
    # Only in a process of its own: the tests import this module for RECORD.
    EngineServer._run = _recorded  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
