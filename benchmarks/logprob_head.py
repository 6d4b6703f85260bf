"""Memory, time and accuracy of the fused log-prob head against Liger 0.8.5 and against full logits.

    benchmarks/peers/setup.sh
    python benchmarks/logprob_head.py --vocab 151936 --hidden 256 --tokens 2048 --json
    python benchmarks/logprob_head.py --vocab 151936 --hidden 1024 --tokens 2048 --json
    python benchmarks/logprob_head.py --vocab 151936 --hidden 256 --tokens 2048 --accumulate 8 --json
    python benchmarks/logprob_head.py --vocab 32768 --hidden 256 --tokens 32768 --sequences 1 --json
    python benchmarks/logprob_head.py --accuracy --json
    python benchmarks/logprob_head.py --tensor-parallel 2 --json

All variants run in the environment that setup.sh makes, on one thread. Peak memory is the resident memory above the
inputs, each variant in a process of its own; times are medians over interleaved repeats in one process.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

from torchtitan.utils.child_process import child_environment

HERE = Path(__file__).resolve().parent
WORKER = HERE / "peers" / "head_worker.py"
TIMEOUT_SECONDS = 1200


# Big blocks come straight from the system and go back to it, so that the peak is of live memory.
VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), "PYTHONPATH": f"{HERE.parent}:{HERE / 'peers'}"}


def ask(task: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run one task of the worker and return what it measured."""
    output = common.run([common.peers_python(), WORKER, task, json.dumps(options)], TIMEOUT_SECONDS, **VARIABLES)
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


def peaks(case: dict[str, Any], variants: list[str], accumulate: int = 1) -> dict[str, float]:
    """Peak in MiB above the inputs: of the last of `accumulate` micro-batches, where there are several."""
    return {v: ask("memory", {**case, "variant": v, "accumulate": accumulate})["peak_mib"] for v in variants}


def times(case: dict[str, Any], variants: list[str], repeats: int) -> dict[str, list[float]]:
    """Seconds of every repeat, all variants in one process, taking turns."""
    result: dict[str, list[float]] = ask("time", {**case, "variants": variants, "repeats": repeats})["seconds"]
    return result


def compare(arguments: argparse.Namespace, case: dict[str, Any]) -> dict[str, float]:
    """Peak memory and time of one shape."""
    mib = 1 / (1 << 20)
    floor = 4 * mib * (arguments.vocab * arguments.hidden + arguments.tokens * arguments.hidden)
    if arguments.accumulate > 1:
        peak = peaks(case, ["liger", "one_pass_accumulate", "two_pass"], arguments.accumulate)
        return {
            "extra_peak_vs_liger": peak["one_pass_accumulate"] / peak["liger"],
            "two_pass_extra_peak_vs_liger": peak["two_pass"] / peak["liger"],
            **{f"{name}_extra_peak_mib": value for name, value in peak.items()},
        }
    peak = peaks(case, ["liger", "one_pass", "one_pass_small", "two_pass", "one_pass_entropy"])
    figures = {
        "peak_vs_liger": peak["one_pass"] / peak["liger"],
        "peak_vs_floor": peak["one_pass"] / floor,
        "small_peak_vs_liger": peak["one_pass_small"] / peak["liger"],
        "two_pass_peak_vs_liger": peak["two_pass"] / peak["liger"],
    }
    if arguments.tokens * arguments.vocab <= 1 << 29:
        peak |= peaks(case, ["full"])
        figures["peak_vs_full"] = peak["one_pass"] / peak["full"]
    if arguments.repeats:
        variants = ["liger", "one_pass", "one_pass_entropy", "one_pass_small", "two_pass"]
        seconds = times(case, variants, arguments.repeats)
        figures |= {
            "time_vs_liger": common.median_ratio(seconds["one_pass"], seconds["liger"]),
            "entropy_time_vs_liger": common.median_ratio(seconds["one_pass_entropy"], seconds["liger"]),
            "two_pass_time_vs_liger": common.median_ratio(seconds["two_pass"], seconds["liger"]),
            "small_time_vs_liger": common.median_ratio(seconds["one_pass_small"], seconds["liger"]),
            **{f"{name}_s": statistics.median(values) for name, values in seconds.items()},
        }
    return figures | {f"{name}_peak_mib": value for name, value in peak.items()}


def tensor_parallel(case: dict[str, Any], ranks: int) -> dict[str, float]:
    """Peak of one rank ÷ that of a single rank, and the error of loss and gradients against float64."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        workers = []
        for rank in range(ranks):
            extra = VARIABLES | {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            options = json.dumps({**case, "output": str(Path(folder) / f"{rank}.json")})
            command = [common.peers_python(), str(WORKER), "tensor_parallel", options]
            workers.append(subprocess.Popen(command, env=child_environment(1, **extra), stdout=subprocess.DEVNULL))
        if any(worker.wait(TIMEOUT_SECONDS) for worker in workers):
            sys.exit("a tensor-parallel rank failed")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    single = peaks(case, ["two_pass"])["two_pass"]
    return {
        "rank_peak_vs_single": max(result["peak_mib"] for result in found) / single,
        "tp_error": max(result["error"] for result in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=16, help="the tokens are so many sequences of one length")
    parser.add_argument("--repeats", type=int, default=7, help="0 measures memory only")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches; measures the extra peak of the last")
    parser.add_argument("--accuracy", action="store_true", help="error against float64")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share the vocabulary")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.tokens % arguments.sequences:
        sys.exit(f"--tokens {arguments.tokens} is not a multiple of --sequences {arguments.sequences}")
    case = {name: getattr(arguments, name) for name in ("vocab", "hidden", "tokens", "sequences")}
    if arguments.accuracy:
        # The reference in float64 takes minutes for more.
        case["tokens"] = min(arguments.tokens, 512)
        figures = ask("accuracy", case)
    elif arguments.tensor_parallel > 1:
        figures = tensor_parallel(case, arguments.tensor_parallel)
    else:
        figures = compare(arguments, case)
    conditions = {**vars(arguments), **case, "threads": 1}
    del conditions["json"]
    common.report("logprob_head", figures, {}, conditions, arguments.json)


if __name__ == "__main__":
    main()
