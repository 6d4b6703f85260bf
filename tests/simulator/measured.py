"""Derives keys of a scenario from a run folder: metrics.jsonl, the registry's journal and config.toml."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from tests.journals import is_applied
from tests.simulator.scenario import known_keys, slowest_of
from torchtitan.config.values import read_toml
from torchtitan.errors import UserError
from torchtitan.utils.json_lines import read_json_lines
from torchtitan.weight_sync.memory.transfer import BYTES

Row = dict[str, Any]
# The first steps are left out because of cold caches, compilation and first connections.
WARM_UP = 3


def values_from_run(folder: Path, ranks: int | None = None) -> dict[str, Any]:
    """Return flat keys for Scenario.of. `ranks`: how many ranks trained; None: as many as have a layout file.

    What one run cannot show keeps its default, such as fault rates and speeds that nothing came close to. Raises
    UserError for a folder without figures.
    """
    rows = [row for row in read_json_lines(folder / "metrics.jsonl") if row.get("time/train_s") is not None][WARM_UP:]
    journal = read_json_lines(folder / "weight_sync" / "registry.jsonl")
    config, problem = read_toml(str(folder / "config.toml"))
    actors = len({line["actor"] for line in journal if line["event"] == "join"})
    applied = [line["figures"] for line in journal if is_applied(line["event"], line)]
    # Every actor's first version comes whole.
    gigabytes = max((sum(figures.get(name, 0) for name in BYTES) for figures in applied), default=0) / 1e9
    if not (rows and gigabytes) or problem:
        raise UserError(
            f"--from-run {folder}: needs config.toml, weight_sync/registry.jsonl with an actor that has applied a "
            f"version, and a metrics.jsonl of more than {WARM_UP} steps"
        )
    ranks = ranks or max(1, len(list((folder / "weight_sync").glob("layout-rank*.json"))))
    sync = config.get("weight_sync", {})
    values = {f"weight_sync.{key}": value for key, value in sync.items()}
    values |= {f"weight_sync.tcp.{key}": value for key, value in sync.get("tcp", {}).items()}
    for table in ("grpo", "inference", "rollout"):  # their keys have the same meaning here
        values |= config.get(table, {})
    groups = max(1, config["training"]["global_batch_size"] // config["grpo"]["group_size"])
    values |= {"ranks": ranks, "actors": actors, "gigabytes": gigabytes, "groups_per_batch": groups}
    values |= _training(rows, ranks) | _deliveries(applied, gigabytes)
    samples = groups * values["group_size"]
    values |= _generation(rows, config, samples, _capacity(folder, rows, actors, samples))
    return {name: value for name, value in values.items() if name in known_keys()}


def _training(rows: list[Row], ranks: int) -> dict[str, Any]:
    """Measure a step's own time: without the wait for data, the snapshot and the sync."""
    outside = ("time/data_wait_s", "time/snapshot_s", "time/sync_stall_s")
    times = sorted(max(row["time/step_s"] - sum(row.get(key) or 0.0 for key in outside), 1e-6) for row in rows)
    middle = statistics.median(times)
    # Half the distance between the quantiles at plus and minus one sigma, so that outliers do not count.
    spread = (times[int(len(times) * 0.84)] - times[int(len(times) * 0.16)]) / 2
    jitter = min(spread / middle, 0.5)
    # A single rank is faster than the slowest of all ranks typically is.
    found = {"train_s": middle / math.exp(jitter * slowest_of(ranks, 0.5)), "step_jitter": jitter}
    return found | _median("snapshot_s", [row.get("time/snapshot_s") for row in rows])


def _deliveries(figures: list[Row], gigabytes: float) -> dict[str, Any]:
    """Return the medians of transfer speed, preparation and pause, as the actors reported them."""
    speeds = [gigabytes / row["transfer_s"] for row in figures if row.get("transfer_s")]
    prepares = [max(row["apply_s"] - row["pause_s"], 0.0) for row in figures if {"apply_s", "pause_s"} <= row.keys()]
    pauses = _median("pause_s", [row.get("pause_s") for row in figures])
    return _median("actor_gigabytes_per_s", speeds) | pauses | _median("prepare_s", prepares)


def _median(key: str, values: list[Any]) -> dict[str, float]:
    known = [value for value in values if value is not None]
    return {key: statistics.median(known)} if known else {}


def _generation(rows: list[Row], config: dict[str, Any], samples: int, capacity: float) -> dict[str, Any]:
    completion = statistics.mean(row["completion/length_mean"] for row in rows)
    trained = statistics.median(row["tokens_per_s"] * row["time/step_s"] for row in rows)
    longest = max(row.get("completion/length_max") or 0.0 for row in rows)
    unusable = statistics.mean(row.get("groups/zero_variance_fraction") or 0.0 for row in rows)
    return {
        "completion_tokens": max(completion, 1.0),
        # The longest completion lies about three sigmas above the mean.
        "completion_spread": math.log(max(longest / completion, 1.0)) / 3,
        "prompt_tokens": max(trained / samples - completion, 0.0),
        "usable_share": max(1 - unusable, 0.01) if config["grpo"].get("drop_zero_variance") else 1.0,
        "tokens_per_s": capacity,
        # A run that keeps its actors full does not show how fast a single sequence would be.
        "sequence_tokens_per_s": capacity,
    }


def _capacity(folder: Path, rows: list[Row], actors: int, samples: int) -> float:
    """Return how many tokens per second one actor generates while it works, if the engines recorded that (timeline/);
    else a lower bound, the rate that the fastest steps needed."""
    rates = []
    for path in sorted((folder / "timeline").glob("actor-*.jsonl")):
        spans = [row for row in read_json_lines(path) if row.get("what") == "generate"]
        seconds = sum(row["end"] - row["begin"] for row in spans)
        rates += [sum(row["tokens"] for row in spans) / seconds] if seconds > 0 else []
    needed = sorted(samples * row["completion/length_mean"] / row["time/step_s"] for row in rows)
    return statistics.mean(rates) if rates else needed[int(len(needed) * 0.95)] / actors
