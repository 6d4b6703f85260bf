"""Make a small Qwen3-shaped checkpoint directory with a real byte-level BPE tokenizer for a JSONL of GSM8K.

The tokenizer is trained on the questions and answers; the weights get a short supervised start on them, so that
completions look like worked answers and end. It will not be good at mathematics; every part of a real run works on it.

    python scripts/make_gsm8k_checkpoint.py --dataset gsm8k_train.jsonl --output outputs/assets/gsm8k_small
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan import train
from torchtitan.errors import UserError
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy
from torchtitan.models.shape.exports import newest_export
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.rollout.data.rows import hold_out, load_rows

END, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS_PER_STEP, ROWS_PER_STEP = 2048, 8


def train_tokenizer(texts: list[str], vocabulary: int, directory: Path) -> Tokenizer:
    """A byte-level BPE tokenizer in the files of a Hugging Face fast tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="JSONL with the columns question and answer")
    parser.add_argument("--output", type=Path, default=Path("outputs/assets/gsm8k_small"))
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=60, help="supervised steps of 8 questions; 0 leaves it random")
    parser.add_argument("--held-out-fraction", type=float, default=0.1, help="as rollout.held_out_fraction")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(min(os.cpu_count() or 1, 2))
    started = time.perf_counter()
    rows, _ = hold_out(load_rows(arguments.dataset), arguments.held_out_fraction, prompt_column="question")
    texts = [f"{row['question']}\n{row['answer']}" for row in rows]
    assets = Path(tempfile.mkdtemp())
    tokenizer = train_tokenizer(texts, arguments.vocabulary, assets)
    end = tokenizer.token_to_id(END)
    args = ModelArgs(
        family="qwen3",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        eos_token_ids=(end,),
    )
    policy = Decoder(args)
    policy.initialize_weights(arguments.seed)
    start = assets / "start"
    export_policy(policy, start, assets_from=assets)
    made, loss = start, None
    if arguments.steps:
        # Questions and answers in the chat template, packed and trained as any run's.
        run = train(
            {"job": {"stage": "sft", "dump_folder": str(assets / "runs")}, "optimizer": {"lr": 2e-3}},
            {
                "model.hf_assets_path": start,
                "training.steps": arguments.steps,
                "training.seed": arguments.seed,
                "training.seq_len": TOKENS_PER_STEP,
                "training.tokens_per_micro_batch": TOKENS_PER_STEP,
                "training.global_batch_size": ROWS_PER_STEP,
                "rollout.dataset": arguments.dataset,
                "rollout.prompt_column": "question",
                "rollout.chat_template": True,
                "rollout.held_out_fraction": arguments.held_out_fraction,
                "sft.completion_column": "answer",
                "eval.interval": 0,
                "metrics.log_freq": 20,
            },
        )
        made, loss = Path(newest_export(str(run.folder))), run.metrics["eval/loss"]
    shutil.copytree(made, arguments.output, dirs_exist_ok=True)
    shutil.rmtree(assets)
    seconds = time.perf_counter() - started
    print(
        f"wrote {arguments.output}: {args.num_parameters():,} parameters, vocabulary {args.vocab_size}, "
        f"{arguments.steps} supervised steps, held-out loss {loss}, {seconds:.0f} s"
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
