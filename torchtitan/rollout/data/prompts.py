"""Prompts: the rows of a dataset, the held-out split, and what becomes of a row."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

from torchtitan.config.evaluations import sampled_dataset
from torchtitan.config.job_config import JobConfig
from torchtitan.config.reward_names import judging_reward
from torchtitan.config.source_configs import source_name
from torchtitan.config.teachers import hint_column
from torchtitan.errors import UserError, blaming, load_object
from torchtitan.models.shape.checkpoint_files import pointer_problem
from torchtitan.rollout.conversation.marks import plain
from torchtitan.rollout.conversation.messages import plain_message, plain_tools, read_chat
from torchtitan.rollout.conversation.results import settle_results
from torchtitan.rollout.conversation.tokenizer import ChatRenderer, Tokenizer
from torchtitan.rollout.conversation.turns import reader_of
from torchtitan.rollout.conversation.unwritten import warn_of_unread_keys
from torchtitan.rollout.data.own_code import columns_for_rewards, environment_call_problem, reward_call_problem
from torchtitan.rollout.environments import builtin_environments as builtin
from torchtitan.rollout.environments.agent_worker import FUNCTION
from torchtitan.rollout.rewards import ARGUMENTS, NEEDS_ANSWER, is_built_in
from torchtitan.rollout.types import Prompt

logger = logging.getLogger(__name__)

Row = dict[str, Any]

FILE_ENDINGS = (".jsonl", ".parquet")
# Endings of other files -> how people make a .jsonl or .parquet file of them.
CONVERSIONS = {
    ".csv": 'convert it: python -c "from pyarrow import csv, parquet; '
    "parquet.write_table(csv.read_csv('{name}'), '{stem}.parquet')\"",
    ".gz": "unpack it: gunzip {name}",
    ".json": "write one object of its list per line: jq -c '.[]' {name} > {stem}.jsonl",
}
LARGEST_OPERAND = 99
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


def load_rows(dataset: str, split: str = "train") -> list[Row]:
    """Return all rows of `dataset`: a built-in task, a .jsonl or .parquet path, those of a function
    `package.module:function`, or `owner/name` or `owner/name:config` on the Hugging Face Hub, with `split` unless the
    name ends with another one in brackets.

    Raises:
        UserError: the file is missing, empty or malformed, or the dataset cannot be loaded.
    """
    if dataset in BUILT_IN:
        return BUILT_IN[dataset]()
    if FUNCTION.fullmatch(dataset):
        function = load_object(dataset, "dataset")
        with blaming(dataset, "dataset"):  # while it returns, and while a generator yields
            made = function()
            rows: list[Row] = list(made) if isinstance(made, Iterable) else []
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise UserError(f"dataset {dataset!r} must return rows, each a dict of columns")
        return rows
    if problem := file_problem(dataset):
        raise UserError(f"dataset {dataset}: {problem}")
    if not dataset.endswith(FILE_ENDINGS):
        return _load_hugging_face(dataset, split)
    path = Path(dataset).expanduser()
    if not path.is_file():
        raise UserError(f"dataset file {path} does not exist (looked in {Path.cwd()})")
    rows = _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
    if not rows:
        raise UserError(f"dataset file {path} has no rows")
    return rows


def file_problem(dataset: str) -> str | None:
    """Return why a file of this name cannot be a dataset, and what to do; None for one that may be, or is missing, and
    for other names."""
    path = Path(dataset).expanduser()
    if not dataset.endswith(FILE_ENDINGS):
        ending = path.suffix.lower()
        how = f"rename it to {path.with_suffix(ending)}" if ending in FILE_ENDINGS else CONVERSIONS.get(ending)
        says = "a dataset file is .jsonl, with one JSON object per line, or .parquet: "
        return how and says + how.format(name=path, stem=path.with_suffix(""))
    if os.path.isdir(path):
        return "it is a folder, not a file"
    if os.path.exists(path):
        return pointer_problem(path) if os.path.isfile(path) else "it is not a regular file"
    return "it is a link to nothing, or to itself" if os.path.islink(path) else None


def arithmetic_rows() -> list[Row]:
    """Return the built-in task: two-digit addition, with the sum's digits reversed so that carries run left to right.

    The rows are all 5,050 pairs a <= b as {"prompt": "12+34=", "answer": "640"}, always in the same order.

    Operands are padded to two digits; the sum is padded to three and then reversed (12 + 34 = 046, reversed 640). Each
    pair appears in one order only, so that its mirror image cannot leak from training into evaluation.
    """
    return [
        {"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"[::-1]}
        for a in range(LARGEST_OPERAND + 1)
        for b in range(a, LARGEST_OPERAND + 1)
    ]


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


BUILT_IN: dict[str, Callable[[], list[Row]]] = {
    "arithmetic": arithmetic_rows,
    "calculator": builtin.calculator_rows,
    "guess": builtin.guess_rows,
}


def hold_out(
    rows: Sequence[Row], fraction: float, prompt_column: str = "prompt", seed: int = 0
) -> tuple[list[Row], list[Row]]:
    """Split rows into (training, held out), both in the order of `rows` and the same on every machine.

    `fraction` of the distinct prompts are held out; rows with the same prompt stay on the same side.
    """
    keys = [_prompt_key(row[prompt_column], seed) for row in rows]
    ordered = sorted(set(keys))
    held = set(ordered[: round(fraction * len(ordered))])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in held]
    return train, [row for row, key in zip(rows, keys, strict=True) if key in held]


def _prompt_key(prompt: Any, seed: int) -> bytes:
    text = json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=described)
    return hashlib.blake2b(f"{seed}:{text}".encode(errors="replace"), digest_size=16).digest()


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number}: expected a JSON object, found {type(row).__name__}")
            rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"{path}: parquet files need pyarrow, which is not installed (pip install pyarrow)") from None
    try:
        return parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}") from error


def split_of(dataset: str, usual: str) -> tuple[str, str]:
    """(the name without a split, the split) of a Hugging Face dataset such as openai/gsm8k:main[test]; `usual`: the
    split of a name without one."""
    name, _, split = dataset.removesuffix("]").partition("[")
    return name, split or usual


def _load_hugging_face(dataset: str, usual_split: str) -> list[Row]:
    whole, split = split_of(dataset, usual_split)
    name, _, subset = whole.partition(":")
    if Path(dataset).expanduser().is_file():
        raise UserError(f"dataset file {dataset} must end with {' or '.join(FILE_ENDINGS)}: convert it")
    try:
        import datasets

        loaded = datasets.load_dataset(name, subset or None, split=split)
    except Exception as error:  # the library raises many kinds: no network, no such name, split or subset
        raise UserError(f"Hugging Face dataset {dataset!r} (split {split!r}) cannot be loaded: {error}") from error
    return [dict(row) for row in loaded]


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


# The address in the default repr of an object, such as an image, which differs in every process.
ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")


class PromptMaker:
    """Makes Prompts from dataset rows; shared by training and evaluation.

    Reward functions see the prompt as it is in the dataset (text stays text), not as the chat template renders it.
    """

    def __init__(self, config: JobConfig, tokenizer: Tokenizer):
        self._rollout = config.rollout
        self._source = source_name(config)
        self._answer_column = config.rewards.answer_column
        self._hint_column, self._hint_template = hint_column(config), config.distill.hint_template
        self._tokenizer = tokenizer
        self.renderer = ChatRenderer(tokenizer, config.rollout.stop_token_ids)
        self.longest = config.training.seq_len - config.rollout.max_completion_tokens
        """Longest prompt, in tokens, that leaves room for a whole completion within training.seq_len"""
        self.limit = f"training.seq_len - rollout.max_completion_tokens = {self.longest}"
        self.tools: list[dict[str, Any]] = []
        """JSON schemas of the environment's tools, which chat templates write into prompts"""
        self._has_environment = config.environment.is_used
        if self._rollout.chat_template and not tokenizer.has_chat_template:
            raise UserError(
                "rollout.chat_template = true, but the checkpoint's tokenizer files hold no chat template: take an "
                "instruction-tuned checkpoint or set rollout.chat_template = false"
            )

    def make(self, row: dict[str, Any], index: int) -> Prompt:
        """Return the tokenised prompt of a row.

        Raises:
            UserError: the row has chat messages, but the tokenizer has no chat template.
        """
        content = row[self._rollout.prompt_column]
        tools = self._tools_of(row)
        token_ids = self._tokenise(content, tools)
        hint = row.get(self._hint_column) if self._hint_column else None
        hint_ids = None if hint is None else self._tokenise(self._with_hint(content, str(hint)), tools)
        return Prompt(
            index, content, token_ids, self._columns(row), self._prefill(token_ids), hint_ids, source=self._source
        )

    def _with_hint(self, content: str | list[dict[str, Any]], hint: str) -> str | list[dict[str, Any]]:
        last = content if isinstance(content, str) else plain_message(content[-1])
        text = last if isinstance(last, str) else str(last["content"] or "")
        # In one pass, because the texts may have braces of their own.
        parts = {"{prompt}": text, "{hint}": hint}
        text = re.sub(r"{prompt}|{hint}", lambda found: parts[found[0]], self._hint_template)
        return text if isinstance(last, str) else [*content[:-1], {**last, "content": text}]

    def extended(self, prompt: Prompt, text: str) -> list[int]:
        """Return the tokens of a prompt after an environment added `text` to its end, or to its last message."""
        if not text:
            return prompt.token_ids
        if isinstance(prompt.text, str) and not self._rollout.chat_template:
            return prompt.token_ids + self._tokenizer.encode_shielded(self._tokenizer.shield(text))
        messages = self._messages(prompt.text)
        last = messages[-1]
        messages[-1] = {**last, "content": f"{last['content']}{self._tokenizer.shield(text)}"}
        return self._render(messages, self.tools)

    def hinted(self, prompt: Prompt, opening: str, hint: str) -> list[int]:
        """Return the tokens of a prompt as a teacher with this hint reads it. opening: what an environment added to the
        prompt. Neither that nor the hint, which the policy may have written, can spell special tokens."""
        content, opening = prompt.text, self._tokenizer.shield(opening)
        if isinstance(content, str):
            content += opening
        elif opening:
            last = plain_message(content[-1])
            content = [*content[:-1], {**last, "content": f"{last['content'] or ''}{opening}"}]
        with_hint = self._with_hint(content, self._tokenizer.shield(hint))
        return self._tokenise(with_hint, self._tools_of(prompt.columns))

    def fits(self, prompt: Prompt) -> bool:
        return bool(prompt.token_ids) and self.length(prompt) <= self.longest

    def tokens(self, prompt: Prompt) -> set[int]:
        """Return all tokens that the model reads of it."""
        return {*prompt.token_ids, *(prompt.hint_ids or ())}

    def length(self, prompt: Prompt) -> int:
        """Return the number of tokens for which there must be room."""
        return max(len(prompt.token_ids), len(prompt.hint_ids or []))

    def _columns(self, row: dict[str, Any]) -> dict[str, Any]:
        columns = {name: value for name, value in row.items() if name != self._rollout.prompt_column}
        if self._answer_column in columns:
            columns["answer"] = columns[self._answer_column]
        return columns

    def _prefill(self, token_ids: list[int]) -> str:
        return plain(reader_of(self._tokenizer).opened(token_ids))

    def _tools_of(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the environment's tools; without an environment, those in the row's `tools` column, as in TRL."""
        return self.tools if self._has_environment else plain_tools(row.get("tools"))

    def _tokenise(self, content: str | list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        if isinstance(content, str) and not self._rollout.chat_template:
            return self._tokenizer.encode_prompt(content)
        return self._render(self._messages(content), tools)

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
        return self._tokenizer.apply_chat_template(self.renderer.readable(messages, tools), tools=tools)

    def _messages(self, content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        messages = settle_results([plain_message(message) for message in messages])
        if self._rollout.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._rollout.system_prompt})
        return messages


def first_held_out(rows: Sequence[dict[str, Any]], maker: PromptMaker, count: int) -> list[Prompt]:
    """Return the first `count` held-out prompts that fit, in an order that is the same in every run.

    Raises:
        UserError: there are rows, but none fits.
    """
    order = list(range(len(rows)))
    random.Random("held out").shuffle(order)
    prompts: list[Prompt] = []
    for index in order:
        if len(prompts) == count:
            break
        prompt = maker.make(rows[index], index)
        if maker.fits(prompt):
            prompts.append(prompt)
    if order and count and not prompts:
        raise none_fits(f"{len(order)} held-out prompts", maker)
    return prompts


def none_fits(what: str, maker: PromptMaker) -> UserError:
    """Return the error for prompts of which not one has an allowed length."""
    return UserError(
        f"none of the {what} has between 1 and {maker.longest} tokens ({maker.limit}): raise training.seq_len"
    )


def described(value: Any) -> str:
    """Return text for a value that JSON cannot represent, the same in every process."""
    return ADDRESS.sub("", str(value))
