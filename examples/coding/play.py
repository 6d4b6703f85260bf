"""An episode: mini-swe-agent, unmodified and with its own prompt, repairs a bug. The reward is 1 if hidden tests pass.

train_configs/coding_cpu.toml runs this as its agent: the row comes on standard input, the gateway's address and key are
in the environment, and the last line of output is the reward.
"""

import argparse
import asyncio
import ctypes
import json
import os
import signal
import sys
from urllib.parse import urlsplit

from examples.coding import sandbox, tasks

PR_SET_PDEATHSIG = 1


async def play(row, base_url, key, options):
    """Return the reward of one episode. Raises RuntimeError if the agent was killed."""
    python = sandbox.agent_python()
    url = urlsplit(base_url)
    variables = {
        "OPENAI_API_KEY": key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/settings",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
        "MSWEA_SILENT_STARTUP": "1",
    }
    command = [
        "python", "-m", "minisweagent.run.mini", "--model", "openai/policy", "--yolo", "--exit-immediately",
        "--cost-limit", "0", "--task", row["prompt"], "--output", "/tmp/trajectory.json",
        "--config", options.config, "--config", f"agent.step_limit={options.steps}",
        "--config", f"environment.timeout={options.command_seconds}",
        *(["--model-class", "litellm_textbased"] if options.text else []),
    ]  # fmt: skip
    kept, files = f"{row['package']}/**/*.py", tasks.repository(row)
    gateway = url.hostname, url.port
    done = await sandbox.run(python, files, command, kept, git=True, variables=variables, gateway=gateway)
    # Its other exit codes are those of an agent that gave up, with the conversation too long, say.
    if done.code < 0:
        raise RuntimeError(f"the agent was killed by signal {-done.code}")
    return float(await tasks.solved(row["package"], done.files, python))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="mini.yaml", help="mini-swe-agent's, with its prompt")
    parser.add_argument("--text", action="store_true", help="commands stand in the text, and are no calls of a tool")
    parser.add_argument("--steps", type=int, default=24, help="calls of the policy")
    parser.add_argument("--command-seconds", type=int, default=30, help="that one of the agent's commands may take")
    options = parser.parse_args()
    # End with the worker that started this, and the sandbox with this.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    row, url, key = json.loads(sys.stdin.readline()), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    print(asyncio.run(play(row, url, key, options)))


if __name__ == "__main__":
    main()
