"""Demonstrations as a source of batches, for job.stage = "sft".

Their batches have the same form as those of rollouts, with demonstrated tokens in place of sampled ones, so that the
rest of the pipeline is the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.config.optimizer_step import groups_per_batch
from torchtitan.config.source_configs import source_configs, source_weights
from torchtitan.errors import UserError
from torchtitan.inference.types import Branch, Completion, Given, add_turn, sampled_tokens
from torchtitan.rollout.conversation.messages import ASSISTANT, plain_message
from torchtitan.rollout.conversation.results import settle_results
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.conversation.unwritten import AnswerCheck
from torchtitan.rollout.data.job_rows import load_datasets
from torchtitan.rollout.data.prompt_stream import PromptStream, load_streams
from torchtitan.rollout.data.prompts import PromptMaker, first_held_out
from torchtitan.rollout.data.source_scheduler import SourceScheduler, in_turns
from torchtitan.rollout.data.unknown_text import check_unknown_text, refuse_surplus_tokens, vocabulary_of
from torchtitan.rollout.types import Batch, Group, Prompt, Sample


@dataclass
class Demonstration(Prompt):
    """A demonstrated conversation; as a Prompt, it is everything before the last demonstrated answer."""

    branches: list[Branch] = field(default_factory=list)


class DemonstrationMaker(PromptMaker):
    """Makes Demonstrations from dataset rows.

    A prompt and its completion are tokenised separately, as an engine sees them. The end token follows, because the
    policy must learn it. If a chat template drops parts of earlier turns (thoughts), each turn becomes a branch of its
    own.
    """

    def __init__(self, config: JobConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self._sft = config.sft
        self._answers = AnswerCheck(tokenizer, self.renderer)
        self.longest = config.training.seq_len
        self.limit = f"training.seq_len = {self.longest}"

    def make(self, row: dict[str, Any], index: int) -> Demonstration:
        """Return the demonstration of a row. Raises UserError for a row without one."""
        self.check(row, index)
        content: str | list[dict[str, Any]] = row[self._rollout.prompt_column]
        branches: list[Branch] = []
        if self._is_text(row):
            tokens = self._tokenizer.encode(row[self._sft.completion_column])
            ends = [place for place, token in enumerate(tokens) if token in self.renderer.stop_token_ids]
            answer = tokens[: ends[-1] + 1] if ends else tokens + self._tokenizer.eos_token_ids[:1]
            add_turn(branches, self._tokenise(content), _as_sampled(answer))
        else:
            content = self._add_chat(branches, row, index)
        if any(branch.sampled_at[:1] == [0] for branch in branches):
            raise UserError(f"demonstration {index}: no token stands before the answer, and so none predicts its first")
        last = branches[-1]
        asked = last.token_ids[: len(last) - len(last.sampled[-1].token_ids)]
        if self._sft.loss_on == "all":
            branches = [Branch([Given(branch.token_ids[:1]), _as_sampled(branch.token_ids[1:])]) for branch in branches]
        return Demonstration(
            index, content, asked, self._columns(row), self._prefill(asked), source=self._source, branches=branches
        )

    def check(self, row: dict[str, Any], index: int) -> None:
        """Raise UserError for a row that has no demonstration, or of whose answers a part would not be trained."""
        try:
            if self._is_text(row):
                if rest := self._answers.cut_off(row[self._sft.completion_column], behind_last=True):
                    raise UserError(f"the completion goes on behind the last token that ends a turn: {rest[:60]!r}")
                return
            messages, trained = self._conversation(row)
            for i in trained:
                self._answers.refuse_unwritten(messages[:i], messages[i], self._tools_of(row))
        except UserError as error:
            raise UserError(f"demonstration {index}: {error}") from error

    def fits(self, prompt: Prompt) -> bool:
        assert isinstance(prompt, Demonstration)
        return all(len(branch) <= self.longest for branch in prompt.branches)

    def tokens(self, prompt: Prompt) -> set[int]:
        assert isinstance(prompt, Demonstration)
        return {token for branch in prompt.branches for token in branch.token_ids}

    def length(self, prompt: Prompt) -> int:
        assert isinstance(prompt, Demonstration)
        return max(len(branch) for branch in prompt.branches)

    def _is_text(self, row: dict[str, Any]) -> bool:
        """Whether no chat template renders the row."""
        columns = (self._rollout.prompt_column, self._sft.completion_column)
        return not self._rollout.chat_template and all(isinstance(row.get(column), str) for column in columns)

    def _conversation(self, row: dict[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the messages of a row, and the places of those that are trained: the answers, or those of the
        completion, without what the flags `weight` and `train` exclude."""
        completion = row.get(self._sft.completion_column)
        messages = self._messages(row[self._rollout.prompt_column])
        given = 0 if completion is None else len(messages)
        if completion is not None:
            answers_given = [{"role": ASSISTANT, "content": completion}] if isinstance(completion, str) else completion
            messages = settle_results([*messages, *(plain_message(message) for message in answers_given)])
        # A greeting that opens a conversation is not trained, because it answers nothing.
        answers = [i for i in range(max(given, 1), len(messages)) if messages[i]["role"] == ASSISTANT]
        if not answers:
            raise UserError("the assistant says nothing in it (sft.completion_column)")
        trained = [i for i in answers if _is_trained(messages[i])]
        if not trained:
            raise UserError("weight = 0 or train = false excludes every answer in it: leave the row out")
        if self._sft.loss_on == "all" and len(trained) < len(answers):
            raise UserError('weight = 0 or train = false excludes an answer, but sft.loss_on = "all" trains all tokens')
        return messages, trained

    def _add_chat(self, branches: list[Branch], row: dict[str, Any], index: int) -> list[dict[str, Any]]:
        """Add the branches of a conversation; return the messages before the last one that is trained."""
        messages, trained = self._conversation(row)
        tools = self._tools_of(row)
        for i in trained:
            if (turn := self.renderer.answered(messages[:i], messages[i], tools)) is None:
                prompt = self._tokenizer.render_chat(messages[:i], tools=tools)
                raise UserError(
                    f"demonstration {index}: the chat template does not put the answer after its generation prompt "
                    f"({prompt[-40:]!r}): begin the answers with the end of that prompt, or use another template"
                )
            add_turn(branches, turn[0], _as_sampled(turn[1]))
        return messages[: trained[-1]]


def _is_trained(message: dict[str, Any]) -> bool:
    """Whether the flags of a message, as OpenAI's and others' files have them, leave it to be trained."""
    for flag in ("weight", "train"):
        if message.get(flag, 1) not in (0, 1):  # also false, true and 1.0
            raise UserError(f"{flag} = {message[flag]!r} of a message must be 0 or 1, false or true")
    return bool(message.get("weight", 1) and message.get("train", 1))


def _as_sampled(token_ids: list[int]) -> Completion:
    """Return tokens as a completion with NaN log-probs, because the policy that wrote them is unknown."""
    return Completion(token_ids, [math.nan] * len(token_ids), "stop", [])


class Demonstrations:
    """Hands out batches of demonstrations, as RolloutFlow hands out generated ones."""

    def __init__(self, config: JobConfig, tokenizer: Tokenizer, ranks: int):
        """Raises UserError for a dataset or tokenizer that does not fit the configuration."""
        self._streams: dict[str, PromptStream] = {}
        self._held_out: list[Prompt] = []
        counts = []
        for name, source_config in source_configs(config):
            maker = DemonstrationMaker(source_config, tokenizer)
            rows, held_out = load_datasets(source_config, maker.renderer)
            check_unknown_text(rows, source_config, tokenizer)
            for index, row in enumerate([*rows, *held_out]):
                maker.check(row, index)
            refuse_surplus_tokens([*rows, *held_out], maker, vocabulary_of(source_config))
            seed, shuffle = config.training.seed, source_config.rollout.shuffles
            self._streams[name] = PromptStream(rows, maker, seed, shuffle)
            self._held_out += first_held_out(held_out, maker, config.eval.num_prompts)
            counts.append(len(rows))
        self._size, self._rows = groups_per_batch(config), sum(counts)
        self._scheduler = SourceScheduler(source_weights(config, counts), self._size)
        epochs = config.sft.epochs
        self.steps = math.ceil(epochs * self._rows / self._size) if epochs else config.training.steps
        """Steps of the whole run"""

    def next_batch(self, version: int) -> Batch:
        """Return the batch to train on at `version`. Raises UserError if no row fits."""
        counts = {name: self._scheduler.upcoming(name, 1)[0] for name in self._streams}
        shares: list[list[Prompt]] = []
        for name, stream in self._streams.items():
            shares.append([stream.next() for _ in range(counts[name])])
        self._scheduler.served(counts)
        batch = self._batch(version, in_turns(shares))
        lengths = [sampled_tokens(sample.branches) for sample in batch.samples]
        batch.statistics = {
            "completion/length_mean": sum(lengths) / len(lengths),
            "demonstrations/epoch": sum(stream.position for stream in self._streams.values()) / self._rows,
            "demonstrations/too_long": float(sum(stream.dropped for stream in self._streams.values())),
        }
        return batch

    def held_out(self) -> Batch:
        """Return the held-out demonstrations, for the evaluation loss; the batch may have no groups."""
        return self._batch(0, self._held_out)

    def export_state(self) -> bytes:
        """Return the position in the rows, for a checkpoint between two steps."""
        streams = {name: stream.state_dict() for name, stream in self._streams.items()}
        return json.dumps({"streams": streams, "mix": self._scheduler.state_dict()}).encode()

    def restore_state(self, data: bytes) -> None:
        """Continue from an exported state. Raises UserError if the rows are not those of the state."""
        state = json.loads(data)
        load_streams(state, self._streams)
        self._scheduler.load_state_dict(state.get("mix", self._scheduler.state_dict()))

    def _batch(self, version: int, prompts: Sequence[Prompt]) -> Batch:
        groups = []
        for prompt in prompts:
            assert isinstance(prompt, Demonstration)
            groups.append(Group(prompt.index, [Sample(prompt.branches, "stop", 0.0)], prompt.source))
        return Batch(version, groups)
