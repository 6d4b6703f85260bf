"""What two runs of scripts/verify_grpo_2gpu.sh say: were synchronised weights right, and what did not waiting gain?

    python scripts/judge_runs.py --waiting RUN_FOLDER --not-waiting RUN_FOLDER [--least-gain 1.0]

Exit code 0 where both hold, else 1 with what does not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from pathlib import Path

from torchtitan.utils.json_lines import read_json_lines

# Compilation, first connections and the first versions are no throughput.
WARM_UP = 0.3


def tokens_per_second(run: Path) -> float:
    """Median over the steps after the warm-up; 0 where there is none."""
    rows = [row for row in read_json_lines(run / "metrics.jsonl") if "tokens_per_s" in row]
    rates = [float(row["tokens_per_s"]) for row in rows[int(len(rows) * WARM_UP) :]]
    return statistics.median(rates) if rates else 0.0


def weight_problems(run: Path) -> list[str]:
    """Why this run proves nothing about its weights, or proves that they were wrong."""
    events = read_json_lines(run / "events.jsonl")
    kinds = Counter(event["kind"] for event in events)
    problems = [
        f"{event['actor']} did not hold version {event['version']} (mean difference {event['difference']:.3g} nats)"
        for event in events
        if event["kind"] == "weights_differ"
    ]
    problems += [f"{event['actor']}: {event['reason']}" for event in events if event["kind"] == "weights_not_verified"]
    if not kinds["weights_probed"]:
        problems.append("no actor was ever compared with the trainer")
    problems += [
        f"the comparison failed: {event['reason']}" for event in events if event["kind"] == "parity_guard_failed"
    ]
    rows = read_json_lines(run / "metrics.jsonl")
    if max((row.get("policy_version", 0) for row in rows), default=0) < 1:
        problems.append("no version was trained")
    elif max((row.get("inference/probed_version", 0) for row in rows), default=0) < 1:
        problems.append("no version after the first was compared with the trainer")
    return problems


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=Path, required=True)
    parser.add_argument("--not-waiting", type=Path, required=True)
    parser.add_argument("--least-gain", type=float, default=1.0)
    arguments = parser.parse_args(argv)
    failed = False
    rates = {}
    for name, run in (("waiting", arguments.waiting), ("not waiting", arguments.not_waiting)):
        problems = weight_problems(run)
        rates[name] = tokens_per_second(run)
        (probed, *_) = [
            event for event in read_json_lines(run / "events.jsonl") if event["kind"] == "weights_probed"
        ] or [{}]
        print(f"{name:12}  weights {'WRONG' if problems else 'right'}  {rates[name]:10,.0f} tokens/s", end="")
        print(f"  (first difference of the probe {probed['difference']:.2g} nats)" if probed else "")
        for problem in problems:
            print(f"  {problem}")
        failed |= bool(problems)
    gain = rates["not waiting"] / rates["waiting"] if rates["waiting"] else 0.0
    enough = gain >= arguments.least_gain
    print(f"gain of not waiting: {gain:.2f}× (at least {arguments.least_gain:g}: {'yes' if enough else 'NO'})")
    return 1 if failed or not enough else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
