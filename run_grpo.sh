#!/usr/bin/env bash
# Trains with GRPO; sets the environment up on first use.
#
#   ./run_grpo.sh                                                       the debug run on CPU
#   NGPU=2 CONFIG_FILE=my.toml LOG_RANK=0,1 ./run_grpo.sh --training.steps 10
#
#   NGPU          trainer ranks, also without GPUs (1)
#   CONFIG_FILE   TOML file (train_configs/debug_cpu.toml)
#   LOG_RANK      ranks whose output is shown (0)
#   MAX_RESTARTS  how often all ranks are started again, from the newest checkpoint, after one was lost (3)
#   PYTHON        the interpreter, see scripts/setup_env.sh
#   EXTRAS        extras of pyproject.toml that the run needs besides: data (Hugging Face datasets, parquet), wandb, bitsandbytes
# Everything after that is handed on: --section.key value, --dry-run, --help. Exit code 2: the configuration is wrong.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ngpu="${NGPU:-1}"
config_file="${CONFIG_FILE:-$root/train_configs/debug_cpu.toml}"
log_rank="${LOG_RANK:-0}"
if [[ ! "$ngpu" =~ ^[1-9][0-9]*$ ]]; then
    echo "NGPU=$ngpu is not a number of ranks (1 or more)" >&2
    exit 2
fi

source "$root/scripts/setup_env.sh"
setup_env "${EXTRAS:-}"

arguments=(--job.config_file "$config_file" "$@")

# One quick process reads and checks the configuration: torchrun would turn its exit code 2 into 1, once per rank.
check() { WORLD_SIZE="$ngpu" "$PYTHON" -m torchtitan.preflight "$@" "${arguments[@]}"; }

for argument in "$@"; do
    if [[ "$argument" == --help || "$argument" == -h || "$argument" == --dry-run ]]; then
        check
        exit
    fi
done

# The debug checkpoint is the one input that is made here; it is made once, and read like any other afterwards.
to_make="$(check --missing-assets)"
if [[ -n "$to_make" ]]; then
    echo "[run] making the debug checkpoint $to_make" >&2
    "$PYTHON" "$root/scripts/make_debug_checkpoint.py" --output "$to_make"
    check
fi

echo "[run] $ngpu rank(s), $config_file" >&2
# A single rank on a terminal keeps it, for the live display; --tee would put a pipe in between.
output=(--tee 3)
if [[ "$ngpu" == 1 && -t 2 ]]; then output=(--redirects 0); fi
exec "$PYTHON" -m torchtitan.utils.launch --standalone --nproc-per-node "$ngpu" --local-ranks-filter "$log_rank" \
    --max-restarts "${MAX_RESTARTS:-3}" --role rank "${output[@]}" -m torchtitan.grpo_train "${arguments[@]}"
