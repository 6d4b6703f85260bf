#!/usr/bin/env bash
# Trains with GRPO; on first use it also sets up the environment.
#
#   ./run_grpo.sh                                                       the debug run on CPU
#   NGPU=2 CONFIG_FILE=my.toml LOG_RANK=0,1 ./run_grpo.sh --training.steps 10
#
#   NGPU          number of trainer ranks, also without GPUs (1)
#   CONFIG_FILE   TOML file (train_configs/debug_cpu.toml)
#   LOG_RANK      ranks whose output is shown (0)
#   MAX_RESTARTS  how often all ranks restart from the newest checkpoint after one was lost (3)
#   PYTHON        the interpreter; see scripts/setup_env.sh
#   EXTRAS        additional extras of pyproject.toml: data (Hugging Face datasets, parquet), wandb, bitsandbytes
# Arguments go to the trainer: --table.key value, --dry-run, --help [TABLE]. Exit code 2: the configuration is wrong.
set -euo pipefail

# It asks a run for an export, and must not end what comes before the run.
trap '' USR1

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ngpu="${NGPU:-1}"
config_file="${CONFIG_FILE:-$root/train_configs/debug_cpu.toml}"
log_rank="${LOG_RANK:-0}"
if [[ ! "$ngpu" =~ ^[1-9][0-9]*$ ]]; then
    echo "NGPU=$ngpu is not a number of ranks (1 or more)" >&2
    exit 2
fi
if [[ ! "${MAX_RESTARTS:-3}" =~ ^[0-9]+$ ]]; then
    echo "MAX_RESTARTS=$MAX_RESTARTS is not a number of restarts (0 or more)" >&2
    exit 2
fi
# torchrun would show nothing at all where there is no such rank.
for rank in ${log_rank//,/ }; do
    if [[ ! "$rank" =~ ^[0-9]+$ ]] || ((10#$rank >= ngpu)); then
        echo "LOG_RANK=$log_rank must be ranks from 0 to $((ngpu - 1)) (NGPU=$ngpu), with commas between them" >&2
        exit 2
    fi
done

source "$root/scripts/setup_env.sh"
setup_env "${EXTRAS:-}"

# Python takes a folder torchtitan of the working directory before this checkout.
if [[ -e torchtitan || -e torchtitan.py ]] && [[ ! . -ef "$root" ]]; then
    found="$("$PYTHON" -c 'import importlib.util; print(importlib.util.find_spec("torchtitan").origin)')"
    if [[ ! "$found" -ef "$root/torchtitan/__init__.py" ]]; then
        echo "error: here torchtitan is another package ($found): start $root/run_grpo.sh from another folder" >&2
        exit 2
    fi
fi

# A single rank keeps the terminal, for the live display; --tee would put a file in between.
output=(--tee 3)
if [[ "$ngpu" == 1 && -t 2 ]]; then output=(--redirects 0); fi
exec "$PYTHON" -m torchtitan.start --standalone --nproc-per-node "$ngpu" --local-ranks-filter "$log_rank" \
    --max-restarts "${MAX_RESTARTS:-3}" --role rank "${output[@]}" -- --job.config_file "$config_file" "$@"
