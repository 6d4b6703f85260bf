"""Prompts, sampling, rewards, environments and evaluation."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.values import (
    TABLE,
    Column,
    Count,
    CountOrZero,
    Names,
    Options,
    PathText,
    Positive,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    Weights,
)


@dataclass(config=TABLE)
class Rollout:
    dataset: PathText = "arithmetic"
    """`arithmetic`, `guess` or `calculator` (built in), a .jsonl or .parquet file, or a Hugging Face dataset name
    (needs the `data` extra)"""

    dataset_split: str = "train"
    """Split of a Hugging Face dataset"""

    prompt_column: Column = "prompt"
    """Column that holds the prompt: text, or a list of chat messages"""

    chat_template: bool = False
    """Wrap prompts in the tokenizer's chat template"""

    system_prompt: str = ""
    """System message in front of every prompt (chat_template only)"""

    chat_template_kwargs: Options = field(default_factory=dict)
    """Variables of the chat template, wherever one is applied: {enable_thinking = false} (Qwen3)"""

    shuffle: bool = True
    """Shuffle the prompts anew in every pass, from training.seed"""

    held_out_fraction: ShareBelowOne = 0.1
    """Share of the dataset kept out of training for evaluation, where [eval] names no dataset of its own"""

    max_completion_tokens: Count = 1024
    """Longest completion"""

    temperature: Positive = 1.0
    """Sampling temperature; the trainer's log-probs use the same"""

    top_p: ShareAboveZero = 1.0
    """Nucleus sampling; 1 turns it off"""

    top_k: CountOrZero = 0
    """Sample from the k most likely tokens; 0 turns it off"""

    min_p: ShareBelowOne = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 turns it off"""

    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a completion, besides the end tokens of the checkpoint"""

    max_staleness: Annotated[int, Range(0, 8)] = 2
    """A sample is admitted if trainer version − its oldest token's version is at most this; 0 to 8"""

    gate_on: Literal["oldest", "mean"] = "oldest"
    """Which token version the staleness gate looks at"""

    max_groups_in_flight: CountOrZero = 0
    """Groups being generated or waiting for the trainer; 0 derives it from the batch and max_staleness"""

    data_timeout_s: Positive = 600.0
    """The run stops with a message when no completion arrived for this long"""

    replay: PathText = ""
    """Run folder whose recorded rollouts are trained on, without actors"""


@dataclass(config=TABLE)
class Rewards:
    functions: list[str] = field(default_factory=lambda: ["arithmetic"])
    """Built-in names or `package.module:function`, each with TRL's call convention"""

    weights: Weights = field(default_factory=list)
    """One weight per function; empty means 1 each"""

    answer_column: Column = "answer"
    """Column that holds the reference answer; passed to the functions under this name and as `answer`"""

    num_workers: Count = 1
    """Reward worker processes; async functions have one more"""

    async_calls: Count = 16
    """Calls of async functions, each over one group, that run side by side"""

    timeout_s: Positive = 10.0
    """A reward call over one group's completions is cut off after this time"""

    memory_limit_mb: Annotated[int, Range(16)] = 2048
    """Address space that a reward worker may use beyond what it has at start"""

    isolate: bool = False
    """Run the functions without a network, without a view of other processes, and with files that they can only read
    (Linux: bubblewrap, or user namespaces)"""


@dataclass(config=TABLE)
class Eval:
    enable: bool = True
    """Evaluate on held-out prompts before the first step, periodically and at the end"""

    interval: CountOrZero = 100
    """Steps between two evaluations; 0 evaluates only before the first step and at the end"""

    dataset: PathText = ""
    """Held-out prompts: a file or dataset name; empty takes the held-out share of rollout.dataset"""

    dataset_split: str = "test"
    """Split of eval.dataset where that is a Hugging Face dataset"""

    num_prompts: Count = 128
    """Prompts per evaluation"""

    samples_per_prompt: Count = 4
    """Sampled completions per prompt"""

    pass_at_k: list[int] = field(default_factory=lambda: [1, 4])
    """k of the reported pass@k, besides 1; each at most samples_per_prompt"""

    temperature: Positive = 1.0
    """Sampling temperature of pass@k"""

    greedy: bool = True
    """Report greedy accuracy beside it"""

    reward_function: str = ""
    """Reward that decides: a sample passes at 1.0; empty takes the first of rewards.functions"""

    stop_at: Share = 0.0
    """The run ends, as after its last step, with the first evaluation whose pass@1 is at least this; 0: never"""

    timeout_s: Positive = 300.0
    """Deadline of one evaluation; when it passes the evaluation is logged as missing and training goes on"""


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
