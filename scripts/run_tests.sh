#!/usr/bin/env bash
# Lint, format, types, layers, then the whole test suite. Arguments go to pytest: scripts/run_tests.sh tests/unit_tests -k config
#   --fast                                leave out the real engines and what is marked slow
#   TEST_WORKERS=3                        processes that run tests; by default one more than there are cores, at most four
#   TORCHTITAN_ENGINES_SKIP=vllm,sglang   leave the tests of these engines out (they are installed on first use)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env test,dev

say() { printf '[tests] %s\n' "$*" >&2; }

say "ruff check"
"$PYTHON" -m ruff check .
say "ruff format --check"
"$PYTHON" -m ruff format --check .
say "mypy and lint-imports"
"$PYTHON" -m mypy &
types=$!
"$(dirname "$PYTHON")/lint-imports"
wait "$types"
say "pytest"
# Hundreds of processes are started: compiling our modules and the engines' in each would double their start.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
if [[ -z "${TEST_WORKERS:-}" ]]; then
    TEST_WORKERS="$("$PYTHON" -c 'from torchtitan.utils.machine import usable_cores; print(min(4, 1 + len(usable_cores())))')"
fi
workers=()
# Tests wait for deadlines much of the time: one process more than there are cores. A file stays together, and what
# starts engines in two groups (tests/conftest.py). Those are collected first and are the longest: they have to begin
# first, too.
((TEST_WORKERS > 1)) && workers=(-n "$TEST_WORKERS" --dist loadscope --no-loadscope-reorder)
# Paths among the arguments replace the default, tests (pyproject.toml: testpaths).
exec "$PYTHON" -m pytest "${workers[@]}" --durations=25 --durations-min=5 "$@"
