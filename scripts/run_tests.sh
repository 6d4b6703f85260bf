#!/usr/bin/env bash
# Lint, format, types, then the whole test suite. Arguments go to pytest: scripts/run_tests.sh tests/unit_tests -k config
#   TEST_WORKERS=2   run tests in that many processes
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env test,dev

say() { printf '[tests] %s\n' "$*" >&2; }

say "ruff check"
"$PYTHON" -m ruff check .
say "ruff format --check"
"$PYTHON" -m ruff format --check .
say "mypy"
"$PYTHON" -m mypy
say "pytest"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
workers=()
[[ -n "${TEST_WORKERS:-}" ]] && workers=(-n "$TEST_WORKERS" --dist loadfile)
# Paths among the arguments replace the default, tests (pyproject.toml: testpaths).
exec "$PYTHON" -m pytest "${workers[@]}" "$@"
