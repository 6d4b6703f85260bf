"""vLLM's side of benchmarks/generation.py, in vLLM's own environment: one thread, one engine in this process.

Every line on the standard input is a turn; the answer is `seconds S`, of the processor. The first answer
comes when it is ready.
"""

from __future__ import annotations

import json
import os
import sys
import time

# Read when vLLM is imported.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

import torch
from vllm import LLM, SamplingParams


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    prompts, tokens = settings["prompts"], settings["new_tokens"]
    engine = LLM(
        model=settings["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=len(prompts[0]) + tokens,
        max_num_seqs=len(prompts) * settings["samples"],
        logprobs_mode="processed_logprobs",
        # As a run starts it on a CPU.
        enforce_eager=True,
        enable_chunked_prefill=False,
    )
    print("seconds 0", flush=True)
    for _ in sys.stdin:
        sampling = SamplingParams(
            n=settings["samples"],
            max_tokens=tokens,
            temperature=1.0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        started_at = time.process_time()
        answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        seconds = time.process_time() - started_at
        assert all(len(completion.token_ids) == tokens for answer in answers for completion in answer.outputs)
        print(f"seconds {seconds}", flush=True)


if __name__ == "__main__":
    main()
