#!/usr/bin/env bash
# Writes scripts/requirements.lock: versions and hashes of all that the trainer needs with the extras data and test, for
# every Python from 3.11 on. LOCKED=1 scripts/setup_env.sh installs them.
#
#   PYTHON=.venv/bin/python scripts/lock_requirements.sh
#
# For the Python of that environment, in which the suite should have run, the versions are those that it has. torch and
# the CUDA libraries of its default build are left out: setup_env.sh chooses a build for the machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-.venv/bin/python}"
command -v uv >/dev/null || { echo "uv is not on the PATH: pip install uv" >&2; exit 1; }
known="$(mktemp)"
trap 'rm -f "$known"' EXIT
"$python" -m pip freeze --exclude-editable | grep == | grep -v '^torch==' >"$known"
sed -i "s/\$/ ; python_full_version == '$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])').*'/" "$known"

resolve() {
    uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --extra data --extra test \
        --constraint "$known" --no-header --no-annotate "$@"
}
mapfile -t left_out < <(resolve | sed -nE 's/^((torch|triton|nvidia-|cuda-)[^=]*)==.*/--no-emit-package=\1/p' | sort -u)
# One line for each version, or the file would have thousands.
resolve --generate-hashes "${left_out[@]}" | sed -e ':more' -e '/\\$/{N; s/ *\\\n */ /; b more' -e '}' \
    >scripts/requirements.lock
