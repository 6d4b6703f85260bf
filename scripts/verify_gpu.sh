#!/usr/bin/env bash
# Verifies what only GPUs can show, on a machine with 1, 2 or 8 of them: one command, and one file to send back.
#
#   scripts/verify_gpu.sh --quick                      ten minutes on one GPU; installs vLLM first
#   scripts/verify_gpu.sh [--minutes 240] [--only NAME …] [--again]
#
# Runs the checks of scripts/verify_gpu.toml that fit the number of GPUs, the most important ones first, each with a
# deadline. It prints what was expected and what was measured, and writes both to outputs/verify_gpu/results.json,
# beside a log of each check and a table for docs/gpu.md (results.md). When called again, it skips the checks that have passed at this commit (unless with --again).
#
#   --quick        the checks of scripts/verify_gpu_quick.toml; results in outputs/verify_gpu_quick
#   --minutes N    start no check after this time
#   --only NAME    run these checks only
#   --no-engines   install nothing and leave out what needs vLLM or SGLang: for a machine without a network, whose PYTHON
#                  has torch and what the package imports
#   PYTHON         see scripts/setup_env.sh; scripts/install_engine.sh installs engines on first use
# Exit code 0: all checks that fit have passed; 1: one has not; 2: there is no GPU here.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
if ! command -v nvidia-smi >/dev/null 2>&1 || ! nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    echo "[verify] nvidia-smi lists no GPU here: there is nothing to verify" >&2
    exit 2
fi
source "$root/scripts/setup_env.sh"
if [[ " $* " == *" --no-engines "* ]]; then
    export PYTHON="${PYTHON:-$(command -v python3)}" PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" SETUP_NOTHING=1
else
    setup_env test
fi
# Its minutes are not a check's.
case " $* " in *" --no-engines "*) ;; *" --quick "*) scripts/install_engine.sh vllm >/dev/null || echo "[verify] vLLM cannot be had here" >&2 ;; esac
exec "$PYTHON" "$root/scripts/verify_gpu.py" "$@"
