"""Demonstrations as a source of batches, for job.stage = "sft".

They are batches of the same samples that rollouts make, with what is demonstrated in the place of what is sampled, so
that everything behind them is the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config.derived import global_batch_size
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.types import Branch, Completion, Given, add_turn
from torchtitan.rollout.prompts import PromptMaker, PromptStream, first_held_out, load_datasets
from torchtitan.rollout.tokenizer import Tokenizer, plain_message
from torchtitan.rollout.types import Batch, Group, Prompt, Sample

ASSISTANT = "assistant"


@dataclass
class Demonstration(Prompt):
    """A prompt with what is to be said: the prompt is what stands before the last thing that is."""

    branches: list[Branch] = field(default_factory=list)


class DemonstrationMaker(PromptMaker):
    """Makes Demonstrations of dataset rows.

    A prompt and its completion are tokenised by themselves, as an engine sees them, and the end token follows, which
    the policy is to learn. Where a chat template leaves out of a conversation's past what it has written before
    (thoughts), each turn becomes a branch of its own.
    """

    def __init__(self, config: JobConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self._sft = config.sft
        self._end = tokenizer.eos_token_ids[:1]
        self._stops = {*tokenizer.eos_token_ids, *config.rollout.stop_token_ids}
        self.longest = config.training.seq_len
        self.limit = f"training.seq_len = {self.longest}"

    def make(self, row: dict[str, Any], index: int) -> Demonstration:
        """The demonstration of a row. Raises UserError for a row that holds none."""
        content, completion = row[self._rollout.prompt_column], row.get(self._sft.completion_column)
        branches: list[Branch] = []
        if isinstance(content, str) and isinstance(completion, str) and not self._rollout.chat_template:
            add_turn(branches, self._tokenise(content), self._said(completion))
        else:
            content = self._add_chat(branches, content, completion, index)
        last = branches[-1]
        asked = last.token_ids[: len(last) - len(last.sampled[-1].token_ids)]
        if self._sft.loss_on == "all":
            branches = [Branch([Given(one.token_ids[:1]), _as_sampled(one.token_ids[1:])]) for one in branches]
        return Demonstration(index, content, asked, self._columns(row), self._prefill(asked), branches)

    def fits(self, prompt: Prompt) -> bool:
        assert isinstance(prompt, Demonstration)
        return all(len(branch) <= self.longest for branch in prompt.branches)

    def length(self, prompt: Prompt) -> int:
        assert isinstance(prompt, Demonstration)
        return max(len(branch) for branch in prompt.branches)

    def _add_chat(self, branches: list[Branch], content: Any, completion: Any, index: int) -> list[dict[str, Any]]:
        """Add the branches of a conversation; returns the messages before the last one that is trained."""
        messages = self._messages(content)
        given = 0 if completion is None else len(messages)
        if completion is not None:
            said = [{"role": ASSISTANT, "content": completion}] if isinstance(completion, str) else completion
            messages += [plain_message(message) for message in said]
        trained = [i for i in range(given, len(messages)) if messages[i]["role"] == ASSISTANT]
        if not trained:
            raise UserError(f"demonstration {index}: the assistant says nothing in it (sft.completion_column)")
        for i in trained:
            before = self._tokenizer.render_chat(messages[:i], tools=self.tools)
            whole = self._tokenizer.render_chat(messages[: i + 1], add_generation_prompt=False, tools=self.tools)
            if not whole.startswith(before):
                raise UserError(
                    f"demonstration {index}: the chat template does not write the answer behind what it writes to ask "
                    f"for one ({before[-40:]!r}): begin the answers as that ends, or take another template"
                )
            add_turn(branches, self._tokenizer.encode_shielded(before), self._said(whole[len(before) :]))
        return messages[: trained[-1]]

    def _said(self, text: str) -> Completion:
        """Text of the policy's up to the token that ends it, as the template or the row has written it, or the end
        token."""
        tokens = self._tokenizer.encode_shielded(text)
        ends = [place for place, token in enumerate(tokens) if token in self._stops]
        return _as_sampled(tokens[: ends[-1] + 1] if ends else tokens + self._end)


def _as_sampled(token_ids: list[int]) -> Completion:
    """Nothing is known of the policy that has said it."""
    return Completion(token_ids, [math.nan] * len(token_ids), "stop", [])


class Demonstrations:
    """Hands out batches of demonstrations, as RolloutFlow does those that are generated."""

    def __init__(self, config: JobConfig, tokenizer: Tokenizer, ranks: int):
        """Raises UserError for a dataset or tokenizer that does not fit the configuration."""
        rows, self._held_out = load_datasets(config)
        self._config, self._maker = config, DemonstrationMaker(config, tokenizer)
        self._stream = PromptStream(rows, self._maker, config.training.seed, config.rollout.shuffle)
        self._size, self._rows = global_batch_size(config, ranks), len(rows)
        epochs = config.sft.epochs
        self.steps = math.ceil(epochs * self._rows / self._size) if epochs else config.training.steps
        """Of the whole run"""

    def next_batch(self, version: int) -> Batch:
        """The batch to train on at `version`. Raises UserError where no row fits."""
        batch = self._batch(version, [self._stream.next() for _ in range(self._size)])
        lengths = [len(sample.completion_ids) for sample in batch.samples]
        batch.statistics = {
            "completion/length_mean": sum(lengths) / len(lengths),
            "demonstrations/epoch": (batch.groups[-1].prompt_index + 1) / self._rows,
            "demonstrations/too_long": float(self._stream.dropped),
        }
        return batch

    def held_out(self) -> Batch:
        """What evaluations compute the loss of; without groups where there is nothing."""
        return self._batch(0, first_held_out(self._held_out, self._maker, self._config.eval.num_prompts))

    def export_state(self) -> bytes:
        """For a checkpoint between two steps: the position among the rows."""
        return json.dumps({"stream": self._stream.state_dict()}).encode()

    def restore_state(self, data: bytes) -> None:
        """Go on from an exported state. Raises UserError where the rows are not those of the state."""
        self._stream.load_state_dict(json.loads(data)["stream"])

    def _batch(self, version: int, prompts: Sequence[Prompt]) -> Batch:
        groups = []
        for one in prompts:
            assert isinstance(one, Demonstration)
            groups.append(Group(one.index, [Sample(one.branches, "stop", 0.0)]))
        return Batch(version, groups)
