"""Make the policies of the built-in tasks: for each a Hugging Face directory with a tiny Qwen3 that barely does it.

For arithmetic, two-digit addition (in a folder whose name ends with _moe of a tiny mixture of experts, Qwen3-MoE):

Random weights, then a short run of supervised fine-tuning (train_configs/sft_cpu.toml) that stops on measured accuracy
(sampled at temperature 1 on held-out pairs): enough that some samples earn a reward, little enough that GRPO does the
lifting. debug_random is without that run.

    python -m torchtitan.preflight.debug_checkpoint --output outputs/assets/debug_arithmetic

The folder's name says the task: debug_guess and debug_calculator are those of agent_warm_start.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from torchtitan.errors import UserError
from torchtitan.models.decoder import Decoder
from torchtitan.models.expert_args import ExpertArgs
from torchtitan.models.hf_checkpoint import export_policy
from torchtitan.models.model_args import ModelArgs
from torchtitan.models.shape import newest_export
from torchtitan.preflight import agent_warm_start
from torchtitan.utils.child_process import child_environment
from torchtitan.utils.json_lines import read_json_lines

SYMBOLS = ["<pad>", "<eos>", *"0123456789", *"+-*/=() ", "<bos>", "<unk>"]
PAD, EOS = 0, 1
# The warm start ends at the target; a checkpoint above the limit would leave GRPO too little to show.
TARGET_ACCURACY, ACCURACY_LIMIT = 0.10, 0.25
RUN_TIMEOUT_S = 500.0


def debug_model_args(mixture: bool = False) -> ModelArgs:
    """Two Qwen3 layers, 298k parameters; as a mixture of 8 experts, of which each token has 2, 890k."""
    return ModelArgs(
        family="qwen3_moe" if mixture else "qwen3",
        experts=ExpertArgs(count=8, per_token=2, intermediate_size=128, normalize=True) if mixture else None,
        vocab_size=len(SYMBOLS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_ids=(EOS,),
    )


def write_tokenizer(directory: Path, symbols: Sequence[str] = SYMBOLS) -> None:
    """A tokenizer of single characters, as Hugging Face's fast tokenizers read it."""
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
        "model_max_length": 256,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def fine_tune(start: Path, work: Path, overrides: dict[str, object]) -> tuple[Path, int, float]:
    """Train `start` as train_configs/sft_cpu.toml says until the target accuracy, in run folders in `work`.

    Returns the export, the steps and the accuracy. Raises UserError where it is not reached, or the run fails.
    """
    options = {"job.dump_folder": work, "model.hf_assets_path": start, "eval.stop_at": TARGET_ACCURACY, **overrides}
    command = [sys.executable, "-m", "torchtitan.grpo_train", "--job.config_file", "train_configs/sft_cpu.toml"]
    for key, value in options.items():
        command += [f"--{key}", str(value)]
    done = subprocess.run(command, env=child_environment(1), stdout=subprocess.DEVNULL, timeout=RUN_TIMEOUT_S)
    if done.returncode:
        raise UserError(f"the warm start ended with exit code {done.returncode}")
    folder = work / "latest"
    last = [row for row in read_json_lines(folder / "metrics.jsonl") if row.get("eval/pass@1") is not None][-1]
    steps, accuracy = int(last["step"]), float(last["eval/pass@1"])
    if accuracy < TARGET_ACCURACY:
        raise UserError(f"the warm start did not reach an accuracy of {TARGET_ACCURACY} in {steps} steps")
    return Path(newest_export(str(folder))), steps, accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/assets/debug_arithmetic"))
    parser.add_argument("--held-out-fraction", type=float, default=0.1, help="as rollout.held_out_fraction")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more is no faster at this size")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    started = time.perf_counter()
    task = arguments.output.name.removeprefix("debug_")
    agent = task in agent_warm_start.WARM_STARTS
    policy = Decoder(agent_warm_start.policy_args() if agent else debug_model_args(task.endswith("_moe")))
    policy.initialize_weights(arguments.seed)
    symbols = agent_warm_start.SYMBOLS if agent else SYMBOLS
    steps, accuracy, what = 0, 0.0, "sampled at temperature 1, held-out accuracy"
    if agent:
        steps, accuracy = agent_warm_start.warm_start(policy, task, arguments.seed)
        what = "a play as imitated has probability"
    if agent or task == "random":
        export_policy(policy, arguments.output)
        write_tokenizer(arguments.output, symbols)
    else:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=arguments.output.parent) as folder:
            start = Path(folder) / "start"
            export_policy(policy, start)
            write_tokenizer(start, symbols)
            overrides = {
                "rollout.held_out_fraction": arguments.held_out_fraction,
                "training.seed": arguments.seed,
                "training.threads": arguments.threads,
            }
            made, steps, accuracy = fine_tune(start, Path(folder), overrides)
            shutil.copytree(made, arguments.output, dirs_exist_ok=True)
    if accuracy > ACCURACY_LIMIT:
        raise SystemExit(f"the warm start overshot: {what} {accuracy:.3f}, above {ACCURACY_LIMIT}")
    seconds = time.perf_counter() - started
    print(
        f"wrote {arguments.output}: {policy.args.num_parameters():,} parameters, {steps} supervised steps, "
        f"{what} {accuracy:.3g}, {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
