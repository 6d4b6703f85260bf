#!/usr/bin/env bash
# Compares two short runs on two GPUs, of which one trains and the other runs an engine: one run waits for its actors
# after every step, the other does not. Did the engine always hold the weights that the trainer sent, and how much faster is
# the run that does not wait?
#
#   scripts/verify_grpo_2gpu.sh [--training.steps 30 …]       the arguments go to both runs
#
#   ENGINE=vllm          or sglang, or embedded
#   MODEL=DIR            a checkpoint directory (default: the debug checkpoint)
#   STEPS=30             steps of each run
#   LEAST_GAIN=1.0       the check fails below this ratio of tokens/s, without over with waiting (on a CPU: 0)
# Without two GPUs both runs use the CPU, and the output says so. Exit code 1: a check failed.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
say() { printf '[verify] %s\n' "$*" >&2; }
engine="${ENGINE:-vllm}"
steps="${STEPS:-30}"
case "$engine" in vllm | sglang | embedded) ;; *)
    say "ENGINE=$engine must be vllm, sglang or embedded"
    exit 2
    ;;
esac
gpus=0
if command -v nvidia-smi >/dev/null 2>&1; then gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"; fi
kind="$engine"
if ((gpus >= 2)); then
    say "$gpus GPUs: the first one trains, the second one runs $engine"
    least="${LEAST_GAIN:-1.0}"
else
    say "THIS MACHINE HAS $gpus GPUs, NOT 2: running the check on the CPU, where trainer and engine share the cores."
    say "Its throughput says nothing about GPUs."
    export TORCHTITAN_DEVICE=cpu CUDA_VISIBLE_DEVICES=
    kind="$engine-cpu"
    least="${LEAST_GAIN:-0}"
fi
memory=()
if [[ "$engine" != embedded ]]; then
    python="$("$root/scripts/install_engine.sh" "$kind")"
    # The debug checkpoint needs no more on a CPU. A GPU belongs to the engine alone, and MODEL may be large.
    [[ "$kind" != *-cpu ]] || memory=("--inference.$engine.memory_gb" 0.5)
fi

source "$root/scripts/setup_env.sh"
setup_env
model="${MODEL:-$root/torchtitan/assets/debug_arithmetic}"
if [[ ! -f "$model/config.json" ]]; then
    say "MODEL=$model must be a Hugging Face checkpoint directory: it has no config.json"
    exit 2
fi
folder="$(mktemp -d "${TMPDIR:-/tmp}/verify_grpo.XXXXXX")"
say "run folders: $folder"

run() { # $1: name, then more arguments
    local name="$1"
    shift
    say "$name"
    NGPU=1 CONFIG_FILE="$root/train_configs/debug_cpu.toml" "$root/run_grpo.sh" --job.dump_folder "$folder/$name" \
        --job.name "$name" --model.hf_assets_path "$model" --training.steps "$steps" --training.global_batch_size 128 \
        --inference.backend "$engine" --inference.num_actors 1 --inference.startup_timeout_s 900 \
        ${python:+"--inference.$engine.python" "$python"} "${memory[@]}" \
        --weight_sync.verify probe --eval.num_prompts 0 --checkpoint.enable false "$@" >"$folder/$name.log" 2>&1 || {
        tail -n 30 "$folder/$name.log" >&2
        say "$name FAILED ($folder/$name.log)"
        exit 1
    }
}
run waiting --grpo.async_weight_update false "$@"
run not_waiting --grpo.async_weight_update true "$@"
exec "$PYTHON" "$root/scripts/judge_runs.py" --waiting "$folder/waiting/latest" --not-waiting "$folder/not_waiting/latest" \
    --least-gain "$least"
