"""Checkpoints whose chat template has tools, which a coding agent needs: SmolLM2-135M-Instruct's has none.

    python -m examples.cli_agents.checkpoints

reads outputs/assets/smollm2 (scripts/make_smollm2_checkpoint.py) and writes

- outputs/assets/smollm2_tools: the same model with a template that has tools, in Hermes' format;
- outputs/assets/tiny_tools: a random model of one layer with that tokenizer, to see an agent's calls within seconds.
"""

import json
import shutil
from pathlib import Path

import torch
import transformers

ASSETS = Path("outputs/assets")
TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def copy_tokenizer(source, target):
    """Copy the tokenizer's files, with the template that has tools."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, target / name)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    shutil.copy(TEMPLATE, target / TEMPLATE.name)


def main():
    source, tools, tiny = ASSETS / "smollm2", ASSETS / "smollm2_tools", ASSETS / "tiny_tools"
    if not source.is_dir():
        raise SystemExit(f"{source} is missing: run scripts/make_smollm2_checkpoint.py first")
    copy_tokenizer(source, tools)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, tools / name)
    shape = json.loads((source / "config.json").read_text())
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        bos_token_id=shape["bos_token_id"],
        eos_token_id=shape["eos_token_id"],
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tiny)
    copy_tokenizer(source, tiny)
    print(f"wrote {tools} and {tiny}")


if __name__ == "__main__":
    main()
