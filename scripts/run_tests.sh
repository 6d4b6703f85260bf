#!/usr/bin/env bash
# Checks lint, format, types and layers, then runs the tests. Other arguments go to pytest:
#   scripts/run_tests.sh tests/unit_tests -k config
#   --fast                                only the unit tests without a mark
#   --engines                             only the tests with vLLM, SGLang and agents, and no checks
#   --all                                 all tests but the benchmarks: before a release
#   --benchmarks                          run every benchmark in little, too, and look whether it ends with its figures
#   --summary FILE                        write what the end says to this file, as one JSON object
#   TEST_WORKERS=3                        processes that run tests (default: one more than the cores, at most four)
#   TORCHTITAN_ENGINES_SKIP=vllm,sglang   leave out the tests of these engines (which are installed on first use)
# The tiers are in tests/tiers.py and CONTRIBUTING.md.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env test,dev

say() { printf '[tests] %s\n' "$*" >&2; }

if [[ " $* " != *" --engines "* ]]; then
    say "ruff check"
    "$PYTHON" -m ruff check .
    say "ruff format --check"
    "$PYTHON" -m ruff format --check .
    say "mypy and lint-imports"
    "$PYTHON" -m mypy &
    types=$!
    "$(dirname "$PYTHON")/lint-imports"
    wait "$types"
fi
say "pytest"
# The tests start hundreds of processes: without bytecode files, each would take twice as long to start.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
if [[ -z "${TEST_WORKERS:-}" ]]; then
    TEST_WORKERS="$("$PYTHON" -c 'from torchtitan.utils.machine import usable_cores; print(min(4, 1 + len(usable_cores())))')"
fi
workers=()
# Tests often wait for deadlines, so there is one more process than cores. The tests of a file stay together. Those that
# start engines form two groups (tests/conftest.py), which take longest and so are collected and started first.
((TEST_WORKERS > 1)) && workers=(-n "$TEST_WORKERS" --dist loadscope --no-loadscope-reorder)
# Paths among the arguments replace the default, tests (pyproject.toml: testpaths).
exec "$PYTHON" -m pytest "${workers[@]}" --durations=25 --durations-min=5 "$@"
