"""Demonstrations as a source of batches, for job.stage = "sft".

They are batches of the same samples that rollouts make, with what is demonstrated in the place of what is sampled, so
that everything behind them is the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from torchtitan.config.derived import global_batch_size
from torchtitan.config.job_config import JobConfig
from torchtitan.rollout.datasets import load_datasets
from torchtitan.rollout.demonstration_maker import Demonstration, DemonstrationMaker
from torchtitan.rollout.prompts import PromptStream, first_held_out
from torchtitan.rollout.rollouts import Rollouts
from torchtitan.rollout.tokenizer import Tokenizer
from torchtitan.rollout.types import Batch, Group, Prompt, Sample


class Demonstrations:
    """Hands out batches of demonstrations, as RolloutFlow does those that are generated."""

    def __init__(self, config: JobConfig, tokenizer: Tokenizer, ranks: int, rollouts: Rollouts | None = None):
        """rollouts: what the policy samples for evaluations, where they look at that (sft.sample).

        Raises UserError for a dataset or tokenizer that does not fit the configuration.
        """
        rows, self._held_out = load_datasets(config)
        self.rollouts = rollouts
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
