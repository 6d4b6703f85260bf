"""mini-swe-agent, unmodified, repairs the generated bugs of examples/coding while faults strike: nothing may be lost.

    python benchmarks/coding_agent.py --json                 50 episodes; 10 agents and 2 actors are killed
    python benchmarks/coding_agent.py --quick --json         2 episodes; 1 agent and 1 actor are killed

The policy is a small random Qwen3 on two embedded actors whose tokens a script replaces when they are sampled
(tests/integration_tests/scripted_actor.py): it looks around, starts a command that hangs or leaves a process behind,
repairs the bug and submits. Meanwhile agents, their sandboxes and workers are killed, and actors at work; new versions
come. Episodes that failed for one of these are played again.

    episodes_lost        in all attempts
    rewards_missed       episodes whose reward is not 1
    turns_not_sampled    turns of trajectories that no actor has noted with this prompt, these tokens and log-probs
    unpublished_versions parts of them with another version than one of this run
    branches_too_many    an agent that never rewrites its history leaves one
    left_behind          processes, and entries of the folder for temporary files, after the end
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import psutil  # noqa: E402

from benchmarks import agent_faults, common  # noqa: E402
from examples.coding import tasks  # noqa: E402
from tests.chat_models import END, make_chat_model  # noqa: E402
from tests.gateways import Behind, make_config, playing  # noqa: E402
from tests.integration_tests.recording_actor import RECORD  # noqa: E402
from tests.integration_tests.scripted_actor import SCRIPT  # noqa: E402
from torchtitan.inference.pool import actor_process  # noqa: E402
from torchtitan.inference.types import GenerateRequest, Given  # noqa: E402
from torchtitan.rollout.conversation.tokenizer import Tokenizer  # noqa: E402
from torchtitan.rollout.environments.environment_pool import AgentPool  # noqa: E402
from torchtitan.rollout.flow.episodes import AgentPlayer  # noqa: E402
from torchtitan.rollout.types import Prompt, Trajectory  # noqa: E402
from torchtitan.utils.json_lines import EventLog  # noqa: E402

FIGURES = (
    "episodes_lost", "rewards_missed", "turns_not_sampled", "unpublished_versions", "branches_too_many", "left_behind",
)  # fmt: skip
BARS = dict.fromkeys(FIGURES, ("<=", 0.0))
AT_A_TIME, LENGTH = 4, 16384
# Of a process that a command of the agent leaves behind.
ASLEEP = f"sleep 86{os.getpid()}"
# Whom the faults kill, one after the other, by a part of its command line.
VICTIMS = ("minisweagent.run.mini", "bwrap", "examples.coding.play", "environments.agent_worker")
EPISODE_SECONDS, COMMAND_SECONDS, POLL_S = 240.0, 3, 0.1
Played = list[tuple[Prompt, list[Trajectory]]]


def turn(thought: str, command: str) -> str:
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"{thought}\n<tool_call>\n{call}\n</tool_call>"


def turns_for(row: dict[str, Any], number: int) -> list[str]:
    """What the policy says in an episode of a row; every third row has a command that hangs, the next one leaves a
    process behind."""
    path = f"{row['package']}/__init__.py"
    right = ast.unparse(ast.parse(tasks.code_of(row["package"]).read_text())) + "\n"
    before, after = (text.splitlines(keepends=True) for text in (tasks.repository(row)[path], right))
    patch = "".join(difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", n=1))
    disturbance = ([turn("I wait.", f"echo begun; {ASLEEP}")], [turn("I go on.", f"setsid {ASLEEP} >/dev/null 2>&1 &")])
    return [
        turn("I look around.", "git log --oneline; ls; python -m pytest -q 2>&1 | tail -n 1"),
        *(disturbance[number % 3] if number % 3 < 2 else []),
        turn("I repair it.", f"git apply <<'END'\n{patch}END\ngit diff --stat"),
        turn("I submit.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]


def have_actors_follow(script: list[Any], folder: Path) -> Path:
    """Have the actors that start from now on follow a script and note what they sample; returns the file."""
    real = actor_process.actor_command

    def command(*arguments: Any) -> list[str]:
        replaced = {"torchtitan.inference.engines.embedded": "tests.integration_tests.scripted_actor"}
        return [replaced.get(part, part) for part in real(*arguments)]

    actor_process.actor_command = command  # type: ignore[assignment]
    (folder / "script.json").write_text(json.dumps(script))
    os.environ[SCRIPT], os.environ[RECORD] = str(folder / "script.json"), str(folder / "record.jsonl")
    return folder / "record.jsonl"


async def kill_agents(kills: int, episodes: int) -> int:
    """Kill one after the other, spread over all episodes; returns how many when it is cancelled."""
    killed, seen = 0, set[int]()
    try:
        while killed < kills:
            commands = {process: " ".join(command_of(process)) for process in descendants()}
            seen |= {process.pid for process, command in commands.items() if "examples.coding.play" in command}
            found = [process for process, command in commands.items() if VICTIMS[killed % len(VICTIMS)] in command]
            if found and len(seen) > killed * episodes / kills:
                # In the midst of what it does.
                await asyncio.sleep(1.0)
                if found[0].is_running():
                    found[0].kill()
                    killed += 1
            await asyncio.sleep(POLL_S)
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        pass
    return killed


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has ended
        return []


def left_behind(folder: Path) -> list[str]:
    """Processes of agents, and files for temporary use."""
    marks = (ASLEEP, str(folder))
    texts = [" ".join(command_of(process)) for process in psutil.process_iter()]
    started = [" ".join(command_of(process)) for process in descendants()]
    return [text for text in texts if any(mark in text for mark in marks)] + started + os.listdir(folder / "tmp")


async def play(
    behind: Behind, rows: list[dict[str, Any]], group_size: int, kills: int
) -> tuple[Played, dict[str, Any]]:
    """Play a group of each row, with faults and new versions meanwhile; returns also what is to be told of it."""
    config, tokenizer = behind.config, Tokenizer(behind.config.model.hf_assets_path)
    pool = AgentPool(config, EventLog(behind.run_dir / "events.jsonl"), behind.run_dir / "agents.log")
    await pool.start()
    player = AgentPlayer(config, behind.gateway, pool, tokenizer)
    behind.sampling.n = group_size
    limit = asyncio.Semaphore(AT_A_TIME // group_size)
    prompts = [Prompt(index, row["prompt"], [1], row) for index, row in enumerate(rows)]

    async def group(prompt: Prompt) -> list[Trajectory]:
        async with limit:
            return await player.play(prompt, GenerateRequest(f"coding-{prompt.index}", [], behind.sampling), 0)

    async def versions() -> None:
        for number in itertools.count(1):
            while player.statistics["turns"] < number * 8:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            behind.trainer.publish()

    killing = asyncio.create_task(kill_agents(kills, len(rows) * behind.sampling.n))
    engines = asyncio.create_task(agent_faults.kill_actors(behind.pool, max(1, kills // 5)))
    publishing = asyncio.create_task(versions())
    try:
        played = await asyncio.gather(*map(group, prompts))
    finally:
        for task in (killing, engines, publishing):
            task.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        await pool.close()
    conditions = {
        "episodes": len(rows) * group_size,
        "agents killed": await killing,
        "actors killed": await engines,
        "episodes played again": player.statistics["episodes_redone"],
        "requests repeated": behind.pool.statistics["requests_redone"],
        "versions": behind.trainer.version + 1,
        "turns": sum(len(branch.sampled) for group in played for trajectory in group for branch in trajectory.branches),
    }
    return list(zip(prompts, played, strict=True)), {**conditions, "lost": player.statistics["episodes_lost"]}


def check(behind: Behind, played: Played, record: Path) -> dict[str, float]:
    """What is wrong with the trajectories."""
    noted = set()
    for line in record.read_text().splitlines():
        _, prompt, done = json.loads(line)
        noted.add((tuple(prompt), tuple(done["token_ids"]), tuple(done["log_probs"])))
    figures = dict.fromkeys(FIGURES, 0.0)
    known = {(behind.trainer.epoch, version) for version in range(behind.trainer.version + 1)}
    for trajectory in (episode for _, group in played for episode in group):
        figures["rewards_missed"] += trajectory.reward != 1.0
        figures["branches_too_many"] += len(trajectory.branches) - 1
        for branch in trajectory.branches:
            prefix: list[int] = []
            for segment in branch.segments:
                if not isinstance(segment, Given):
                    sampled = tuple(prefix), tuple(segment.token_ids), tuple(segment.log_probs)
                    figures["turns_not_sampled"] += sampled not in noted
                    figures["unpublished_versions"] += sum((s.epoch, s.version) not in known for s in segment.spans)
                prefix = prefix + segment.token_ids
    return figures


async def measure(folder: Path, group_size: int, episodes: int, kills: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Return (figures, conditions)."""
    rows = tasks.rows()[: episodes // group_size]
    for number, row in enumerate(rows):
        row["prompt"] += f" This is issue {number} of {len(rows)}."
    script = [[row["prompt"], turns_for(row, number)] for number, row in enumerate(rows)]
    record = have_actors_follow(script, folder)
    model = make_chat_model(folder / "model", taught=False, longest=LENGTH)
    config = make_config(model, num_actors=2, max_sequences=8)
    config.training.seq_len, config.rollout.max_completion_tokens = LENGTH, 2048
    environment = config.environment
    environment.agent = f"{sys.executable} -m examples.coding.play --command-seconds {COMMAND_SECONDS}"
    # Killing a worker kills what all its episodes are doing.
    environment.num_workers, environment.max_retries = 2, 5
    # The command isolates every episode; in bubblewrap, root could not start bubblewrap.
    environment.sandbox.isolate = False
    environment.episode_timeout_s, environment.sandbox.memory_limit_mb = EPISODE_SECONDS, 8192
    (folder / "tmp").mkdir()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    os.environ["TMPDIR"] = str(folder / "tmp")
    async with playing(config, folder / "run", END) as behind:
        played, conditions = await play(behind, rows, group_size, kills)
        figures = check(behind, played, record) | {"episodes_lost": float(conditions.pop("lost"))}
    left = left_behind(folder)
    return {**figures, "left_behind": float(len(left))}, conditions | ({"left": left} if left else {})


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--faults", type=int, default=10, help="agents that are killed, and an actor for five of them")
    arguments = parser.parse_args()
    size = (1, 2, 1) if arguments.quick else (2, arguments.episodes, arguments.faults)
    with tempfile.TemporaryDirectory() as folder:
        figures, conditions = asyncio.run(measure(Path(folder), *size))
    common.report("coding_agent", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
