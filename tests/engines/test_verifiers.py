"""A verifiers environment with a tool, unmodified, as what a run trains on."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.chat_models import make_chat_model, teach
from tests.processes import ROOT, Processes
from tests.runs import RUN_SECONDS, Run
from torchtitan.inference.trajectory import Given
from torchtitan.rollout.journal import ReplaySource
from torchtitan.rollout.tokenizer import Tokenizer

EXAMPLES = ROOT / "examples" / "verifiers"
STEPS = 20
# With verifiers' own renderer: what the policy is to say, and what it is going to be shown.
RENDER = """
import json, sys
from renderers import create_renderer
from renderers.configs import Qwen3RendererConfig
from transformers import AutoTokenizer
from weather_env import TOOL, WEATHER
renderer = create_renderer(AutoTokenizer.from_pretrained(sys.argv[1]), Qwen3RendererConfig())
for city, weather in WEATHER.items():
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    messages = [
        {"role": "user", "content": f"Weather in {city}?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": weather},
    ]
    said = renderer.render([*messages, {"role": "assistant", "content": f"It is {weather}."}], tools=[TOOL["function"]])
    print(json.dumps(said.token_ids))
"""


@pytest.mark.slow
@pytest.mark.timeout(RUN_SECONDS)
def test_a_run_trains_on_a_verifiers_environment(verifiers_python: Path, processes: Processes, tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", taught=False)
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES), "HF_HUB_OFFLINE": "1"}
    rendered = subprocess.run(
        [verifiers_python, "-c", RENDER, model], env=environment, capture_output=True, text=True, timeout=120
    )
    assert rendered.returncode == 0, rendered.stderr
    teach(model, [json.loads(line) for line in rendered.stdout.splitlines()], 200)
    options: list[Any] = [
        "--environment.verifiers", "weather_env", "--environment.verifiers_renderer", "qwen3",
        "--environment.verifiers_python", verifiers_python, "--environment.memory_limit_mb", "8192",
        "--environment.start_timeout_s", "60",
        "--rewards.functions", "--training.steps", str(STEPS), "--training.global_batch_size", "8",
        "--training.seq_len", "1024", "--grpo.group_size", "4", "--grpo.drop_zero_variance", "false",
        "--rollout.max_completion_tokens", "128", "--inference.num_actors", "1", "--eval.enable", "false",
    ]  # fmt: skip
    run = Run(processes, "debug_cpu", model, tmp_path / "run", *options, PYTHONPATH=f"{ROOT}:{EXAMPLES}")
    run.end()
    steps = run.steps()
    assert len(steps) == STEPS, run.log()[-3000:]
    print([round(step["reward/mean"], 3) for step in steps])
    # It calls the tool and says what that said.
    assert sum(step["reward/mean"] for step in steps) / STEPS > 1.0
    same = [step["mismatch_kl/same_version"] for step in steps if step["mismatch_kl/same_version"] is not None]
    assert same and max(same) < 1e-6
    tokenizer, recorded = Tokenizer(model), ReplaySource(run.folder)
    samples = [sample for version in recorded.versions for sample in recorded.next_batch(version).samples]
    turns = [one for sample in samples for branch in sample.branches for one in branch.segments]
    # What the tool said was given, never trained.
    given = [tokenizer.decode(one.token_ids, skip_special=False) for one in turns if isinstance(one, Given)]
    assert sum("<tool_response>" in text for text in given) > len(samples) / 2
    assert {span.version for sample in samples for span in sample.spans} >= set(range(STEPS - 3))
