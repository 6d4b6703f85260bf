"""Make a small Qwen3-shaped checkpoint directory with a real byte-level BPE tokenizer for a JSONL of GSM8K.

The tokenizer is trained on the questions and answers; the weights get a short supervised start on them, so that
completions look like worked answers and end. It will not be good at mathematics; every part of a real run works on it.

    python scripts/make_gsm8k_checkpoint.py --dataset gsm8k_train.jsonl --output outputs/assets/gsm8k_small
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan.models.attention import PackedLayout
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy
from torchtitan.models.model_args import ModelArgs
from torchtitan.rollout.datasets import hold_out, load_rows
from torchtitan.trainer.packing import first_fit_decreasing

END, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS_PER_STEP = 2048


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


def supervised_start(policy: Decoder, sequences: list[list[int]], steps: int, seed: int) -> float:
    """Next-token steps on packed question-answer pairs; returns the last loss."""
    rng = random.Random(seed)
    bins = first_fit_decreasing([len(sequence) for sequence in sequences], TOKENS_PER_STEP)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(steps):
        pack = [sequences[index] for index in rng.choice(bins)]
        inputs = torch.tensor([token for sequence in pack for token in sequence[:-1]])
        targets = torch.tensor([token for sequence in pack for token in sequence[1:]])
        log_probs, _ = policy(inputs, PackedLayout([len(sequence) - 1 for sequence in pack]), targets)
        loss = -log_probs.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"supervised step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="JSONL with the columns question and answer")
    parser.add_argument("--output", type=Path, default=Path("outputs/assets/gsm8k_small"))
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=60, help="supervised steps of 2,048 tokens; 0 leaves it random")
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
    chats = [f"{START}user\n{row['question']}{END}\n{START}assistant\n{row['answer']}{END}" for row in rows]
    sequences = [encoding.ids for encoding in tokenizer.encode_batch(chats) if len(encoding.ids) <= TOKENS_PER_STEP]
    loss = supervised_start(policy, sequences, arguments.steps, arguments.seed)
    export_policy(policy, arguments.output, assets_from=assets)
    shutil.rmtree(assets)
    seconds = time.perf_counter() - started
    print(
        f"wrote {arguments.output}: {args.num_parameters():,} parameters, vocabulary {args.vocab_size}, "
        f"{arguments.steps} supervised steps, loss {loss:.2f}, {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
