"""The rows of a job, to train on and held out, checked against what its configuration needs of them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence, Sized
from typing import Any

from torchtitan.config.evaluations import sampled_dataset
from torchtitan.config.job_config import JobConfig
from torchtitan.config.reward_names import judging_reward
from torchtitan.config.teachers import hint_column
from torchtitan.errors import UserError
from torchtitan.rollout.conversation.messages import plain_message, plain_tools, read_chat
from torchtitan.rollout.conversation.results import settle_results
from torchtitan.rollout.conversation.tokenizer import ChatRenderer
from torchtitan.rollout.conversation.unwritten import warn_of_unread_keys
from torchtitan.rollout.data.own_code import columns_for_rewards, environment_call_problem, reward_call_problem
from torchtitan.rollout.data.rows import Row, hold_out, load_rows
from torchtitan.rollout.rewards import ARGUMENTS, NEEDS_ANSWER, is_built_in

logger = logging.getLogger(__name__)

# Where TRL looks for what belongs to a prompt and is not text.
IMAGE_COLUMNS = ("image", "images")


def load_datasets(config: JobConfig, renderer: ChatRenderer | None = None) -> tuple[list[Row], list[Row]]:
    """Return the training rows and the held-out rows of a job; `renderer` checks that the chat template suits them.

    An evaluation set with a dataset of its own has only those rows, as both. Of a source,
    the held-out rows are those of eval.dataset, or else rollout.held_out_fraction of the training data. The split
    depends only on the data, not on training.seed, so that runs with different seeds are compared on the same prompts.

    Raises:
        UserError: a file, column or package is missing, or a row is malformed.
    """
    rollout, evaluation = config.rollout, config.eval
    # Demonstrations need answers only if evaluations sample.
    trained_on = set(config.rewards.functions) if config.job.stage != "sft" else set()
    judging = {judging_reward(config)} if evaluation.is_used and config.has_engines else set()
    if sampled_dataset(config)[0] == "eval.dataset":
        held_out = _load_held_out(config, judging, renderer)
        return held_out, held_out
    rows = _with_chats(load_rows(rollout.dataset), config, rollout.dataset, "rollout.dataset")
    if renderer is not None and (config.environment.agent or any(is_chat(row, config) for row in rows)):
        renderer.warn_of_ends()
    # Without eval.dataset the rows serve both purposes, so they must suit both sets of functions.
    functions = trained_on if evaluation.dataset else trained_on | judging
    _check_rows(rows, config, rollout.dataset, "rollout.dataset", functions, renderer)
    if renderer is not None and not config.environment.uses_gateway:
        warn_of_unread_keys(_conversations(rows, config), renderer.tokenizer)
    if not evaluation.dataset:
        train, held_out = hold_out(rows, rollout.held_out_fraction, rollout.prompt_column)
        if not train:
            raise UserError(
                f"rollout.held_out_fraction = {rollout.held_out_fraction} leaves no training prompt of "
                f"the {len(rows)} rows of {rollout.dataset}"
            )
        return train, held_out
    return rows, _load_held_out(config, judging, renderer)


def _load_held_out(config: JobConfig, judging: set[str], renderer: ChatRenderer | None) -> list[Row]:
    dataset = config.eval.dataset
    rows = _with_chats(load_rows(dataset, split="test"), config, dataset, "eval.dataset")
    _check_rows(rows, config, dataset, "eval.dataset", judging, renderer)
    return rows


def is_chat(row: Row, config: JobConfig) -> bool:
    """Whether the chat template renders the row."""
    return config.rollout.chat_template or any(isinstance(row.get(column), list) for column in _chat_columns(config))


def _conversations(rows: Sequence[Row], config: JobConfig) -> Iterator[tuple[int, list[Any], list[dict[str, Any]]]]:
    """Yield (number, messages, tools) of every row with messages."""
    for number, row in enumerate(rows, start=1):
        chats = [row[column] for column in _chat_columns(config) if isinstance(row.get(column), list)]
        if chats:
            tools = [] if config.environment.is_used else plain_tools(row.get("tools"))
            yield number, [message for chat in chats for message in chat], tools


def _chat_columns(config: JobConfig) -> list[str]:
    return [config.rollout.prompt_column, *([config.sft.completion_column] if config.job.stage == "sft" else [])]


def _with_chats(rows: list[Row], config: JobConfig, dataset: str, key: str) -> list[Row]:
    """Return the rows with chats as lists also where a file stores them as JSON text. Raises UserError for text that is
    nearly that."""
    if config.environment.uses_gateway:  # an agent reads its task itself
        return rows
    read = []
    for number, row in enumerate(rows, start=1):
        chats = {}
        for column in _chat_columns(config):
            try:
                chats[column] = read_chat(row.get(column))
            except ValueError as error:
                raise UserError(f"{key} = {dataset!r}, row {number}, column {column!r}: {error}") from None
        changed = {column: chat for column, chat in chats.items() if chat is not row.get(column)}
        read.append(row | changed if changed else row)
    return read


def _check_rows(
    rows: Sequence[Row], config: JobConfig, dataset: str, key: str, functions: set[str], renderer: ChatRenderer | None
) -> None:
    """Check that every row has a usable prompt, and a reference answer if one of these reward functions needs it."""
    wanted = {config.rollout.prompt_column: "rollout.prompt_column"}
    if NEEDS_ANSWER & functions:
        wanted[config.rewards.answer_column] = "rewards.answer_column"
    if hint_column(config) and key == "rollout.dataset":
        wanted[hint_column(config)] = "distill.hint"
    # A function without a reference gives no reward; another one, or an environment, may.
    needs_value = bool(functions) and functions <= NEEDS_ANSWER and not config.environment.reward_name
    for number, row in enumerate(rows, start=1):
        for column, setting in wanted.items():
            if column not in row:
                there = ", ".join(map(repr, row)) or "none"
                raise UserError(
                    f"{key} = {dataset!r}, row {number}: no column {column!r} ({setting}); there are {there}"
                )
        if needs_value and row[config.rewards.answer_column] is None:
            raise UserError(
                f"{key} = {dataset!r}, row {number}: column {config.rewards.answer_column!r} (rewards.answer_column) "
                f"is null, but {', '.join(sorted(functions))} needs a reference: give one, or leave the row out"
            )
        prompt = row[config.rollout.prompt_column]
        if problem := _prompt_problem(prompt):
            raise UserError(f"{key} = {dataset!r}, row {number}, column {config.rollout.prompt_column!r}: {problem}")
        problem = None
        if config.job.stage == "sft":
            problem = _completion_problem(row, config)
        elif not config.environment.uses_gateway:
            problem = _ending_problem(prompt)
        if not problem and is_chat(row, config) and not config.environment.uses_gateway:
            problem = _tools_problem(row, config, renderer)
        if problem:
            raise UserError(f"{key} = {dataset!r}, row {number}: {problem}")
    _check_columns(rows, config, f"{key} = {dataset!r}", functions)
    if not config.environment.is_used:  # an environment or an agent gets the row, and may describe them
        _warn_of_images(rows, f"{key} = {dataset!r}")


def _warn_of_images(rows: Sequence[Row], where: str) -> None:
    for number, row in enumerate(rows, start=1):
        for column in IMAGE_COLUMNS:
            value = row.get(column)
            if value is not None and not (isinstance(value, Sized) and len(value) == 0):
                logger.warning(
                    "%s, row %d: the policy does not see column %r, because prompts are text only; leave such rows out "
                    "if they cannot be answered without it", where, number, column,
                )  # fmt: skip
                return


def _check_columns(rows: Sequence[Row], config: JobConfig, where: str, functions: set[str]) -> None:
    """Check the columns that reward functions get: their names, and the references."""
    column = config.rewards.answer_column
    names = {name for row in rows for name in row} - {config.rollout.prompt_column, column}
    custom_functions = {name for name in functions - {config.environment.reward_name, ""} if not is_built_in(name)}
    if custom_functions and (hidden := ARGUMENTS & names):
        raise UserError(
            f"{where}: a reward function would not see column{'s' if len(hidden) > 1 else ''} "
            f"{', '.join(map(repr, sorted(hidden)))}, because one of its arguments has that name: rename the column"
        )
    columns = columns_for_rewards(config, {name for row in rows for name in row})
    for function in sorted(custom_functions):
        if problem := reward_call_problem(function, columns, config.environment.is_used):
            raise UserError(f"{where}: {problem}")
    factory = config.environment.factory
    if factory and (problem := environment_call_problem(factory, columns | {config.rollout.prompt_column})):
        raise UserError(f"{where}: {problem}")
    if functions and column != "answer" and "answer" in names:
        logger.info(
            "%s: as `answer`, reward functions and environments get column %r (rewards.answer_column), not 'answer'",
            where, column,
        )  # fmt: skip
    if NEEDS_ANSWER & functions:
        # Its many patterns would be compiled in every process that imports this module.
        from torchtitan.rollout.rewards.references import check_references

        references = [row.get(column) for row in rows]
        of_column = f"{where}, column {column!r} (rewards.answer_column)"
        check_references(references, of_column, sorted(NEEDS_ANSWER & functions))


def _completion_problem(row: Row, config: JobConfig) -> str | None:
    prompt, column = row[config.rollout.prompt_column], config.sft.completion_column
    if row.get(column) is None:
        if isinstance(prompt, list) and any(message["role"] == "assistant" for message in prompt):
            return None
        there = ", ".join(map(repr, row))
        return f"no column {column!r} (sft.completion_column), and no chat with answers in it; there are {there}"
    if problem := _ending_problem(prompt):
        return f"{problem}, where column {column!r} begins"
    problem = _prompt_problem(row[column])
    return problem and f"column {column!r}: {problem}".replace("a prompt", "a completion").replace("the prompt", "it")


def _ending_problem(prompt: Any) -> str | None:
    if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
        return None
    return "the chat ends with the assistant's answer: a prompt must end before it"


def _tools_problem(row: Row, config: JobConfig, renderer: ChatRenderer | None) -> str | None:
    texts = (row[config.rollout.prompt_column], row.get(config.sft.completion_column))
    try:
        tools = [] if config.environment.is_used else plain_tools(row.get("tools"))
        if renderer is not None:
            chats = [text for text in texts if isinstance(text, list)]
            messages = [plain_message(message) for message in itertools.chain.from_iterable(chats)]
            renderer.refuse_unseen(renderer.readable(settle_results(messages), tools), tools)
    except (ValueError, UserError) as error:
        return str(error)
    return None


def _prompt_problem(prompt: Any) -> str | None:
    if prompt in ("", []):
        return "the prompt is empty"
    if isinstance(prompt, str):
        return None
    if isinstance(prompt, list):
        try:
            for message in prompt:
                plain_message(message)
        except ValueError as error:
            return str(error)
        return None
    return f"a prompt must be text or a list of chat messages, found {type(prompt).__name__}"
