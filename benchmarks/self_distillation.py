"""Self-distillation from feedback (SDPO) against GRPO: the guessing game, with equal samples.

    python benchmarks/self_distillation.py --json --folder outputs/self_distillation

A tiny policy begins as one that imitates clumsy players, half of whom have been told the number beforehand (`13?`) and
say it every other time: so it can read a hint, which the packaged checkpoint of the game cannot. From there GRPO
learns from rewards, and SDPO from the number, which the environment tells as its feedback once a game is over. The
policy itself never reads it when it plays. `ema` has the moving average of the policy as its teacher, as the paper
does, `both` adds GRPO's loss. With --folder, runs that have ended are taken as they are.

    won_before, won_*     eval/pass@1: games won without a hint, mean over the seeds
    told_before           the same of the first policy, told the number
    share_of_gain_*       gain in won games, ÷ GRPO's
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.REPOSITORY))

import torch

from scripts import make_debug_checkpoint as made
from torchtitan import train
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy
from torchtitan.rollout.environments import builtin_environments as builtin
from torchtitan.utils.json_lines import read_json_lines

SUPERVISED_STEPS = 450
GAME: dict[str, Any] = {
    "training.global_batch_size": 128,
    "training.threads": 1,
    "inference.threads_per_actor": 1,
    "eval.greedy": False,
    "metrics.loggers": [],
    "checkpoint.enable": False,
}
TAUGHT: dict[str, Any] = {
    "job.stage": "distill",
    "distill.hint": "feedback",
    "distill.hint_template": "{hint}{prompt}",
    "grpo.entropy_coefficient": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "forward_kl": {**TAUGHT, "distill.divergence": "forward_kl"},
    "jsd": {**TAUGHT, "distill.divergence": "jsd"},
    "reverse_kl": {**TAUGHT, "distill.divergence": "reverse_kl"},
    "ema": {**TAUGHT, "distill.divergence": "forward_kl", "grpo.reference_ema_decay": 0.95},
    "both": {**TAUGHT, "distill.divergence": "forward_kl", "distill.add_rewards": True, "distill.coefficient": 0.3},
}


def told_play(numbers: random.Random) -> made.Play:
    """Play as a clumsy player, who in half of the games knows the number and says it every other time."""
    if numbers.random() < 0.5:
        return made.guess_play(numbers)
    game = builtin.Guess()
    secret = numbers.randint(0, builtin.LARGEST)
    game.reset(secret)
    play: made.Play = [(f"{secret:02d}?", False)]
    over = False
    while not over:
        number = secret if numbers.random() < 0.5 else numbers.randint(0, builtin.LARGEST)
        text = f"{number:02d}{builtin.END_OF_GUESS}"
        answer, _, over = game.step(text)
        play += [(text, True), (answer, False)]
    return play[:-1]


def make_start(directory: Path, steps: int) -> None:
    """Write the policy from which all runs begin."""
    policy = Decoder(made.policy_args())
    policy.initialize_weights(0)
    made.WARM_STARTS["told"] = [(told_play, steps)]
    torch.set_num_threads(1)
    made.warm_start(policy, "told", 0)
    export_policy(policy, directory, dtype=torch.bfloat16)
    made.write_tokenizer(directory, made.PLAY_SYMBOLS)


def won(folder: Path) -> list[float]:
    """The share of won games of every evaluation of a run."""
    rows = read_json_lines(folder / "metrics.jsonl")
    return [row["eval/pass@1"] for row in rows if row.get("eval/pass@1") is not None]


def told_share(start: Path) -> float:
    """Games that the first policy wins if its prompt begins with the number."""
    from torchtitan.models.hf_checkpoint import load_policy

    policy, generator = load_policy(str(start)).float(), torch.Generator().manual_seed(0)
    wins = games = 0
    with torch.no_grad():
        for secret in range(builtin.LARGEST + 1):
            for _ in range(4):
                game, over, tokens, answer = builtin.Guess(), False, [made.INDEX[char] for char in f"{secret:02d}?"], ""
                game.reset(secret)
                while not over:
                    text = ""
                    while not text.endswith(builtin.END_OF_GUESS) and len(text) < 3:
                        logits = policy.logits(torch.tensor([tokens]))[0, -1].float()
                        token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
                        tokens, text = [*tokens, token], text + made.PLAY_SYMBOLS[token]
                    answer, _, over = game.step(text)
                    tokens.append(made.INDEX[answer])
                wins, games = wins + (answer == "="), games + 1
    return wins / games


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where runs are kept; without it they are forgotten")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    kinds, seeds, steps, supervised = arguments.kinds, arguments.seeds, arguments.steps, SUPERVISED_STEPS
    few: dict[str, Any] = {}
    if arguments.quick:
        kinds, seeds, steps, supervised = ["grpo", "ema"], 1, 2, 5
        few = {"training.global_batch_size": 32, "eval.num_prompts": 4, "eval.samples_per_prompt": 2}
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start = folder / "start"
        if not (start / "config.json").is_file():
            make_start(start, supervised)
        ends: dict[str, list[float]] = {}
        before: list[float] = []
        for seed in range(seeds):
            for kind in kinds:
                name = f"{kind}-{seed}"
                values = {
                    **GAME, **few, **KINDS[kind],
                    "job.name": name,
                    "job.dump_folder": folder / "runs" / name,
                    "model.hf_assets_path": start,
                    "training.steps": steps,
                    "training.seed": seed,
                    "eval.interval": max(1, steps // 2),
                }  # fmt: skip

                def work(values: dict[str, Any] = values) -> str:
                    done = train("guess_cpu", values)
                    shares = ", ".join(f"{share:.3f}" for share in won(Path(done.folder)))
                    return f"{done.version} steps, games won {shares}"

                common.once(folder / "runs" / f"{name}.json", values, work)
                shares = won((folder / "runs" / name / "latest").resolve())
                before.append(shares[0])
                ends.setdefault(kind, []).append(shares[-1])
        figures = {"won_before": statistics.fmean(before), "told_before": told_share(start)}
        figures |= {f"won_{kind}": statistics.fmean(shares) for kind, shares in ends.items()}
        gains = {kind: statistics.fmean(shares) - figures["won_before"] for kind, shares in ends.items()}
        if gains.get("grpo"):
            figures |= {f"share_of_gain_{kind}": gain / gains["grpo"] for kind, gain in gains.items() if kind != "grpo"}
        conditions = {
            "seeds": seeds, "steps": steps, "samples": steps * (32 if arguments.quick else 128),
            "each seed": {kind: [round(share, 3) for share in shares] for kind, shares in ends.items()},
            "quick": arguments.quick, "processor": common.processor(),
        }  # fmt: skip
    common.report("self_distillation", figures, {}, conditions, arguments.json)


if __name__ == "__main__":
    main()
