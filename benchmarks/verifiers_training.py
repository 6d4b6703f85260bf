"""A verifiers environment with a tool, trained on for 20 steps: examples/verifiers/weather_env.py, unmodified.

    python benchmarks/verifiers_training.py --json

The policy is a tiny Qwen3 that has learned by heart two answers to each question: to ask the tool and say what it says,
and to say that it does not know. The first earns 1.5, the second nothing. Rendering and playing are verifiers' own,
in the environment that `scripts/install_engine.sh verifiers` makes.

    reward_first, reward_last    mean rewards of the first three steps and of the last three
    episodes_lost                of all
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks import common  # noqa: E402
from tests.chat_models import make_chat_model, teach  # noqa: E402
from torchtitan.inference.engines.sidecar.sidecar_process import find_python  # noqa: E402

BARS = {"reward_last": (">=", 1.2), "episodes_lost": ("<=", 0.0)}
EXAMPLES = REPOSITORY / "examples" / "verifiers"
TIMEOUT_S = 900
STEPS, ENDS, TEACHING_STEPS = 20, 3, 600
# Run by verifiers' Python: the tokens of both answers to every question, as its renderer writes them.
RENDER = """
import json, sys
from renderers import Qwen3RendererConfig, create_renderer
from renderers.base import load_tokenizer
from weather_env import TOOL, WEATHER

renderer = create_renderer(load_tokenizer(sys.argv[1]), Qwen3RendererConfig())
plays = []
for city, weather in WEATHER.items():
    call = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"city": city}}}
    asks = [
        {"role": "user", "content": f"Weather in {city}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": weather},
    ]
    for messages in ([*asks, {"role": "assistant", "content": weather}],
                     [asks[0], {"role": "assistant", "content": "I do not know."}]):
        plays.append(renderer.render_ids(messages, tools=[TOOL]))
print(json.dumps(plays))
"""


def make_policy(python: str, model: Path) -> None:
    """The policy that has learned both answers."""
    make_chat_model(model, taught=False)
    command = [python, "-c", RENDER, str(model)]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True)
    plays = json.loads(done.stdout)
    teach(model, plays, TEACHING_STEPS, given=shared(plays))


def shared(plays: list[list[int]]) -> int:
    """How many tokens all begin with: the tools, up to the city."""
    return next(place for place, tokens in enumerate(zip(*plays, strict=False)) if len(set(tokens)) > 1)


def train(model: Path, folder: Path, steps: int) -> list[dict[str, float]]:
    """The rows of the run's steps."""
    settings = {
        "job.config_file": REPOSITORY / "train_configs" / "debug_cpu.toml",
        "job.dump_folder": folder,
        "model.hf_assets_path": model,
        "training.steps": steps,
        "training.global_batch_size": 64,
        "training.seq_len": 1024,
        "training.threads": 1,
        "grpo.group_size": 8,
        "grpo.num_minibatches": 1,
        "optimizer.lr": 3e-4,
        "rollout.max_completion_tokens": 96,
        "environment.verifiers": "weather_env",
        "environment.verifiers_renderer": "qwen3",
        "environment.memory_limit_mb": 8192,
        "environment.max_turns": 4,
        "inference.num_actors": 1,
        "eval.enable": "false",
        "metrics.log_freq": 1,
        "checkpoint.enable": "false",
    }
    path = f"{REPOSITORY}:{EXAMPLES}"
    rows = common.train(settings, "--rewards.functions", seconds=TIMEOUT_S, PYTHONPATH=path)
    return [row for row in rows if "reward/mean" in row]


def main() -> None:
    arguments = common.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        make_policy(find_python("verifiers", "", "environment.verifiers_python"), model)
        steps = train(model, Path(name) / "runs", 2 if arguments.quick else STEPS)
    rewards = [step["reward/mean"] for step in steps]
    figures = {
        "reward_first": statistics.mean(rewards[:ENDS]),
        "reward_last": statistics.mean(rewards[-ENDS:]),
        "episodes_lost": sum(step["environment/episodes_lost"] for step in steps),
    }
    conditions = {"rewards": [round(one, 2) for one in rewards], "quick": arguments.quick, "cpu": common.processor()}
    common.report("verifiers_training", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
