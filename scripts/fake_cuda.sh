#!/usr/bin/env bash
# Runs the tests marked fake_cuda: what a GPU would run, on tensors of `cuda:3` without data, without a GPU. On its first
# use it makes an environment with torch's CUDA build (2 GB to download, 5 GB on disk). Arguments go to pytest:
#   scripts/fake_cuda.sh -k "mixture or 8b"
#   TORCH_VERSION=2.14.0    the torch to take; this is the one that GPU builds have (scripts/setup_env.sh)
#   FAKE_CUDA=…             where the environment is; default: ~/.cache/torchtitan/fake_cuda-VERSION
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VERSION="${TORCH_VERSION:-2.14.0}"
FAKE_CUDA="${FAKE_CUDA:-${XDG_CACHE_HOME:-$HOME/.cache}/torchtitan/fake_cuda-$VERSION}"
python="$FAKE_CUDA/bin/python"

say() { printf '[fake_cuda] %s\n' "$*" >&2; }

if ! command -v cc >/dev/null; then
    say "a C compiler (cc) is needed for the stub of the driver"
    exit 1
fi
mkdir -p "$FAKE_CUDA"
exec 9>"$FAKE_CUDA.lock"
flock 9
if [[ ! -e "$FAKE_CUDA/complete" ]]; then
    say "making $FAKE_CUDA with the CUDA build of torch $VERSION (about 2 GB)"
    "${PYTHON:-python3}" -m venv "$FAKE_CUDA"
    # Three equals signs: a CPU build has another version string, so that it does not do.
    "$python" -m pip install -q --no-compile "torch===$VERSION"
    touch "$FAKE_CUDA/complete"
fi
# What the package and these tests import, without the checkout itself; again whenever pyproject.toml has changed.
packages="$FAKE_CUDA/packages-$(sha256sum pyproject.toml | cut -c1-12)"
if [[ ! -e "$packages" ]]; then
    mapfile -t dependencies < <("$python" -c 'import pathlib, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
print(*(name for name in project["dependencies"] if not name.startswith("torch")), sep="\n")')
    "$python" -m pip install -q --no-compile "${dependencies[@]}" hypothesis pytest pytest-timeout
    touch "$packages"
fi
# dlopen finds a library that is loaded under the name that it asks for.
cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$FAKE_CUDA/libcuda.so.1" tests/fake_cuda.c
flock -u 9
export TORCHTITAN_FAKE_CUDA=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec env LD_PRELOAD="$FAKE_CUDA/libcuda.so.1" "$python" -m pytest -m fake_cuda -p no:cacheprovider tests/unit_tests/test_fake_cuda.py "$@"
