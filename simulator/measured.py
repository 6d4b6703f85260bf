"""Keys of a scenario out of a run folder: metrics.jsonl, the coordinator's journal and config.toml."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

from simulator.scenario import key_types, straggling
from torchtitan.errors import UserError
from torchtitan.utils.json_lines import read_json_lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Row = dict[str, Any]
# Steps left out at the start: caches, compilation, first connections.
WARM_UP = 3
# Keys that mean the same in a job's configuration.
SAME = {
    "grpo.group_size": "group_size",
    "inference.max_sequences": "max_sequences",
    "inference.update_mode": "update_mode",
    "inference.drain_timeout_s": "drain_timeout_s",
    "inference.health_timeout_s": "health_timeout_s",
    "rollout.max_completion_tokens": "max_completion_tokens",
    "rollout.max_staleness": "max_staleness",
    "rollout.gate_on": "gate_on",
    "rollout.max_groups_in_flight": "max_groups_in_flight",
}


def values_from_run(folder: Path, ranks: int | None = None) -> dict[str, Any]:
    """Flat keys for Scenario.with_values. `ranks`: how many trained; None: as many as have a layout file.

    What one run cannot tell stays a default, fault rates and speeds that nothing came near to among it. Raises
    UserError for a folder without figures.
    """
    rows = [row for row in read_json_lines(folder / "metrics.jsonl") if row.get("time/train_s") is not None][WARM_UP:]
    journal = read_json_lines(folder / "weight_sync" / "coordinator.jsonl")
    config_file = folder / "config.toml"
    if not rows or not journal or not config_file.is_file():
        raise UserError(
            f"--from-run {folder}: needs config.toml, weight_sync/coordinator.jsonl and a metrics.jsonl of more than "
            f"{WARM_UP} steps"
        )
    config = tomllib.loads(config_file.read_text(encoding="utf-8"))
    values = _configured(config)
    ranks = ranks or max(1, len(list((folder / "weight_sync").glob("layout-rank*.json"))))
    actors = len({line["actor"] for line in journal if line["event"] == "join"})
    gigabytes = next((line["bytes"] for line in journal if line["event"] == "layout"), 0) / 1e9
    if not actors or not gigabytes:
        raise UserError(f"--from-run {folder}: no actor ever joined the weight synchronisation")
    values |= {"ranks": ranks, "actors": actors, "gigabytes": gigabytes}
    values |= _training(rows, ranks, gigabytes)
    values |= _deliveries(journal, gigabytes)
    samples = values["groups_per_batch"] * values["group_size"]
    values |= _generation(rows, config, samples, _capacity(folder, rows, actors, samples))
    return {name: value for name, value in values.items() if name in key_types()}


def _configured(config: dict[str, Any]) -> dict[str, Any]:
    sync = {f"weight_sync.{key}": value for key, value in config.get("weight_sync", {}).items()}
    same = {
        name: config[table][key]
        for path, name in SAME.items()
        for table, _, key in [path.partition(".")]
        if key in config.get(table, {})
    }
    batch = config["training"]["global_batch_size"]
    return sync | same | {"groups_per_batch": max(1, batch // config["grpo"]["group_size"])}


def _training(rows: list[Row], ranks: int, gigabytes: float) -> dict[str, Any]:
    """A step's own time: all that is neither waiting for data, nor snapshot, nor sync."""
    outside = ("time/data_wait_s", "time/snapshot_s", "time/sync_stall_s")
    times = [max(row["time/step_s"] - sum(row.get(key) or 0.0 for key in outside), 1e-6) for row in rows]
    ordered = sorted(times)
    # Half the distance between the quantiles of one sigma: steps of a hiccup do not count.
    spread = (ordered[int(len(ordered) * 0.84)] - ordered[int(len(ordered) * 0.16)]) / 2
    middle = statistics.median(times)
    jitter = min(spread / middle, 0.5)
    found = {"train_s": middle / straggling(ranks, jitter), "step_jitter": jitter}
    snapshots = [row["time/snapshot_s"] for row in rows if row.get("time/snapshot_s")]
    if snapshots:
        found["snapshot_s"] = statistics.median(snapshots)
    return found


def _deliveries(journal: list[Row], gigabytes: float) -> dict[str, Any]:
    """Transfer, apply and pause, as the actors reported them."""
    figures = [line["figures"] for line in journal if line["event"] == "applied"]
    found: dict[str, Any] = {}
    transfers = [row["transfer_s"] for row in figures if row.get("transfer_s")]
    if transfers:
        found["actor_gigabytes_per_s"] = gigabytes / statistics.median(transfers)
    pauses = [row["pause_s"] for row in figures if row.get("pause_s") is not None]
    applies = [row["apply_s"] for row in figures if row.get("apply_s") is not None]
    if pauses:
        found["pause_s"] = statistics.median(pauses)
    if pauses and applies:
        found["prepare_s"] = max(statistics.median(applies) - found["pause_s"], 0.0)
    return found


def _generation(rows: list[Row], config: dict[str, Any], samples: int, capacity: float) -> dict[str, Any]:
    completion = statistics.mean(row["completion/length_mean"] for row in rows)
    usable = 1.0
    if config["grpo"].get("drop_zero_variance"):
        usable = max(1 - statistics.mean(row.get("groups/zero_variance_fraction") or 0.0 for row in rows), 0.01)
    trained = statistics.median(row["tokens_per_s"] * row["time/step_s"] for row in rows)
    longest = max((row.get("completion/length_max") or 0.0 for row in rows), default=0.0)
    return {
        "completion_tokens": max(completion, 1.0),
        # The largest of all lies about three sigmas out.
        "completion_spread": math.log(max(longest / completion, 1.0)) / 3,
        "prompt_tokens": max(trained / samples - completion, 0.0),
        "usable_share": usable,
        "tokens_per_s": capacity,
        # How fast one sequence alone would be, a run that keeps actors full does not tell.
        "sequence_tokens_per_s": capacity,
    }


def _capacity(folder: Path, rows: list[Row], actors: int, samples: int) -> float:
    """Tokens per second that one actor generates: while it worked, where the engines noted that (timeline/); else a
    lower bound, what the fastest steps needed."""
    rates = []
    for path in sorted((folder / "timeline").glob("actor-*.jsonl")):
        spans = [row for row in read_json_lines(path) if row.get("what") == "generate"]
        seconds = sum(row["end"] - row["begin"] for row in spans)
        if seconds > 0:
            rates.append(sum(row["tokens"] for row in spans) / seconds)
    if rates:
        return statistics.mean(rates)
    needed = sorted(samples * row["completion/length_mean"] / row["time/step_s"] for row in rows)
    return needed[int(len(needed) * 0.95)] / actors
