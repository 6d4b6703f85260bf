"""A tiny model that can chat: a byte-level tokenizer with ChatML's special tokens, and a template as models have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Tokens of their own that are not special: they stay in the text.
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCABULARY = 272  # 256 bytes, 9 added, and a multiple of 8

# After Qwen2.5's: tools in the system message, answers of tools together in a user's turn.
TEMPLATE_FILE = Path(__file__).parents[1] / "examples" / "cli_agents" / "chat_template.jinja"
CHAT_TEMPLATE = TEMPLATE_FILE.read_text().strip()


def write_chat_tokenizer(directory: Path, template: str = CHAT_TEMPLATE) -> Path:
    """tokenizer.json and tokenizer_config.json, as transformers reads them too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def token_id(text: str) -> int:
    """Of an added token."""
    return 256 + [*SPECIAL, *ADDED].index(text)


END = token_id("<|im_end|>")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
QUESTION = "Weather in Rome?"
WEATHER = "sunny, 21 °C"
SAID = ['<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', "It is sunny."]


def make_chat_model(directory: Path, taught: bool = True, longest: int = 2048) -> Path:
    """A checkpoint of a small random Qwen3; taught, its greedy answers to one conversation are those of SAID. longest:
    tokens of a conversation."""
    from tests.conftest import make_checkpoint
    from torchtitan.rollout.conversation.tokenizer import Tokenizer

    make_checkpoint(
        directory, "qwen3", False, vocab_size=VOCABULARY, eos_token_id=END, bos_token_id=None,
        max_position_embeddings=longest,
    )  # fmt: skip
    write_chat_tokenizer(directory)
    if not taught:
        return directory
    tokenizer = Tokenizer(directory)
    call: dict[str, Any] = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": WEATHER},
        {"role": "assistant", "content": SAID[1]},
    ]
    text = tokenizer.render_chat(messages, False, TOOLS)
    assert SAID[0] in text
    teach(directory, [tokenizer.encode(text)])
    return directory


def teach(directory: Path, conversations: list[list[int]], steps: int = 400, given: int = 0) -> None:
    """Have the checkpoint learn these token sequences by heart, but for the `given` tokens that each begins with."""
    import torch

    from torchtitan.models.hf_checkpoint import export_policy, load_policy
    from torchtitan.models.layers.attention import PackedLayout

    policy = load_policy(directory)
    ids = torch.tensor([token for tokens in conversations for token in tokens])
    layout = PackedLayout([len(tokens) for tokens in conversations])
    predicts = torch.ones(len(ids), dtype=torch.bool)
    predicts[layout.cumulative[1:].long() - 1] = False
    for begin in layout.cumulative[:-1].tolist():
        predicts[begin : begin + max(0, given - 1)] = False
    optimizer = torch.optim.AdamW(policy.parameters(), 3e-3, weight_decay=0.0)
    for _ in range(steps):
        log_probs, _ = policy(ids, layout, ids.roll(-1), 1.0)
        loss = -log_probs[predicts].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.02:
            break
    export_policy(policy, directory)
