"""A language model as a judge, beside a built-in reward. It stands behind an OpenAI API, such as a vLLM server:

    vllm serve Qwen/Qwen3-8B --port 8000
    PYTHONPATH=examples ./run_grpo.sh --rewards.functions arithmetic own_judge:judge --rewards.weights 1 0.2 \
        --rewards.sandbox.network --rewards.timeout_s 60

JUDGE_URL and JUDGE_MODEL name another server and another model. For an API with a key, give Judge the name of its
environment variable (key_variable="JUDGE_API_KEY") and the run `--rewards.sandbox.variables JUDGE_API_KEY`.
"""

import os

from torchtitan.rollout.rewards.judge import Judge

judge = Judge(
    url=os.environ.get("JUDGE_URL", "http://127.0.0.1:8000/v1"),
    model=os.environ.get("JUDGE_MODEL", "Qwen/Qwen3-8B"),
    rubric="Short answers are good.",
    mode="rank",
    timeout_s=50.0,
    agreement_share=0.1,  # of the groups are ranked twice, to see how much the judge agrees with itself
)
