"""Memory, time and accuracy of the divergence head (distillation over the whole vocabulary) against TRL 1.16's.

    benchmarks/peers/setup.sh
    python benchmarks/distillation_head.py --json
    python benchmarks/distillation_head.py --kind jsd --json

The alternative is the chunked loss of TRL's DistillationTrainer. Both run in the environment that setup.sh makes, on
one thread, forward and backward, with narrow hidden states, so that the whole run takes some five minutes on a quiet
core. Peak memory is the resident memory above the inputs, each in a process of its own. Times are medians over
interleaved repeats in one process, also for a half and a quarter of both vocabulary and tokens. Accuracy is of few
tokens and symbols, where float64 is quick: the largest error of loss, hidden states' and weight's gradient, over all
three divergences.

    peak_vs_trl, time_vs_trl, processor_vs_trl    ours ÷ TRL's; processor time tells more on a busy machine
    processor_vs_trl_half, _quarter               the same of the smaller sizes
    fp32_error_ours, fp32_error_trl               ‖difference‖ / ‖reference‖ against float64
    difference_to_trl                             the same of ours against TRL's
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import common

HERE = Path(__file__).resolve().parent
WORKER = HERE / "peers" / "distillation_worker.py"
TIMEOUT_SECONDS = 3600
# Big blocks come straight from the system and go back to it, so that the peak is of live memory.
VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), "PYTHONPATH": f"{HERE.parent}:{HERE / 'peers'}"}
BARS = {
    "peak_vs_trl": ("<=", 0.3),
    "time_vs_trl": ("<=", 1.0),
    "fp32_error_ours": ("<=", 1e-6),
    "difference_to_trl": ("<=", 1e-6),
}


def ask(task: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run one task of the worker and return what it measured."""
    # Memory that is not kept between blocks would cost every block its pages again.
    variables = VARIABLES if task == "memory" else {"PYTHONPATH": VARIABLES["PYTHONPATH"]}
    output = common.run([common.peers_python(), WORKER, task, json.dumps(options)], TIMEOUT_SECONDS, **variables)
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--kind", choices=("forward_kl", "reverse_kl", "jsd"), default="reverse_kl")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.vocab, arguments.hidden, arguments.tokens, arguments.repeats = 4096, 64, 128, 1
    case = {name: getattr(arguments, name) for name in ("vocab", "hidden", "tokens", "kind", "repeats")}
    smaller = {}
    for name, part in (("quarter", 4), ("half", 2)):
        few = ask("time", {**case, "vocab": arguments.vocab // part, "tokens": arguments.tokens // part})["processor"]
        smaller[name] = {which: [round(duration, 3) for duration in values] for which, values in few.items()}
        common.progress(f"a {name} of vocabulary and tokens: {smaller[name]} processor seconds")
    times = ask("time", case)
    common.progress(f"all of them: {times['processor']} processor seconds")
    peak = {name: ask("memory", {**case, "variant": name})["peak_mib"] for name in ("ours", "trl")}
    figures = {
        "peak_vs_trl": peak["ours"] / peak["trl"],
        "time_vs_trl": common.median_ratio(times["seconds"]["ours"], times["seconds"]["trl"]),
        "processor_vs_trl": common.median_ratio(times["processor"]["ours"], times["processor"]["trl"]),
        **{f"processor_vs_trl_{n}": common.median_ratio(few["ours"], few["trl"]) for n, few in smaller.items()},
        **ask("accuracy", {**case, "vocab": min(arguments.vocab, 4096), "tokens": min(arguments.tokens, 256)}),
        **{f"{name}_peak_mib": value for name, value in peak.items()},
    }
    seconds = {name: [round(duration, 2) for duration in values] for name, values in times["seconds"].items()}
    used = {name: [round(duration, 2) for duration in values] for name, values in times["processor"].items()}
    conditions = {
        **case,
        "seconds": seconds,
        "processor seconds": used,
        **smaller,
        "processor": common.processor(),
        "threads": 1,
    }
    common.report("distillation_head", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
