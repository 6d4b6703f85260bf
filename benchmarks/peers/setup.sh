#!/usr/bin/env bash
# Installs the libraries that the head and step benchmarks compare with, into an environment of their own:
#   benchmarks/peers/setup.sh [directory]        (default: benchmarks/peers/.venv)
# Prints the path of its Python. Installs nothing if the environment is complete.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
directory="${1:-$here/.venv}"
python="$directory/bin/python"
if [ ! -x "$python" ]; then
    "${PYTHON:-python3}" -m venv "$directory" >&2
fi
if ! "$python" -c 'import importlib.metadata as m; assert m.version("trl").startswith("1.16") and m.version("liger-kernel") == "0.8.5"' 2>/dev/null; then
    "$python" -m pip install --quiet --upgrade pip >&2
    # torch first, because another package would pull in a newer build with gigabytes of CUDA.
    "$python" -m pip install --quiet "torch==2.13.0" >&2
    # Liger's package requires triton, which is of no use on a CPU; its losses can be imported without it.
    "$python" -m pip install --quiet "trl==1.16.*" "transformers>=5,<6" "peft>=0.18" numpy safetensors xxhash psutil >&2
    "$python" -m pip install --quiet --no-deps "liger-kernel==0.8.5" >&2
fi
echo "$python"
