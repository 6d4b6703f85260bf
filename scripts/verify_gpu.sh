#!/usr/bin/env bash
# What nothing but GPUs can show, on this machine with 1, 2 or 8 of them: one command, and one file to send back.
#
#   scripts/verify_gpu.sh [--minutes 240] [--only NAME …] [--again]
#
# Runs the checks of scripts/verify_gpu.toml that fit the number of GPUs, the most important ones first, each with a
# deadline; prints what was expected and what was measured, and writes outputs/verify_gpu/results.json with it, beside a
# log for each. Called again it goes on where it was: what has passed at this commit is not run again (--again does).
#
#   --minutes N    start no check after so long
#   --only NAME    these alone
#   PYTHON         see scripts/setup_env.sh; engines are installed on first use (scripts/install_engine.sh)
# Exit code 0: all that fits has passed; 1: something has not; 2: no GPU here.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
if ! command -v nvidia-smi >/dev/null 2>&1 || ! nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    echo "[verify] nvidia-smi lists no GPU here: there is nothing to verify" >&2
    exit 2
fi
source "$root/scripts/setup_env.sh"
setup_env test
exec "$PYTHON" "$root/scripts/verify_gpu.py" "$@"
