"""Environments and tools: rollouts of several turns."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic.dataclasses import dataclass

from torchtitan.config.values import TABLE, Count, CountOrZero, Names, PathText, Positive, Range


@dataclass(config=TABLE)
class Environment:
    factory: str = ""
    """`package.module:Class` with reset(**row) and either step(action) or public methods as tools; empty: one turn"""

    tools: list[str] = field(default_factory=list)
    """Functions (`package.module:function`) that the policy may call as tools, with a factory or without"""

    agent: str = ""
    """A program with a loop of its own, which asks the policy through the gateway: `package.module:function` that gets
    base_url, key and row and returns a reward, or a command line"""

    verifiers: str = ""
    """The id of a verifiers taskset, which is played through the gateway in an environment of its own"""

    verifiers_harness: str = ""
    """The id of the harness that plays it; empty takes the taskset's own"""

    verifiers_renderer: str = "auto"
    """The renderer of the `renderers` package that makes tokens of its messages, such as qwen3"""

    verifiers_python: PathText = ""
    """Python that has verifiers; empty takes the environment that scripts/install_engine.sh made"""

    episode_timeout_s: Positive = 600.0
    """A whole episode of an agent may take so long"""

    tool_parser: Annotated[str, Names(("hermes",), own_function=True)] = "hermes"
    """How tool calls stand in a turn: JSON in <tool_call> tags, or a function from text to [(name, arguments)]"""

    max_turns: Count = 16
    """Turns of an episode; one that is not done by then is cut off (rollout.max_completion_tokens covers all turns)"""

    max_retries: CountOrZero = 2
    """An episode whose environment failed is begun again at most so often; then its group has one sample less"""

    num_workers: Count = 1
    """Environment worker processes; each has many episodes"""

    start_timeout_s: Positive = 30.0
    """Building and resetting an environment may take so long"""

    step_timeout_s: Positive = 10.0
    """One turn's step, or all its tool calls, may take so long"""

    memory_limit_mb: Annotated[int, Range(16)] = 2048
    """Address space that an environment worker may use beyond what it has at start"""
