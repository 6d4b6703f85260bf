"""Tokens per second of the embedded engine against transformers.generate, in process and over HTTP.

    python benchmarks/generation.py --json

Both sample the same prompts from the same tiny Qwen3 at temperature 1, on one thread of one core, taking turns; the
figures are medians over the turns. The engine returns log-probs; transformers is spared them. All prompts have the same
length, which spares transformers the padding. Over HTTP the engine is a process of its own on a second core, where
there is one, and a request is a group.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import statistics
import sys
import tempfile
from pathlib import Path

# Read when numpy and torch are first imported.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import common
import torch

try:
    import transformers
except ImportError:
    sys.exit("benchmarks/generation.py compares with transformers: pip install -e '.[test]' brings it")

from torchtitan.inference.actor_parts import EmbeddedClient
from torchtitan.inference.embedded.engine import Engine
from torchtitan.inference.types import GenerateRequest, SamplingParameters
from torchtitan.models.hf_checkpoint import load_policy

REQUEST_SECONDS = 120.0


def make_model(directory: Path) -> transformers.PreTrainedModel:
    """A random Qwen3 of 4 layers, hidden 128, vocabulary 64, saved in `directory`."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def transformers_run(model: transformers.PreTrainedModel, prompts: torch.Tensor, samples: int, tokens: int) -> None:
    """Everything in one batch, with its cache and its sampling."""
    batch = prompts.repeat_interleave(samples, 0)
    with torch.inference_mode():
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            use_cache=True,
        )
    assert out.shape == (len(batch), prompts.shape[1] + tokens)


def requests(prompts: torch.Tensor, samples: int, tokens: int, turn: int) -> list[GenerateRequest]:
    """One group per prompt, with another seed in every turn."""
    return [
        GenerateRequest(f"{turn}-{i}", prompt, SamplingParameters(tokens, n=samples, seed=1000 * turn + i))
        for i, prompt in enumerate(prompts.tolist())
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--prompt-length", type=int, default=24)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.prompts, arguments.samples = 1, 2, 2
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cores:
        os.sched_setaffinity(0, {cores[0]})
    sequences = arguments.prompts * arguments.samples
    total = sequences * arguments.new_tokens
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        model = make_model(directory)
        prompts = torch.randint(1, 64, (arguments.prompts, arguments.prompt_length))
        engine = Engine(load_policy(directory), sequences, arguments.prompt_length + arguments.new_tokens)
        token = secrets.token_urlsafe(16)
        if cores:
            os.sched_setaffinity(0, {cores[-1]})  # of the engine, which inherits it
        process, url = common.embedded_server(directory, directory, token, "--max-sequences", sequences)
        if cores:
            os.sched_setaffinity(0, {cores[0]})
        loop = asyncio.new_event_loop()
        handler = EmbeddedClient(url, token)

        turns = itertools.count()

        def asked() -> list[GenerateRequest]:
            return requests(prompts, arguments.samples, arguments.new_tokens, next(turns))

        async def over_http() -> None:
            answers = await asyncio.gather(*(handler.generate(one, REQUEST_SECONDS) for one in asked()))
            assert sum(len(one.log_probs) for answer in answers for one in answer) == total

        def in_process() -> None:
            answers = engine.generate(asked())
            assert sum(len(one.log_probs) for answer in answers for one in answer) == total

        def theirs() -> None:
            transformers_run(model, prompts, arguments.samples, arguments.new_tokens)

        ways = {
            "transformers": lambda: common.timed(theirs),
            "engine": lambda: common.timed(in_process),
            "http": lambda: common.timed(lambda: loop.run_until_complete(over_http())),
        }
        try:
            seconds = common.interleaved(ways, arguments.repeats, warm_up=2)
            loop.run_until_complete(handler.close())
        finally:
            process.terminate()
            process.wait(30)
            loop.close()
    ratios = {
        name: [reference / own for reference, own in zip(seconds["transformers"], seconds[name], strict=True)]
        for name in ("engine", "http")
    }
    figures = {
        "speed_vs_transformers": round(statistics.median(ratios["engine"]), 3),
        "http_speed_vs_transformers": round(statistics.median(ratios["http"]), 3),
        **{f"{name}_tokens_per_s": round(total / statistics.median(taken)) for name, taken in seconds.items()},
    }
    conditions = {
        **{name: value for name, value in vars(arguments).items() if name != "json"},
        "model": "Qwen3, 4 layers, hidden 128, 4/2 heads of 32, vocabulary 64, float32, random weights",
        "threads": 1,
        "cores": cores,
        "processor": common.processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ranges": {name: (round(min(all_), 3), round(max(all_), 3)) for name, all_ in ratios.items()},
    }
    common.report("generation", figures, {}, conditions, arguments.json)


if __name__ == "__main__":
    main()
