#!/usr/bin/env bash
# Makes, once, a Python environment with all that this checkout needs; later calls only check it (well under a second).
#
#   scripts/setup_env.sh [EXTRAS]        e.g. scripts/setup_env.sh test,dev
#   source scripts/setup_env.sh && setup_env test,dev && "$PYTHON" …
#
# Which Python: $PYTHON if it is set; else the active virtual environment, if it has everything already; else ./.venv,
# which is made on first use. An environment of your own gets packages installed only if $PYTHON names it.
#
#   PYTHON=…                Python 3.11 or newer; outside a virtual environment, it is used to make ./.venv
#   TORCH_VERSION=…         the torch to install if there is none. Default: 2.14.0 in a CUDA build, whose NCCL is that of
#                           the engines (scripts/engines/pins.json); 2.11.0 for a driver older than 580, as the last
#                           with builds for CUDA 12.8; else 2.13.0
#   TORCH_BACKEND=…         its build: cpu, auto (what the NVIDIA driver can run) or a CUDA such as cu130. Default:
#                           torch's default build with driver 580 or newer, auto with an older one, cpu without a driver
#   LOCKED=1                first the versions of requirements.lock, with the extras data and test; pip checks their hashes
#   SETUP_NOTHING=1         use $PYTHON as it is
#   ALLOW_CUDA_TORCH=1      without an NVIDIA driver: install a CUDA build (gigabytes) if there is no CPU build

SETUP_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

setup_say() { printf '[setup] %s\n' "$*" >&2; }

# Prints which requirements (with extras $2) the interpreter $1 lacks. Exit code 0: none; 1: some; 3: it is unusable.
setup_lacks() { "$1" "$SETUP_ROOT/scripts/check_environment.py" --extras "$2" "${@:3}"; }

setup_in_venv() { "$1" -c 'import sys; raise SystemExit(sys.prefix == sys.base_prefix)'; }

setup_has_driver() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

setup_find_base_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    setup_say "there is no Python 3.11 or newer on the PATH: install one, or set PYTHON=…"
    return 1
}

setup_make_venv() { # $1: the interpreter to make it with
    setup_say "making the virtual environment $SETUP_ROOT/.venv with $1 ($("$1" --version 2>&1))"
    if ! "$1" -m venv --clear "$SETUP_ROOT/.venv" >&2; then
        setup_say "$1 -m venv failed (on Debian and Ubuntu it needs the package python3-venv)"
        return 1
    fi
}

# --no-compile: the interpreter compiles what it imports, while compiling everything would double the set-up time.
# torch is installed first, with its version, so that no other requirement pulls in a newer and bigger one.
setup_install_torch() { # $1: the interpreter
    local version="" backend="${TORCH_BACKEND:-}" driver="" uv=""
    if [[ -z "$backend" ]] && setup_has_driver; then
        driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
        # The CUDA version in torch's default build needs that driver.
        ((${driver%%.*} >= 580)) 2>/dev/null && backend=default || { backend=auto && version=2.11.0; }
        setup_say "found NVIDIA driver ${driver:-of unknown version}: torch's build for it is $backend"
    fi
    if [[ -z "$version" ]]; then [[ -z "$backend" || "$backend" == cpu ]] && version=2.13.0 || version=2.14.0; fi
    version="${TORCH_VERSION:-$version}"
    if [[ "$backend" == default ]]; then
        setup_say "installing torch $version in its default (CUDA) build"
        # A CPU build satisfies the requirement, so pip would keep it: replace it first (pip downloads, then removes).
        "$1" -m pip install -qq --no-compile --force-reinstall --no-deps "torch==$version" >&2 &&
            "$1" -m pip install -qq --no-compile "torch==$version" >&2
        return
    fi
    if [[ -n "$backend" && "$backend" != cpu ]]; then
        setup_say "installing torch $version with the build $backend"
        "$1" -m pip install -qq --no-compile uv >&2 &&
            "$(dirname "$1")/uv" pip install --quiet --python "$1" --torch-backend="$backend" \
                --reinstall-package torch "torch==$version" >&2
        return
    fi
    if [[ "$(uname -s)" == Darwin ]]; then
        setup_say "macOS: installing torch $version"
        "$1" -m pip install -qq --no-compile "torch==$version" >&2
        return
    fi
    setup_say "${TORCH_BACKEND:+TORCH_BACKEND=}${TORCH_BACKEND:-no NVIDIA driver}: looking for a CPU build of torch $version"
    # The local version +cpu matches CPU builds only, so this cannot install the big CUDA build.
    if "$1" -m pip install -qq --no-compile "torch==$version+cpu" 2>/dev/null >&2; then
        return 0
    fi
    setup_say "pip's configured indexes have none; trying uv --torch-backend=cpu"
    if command -v uv >/dev/null 2>&1; then
        uv="$(command -v uv)"
    elif "$1" -m pip install -qq --no-compile uv >&2; then
        uv="$(dirname "$1")/uv"
    fi
    if [[ -n "$uv" ]] && "$uv" pip install --quiet --python "$1" --torch-backend=cpu "torch==$version" >&2; then
        return 0
    fi
    if [[ "${ALLOW_CUDA_TORCH:-0}" == 1 ]]; then
        setup_say "ALLOW_CUDA_TORCH=1: installing the default build of torch $version (several GB of CUDA libraries)"
        "$1" -m pip install -qq --no-compile "torch==$version" >&2
        return
    fi
    setup_say "no CPU build of torch $version is available here, and this machine has no NVIDIA driver. Point pip at a" \
        "CPU wheel (PIP_FIND_LINKS=…), or accept several GB of CUDA libraries with ALLOW_CUDA_TORCH=1"
    return 1
}

setup_install() { # $1: the interpreter, $2: extras
    local missing started=$SECONDS
    "$1" -m pip --version >/dev/null 2>&1 || "$1" -m ensurepip >&2 || return 1
    missing="$(setup_lacks "$1" "$2" --only torch)" && missing=""
    if [[ -n "$missing" ]]; then
        setup_install_torch "$1" || return 1
    fi
    setup_say "torch $("$1" -W ignore -c 'import torch; v = torch.version; print(torch.__version__, "(CUDA build)" if v.cuda else "(CPU build)")')"
    if [[ "${LOCKED:-0}" == 1 ]]; then
        setup_say "installing the versions of scripts/requirements.lock"
        "$1" -m pip install -qq --no-compile --no-deps --require-hashes -r "$SETUP_ROOT/scripts/requirements.lock" >&2 ||
            return 1
    fi
    setup_say "installing this checkout${2:+ with the extras $2} and its requirements"
    (cd "$SETUP_ROOT" && "$1" -m pip install -qq --no-compile --editable ".${2:+[$2]}" >&2) || return 1
    # If Python may not write bytecode, every process would compile torch again and take twice as long to start.
    if [[ -n "${PYTHONDONTWRITEBYTECODE:-}" ]]; then
        setup_say "PYTHONDONTWRITEBYTECODE is set: compiling once, of the installed packages, what a run imports"
        setup_say "$(cd "$SETUP_ROOT" && PYTHONPATH="$SETUP_ROOT" "$1" scripts/write_bytecode.py)" || return 1
    fi
    setup_say "environment ready after $((SECONDS - started)) s"
}

# Sets PYTHON. $1: extras, e.g. test,dev
setup_env() {
    local extras="${1:-}" lacking base
    local venv="$SETUP_ROOT/.venv/bin/python"
    base=""
    if [[ "${SETUP_NOTHING:-0}" == 1 && -n "${PYTHON:-}" ]]; then
        export PYTHON PYTHONPATH="$SETUP_ROOT${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    if [[ -n "${PYTHON:-}" ]]; then
        if ! command -v "$PYTHON" >/dev/null 2>&1; then
            setup_say "PYTHON=$PYTHON: there is no such program"
            return 1
        fi
        PYTHON="$(command -v "$PYTHON")"
        if lacking="$(setup_lacks "$PYTHON" "$extras")"; then
            setup_say "using $PYTHON (from PYTHON=…)"
        elif [[ $? -eq 3 ]]; then
            setup_say "$lacking"
            return 1
        elif setup_in_venv "$PYTHON"; then
            setup_say "PYTHON=$PYTHON: installing what it lacks ($(tr '\n' ',' <<<"$lacking" | sed 's/,$//; s/,/, /g'))"
            setup_install "$PYTHON" "$extras" || return 1
        else
            base="$PYTHON"
        fi
    elif [[ -n "${VIRTUAL_ENV:-}" && -x "$VIRTUAL_ENV/bin/python" && ! "$VIRTUAL_ENV" -ef "$SETUP_ROOT/.venv" ]]; then
        PYTHON="$VIRTUAL_ENV/bin/python"
        if lacking="$(setup_lacks "$PYTHON" "$extras")"; then
            setup_say "using the active environment $VIRTUAL_ENV"
        elif [[ $? -eq 3 ]]; then
            setup_say "$lacking"
            return 1
        else
            setup_say "the active environment $VIRTUAL_ENV lacks $(wc -l <<<"$lacking") requirements; using ./.venv instead"
            PYTHON=""
        fi
    fi
    if [[ -z "${PYTHON:-}" || -n "$base" ]]; then
        # One at a time: two commands may start together on a fresh clone.
        if command -v flock >/dev/null 2>&1; then
            (flock 9 && setup_own_venv "$extras" "$base") 9<"$SETUP_ROOT" || return 1
        else
            (setup_own_venv "$extras" "$base") || return 1
        fi
        PYTHON="$venv"
    fi
    # torchtitan is this checkout, whatever the working directory.
    export PYTHONPATH="$SETUP_ROOT${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHON
}

setup_own_venv() { # $1: extras, $2: the interpreter to make it with, or empty
    local venv="$SETUP_ROOT/.venv/bin/python" base="$2" lacking status
    if [[ ! -x "$venv" ]] || ! "$venv" -c '' >/dev/null 2>&1; then
        [[ -n "$base" ]] || base="$(setup_find_base_python)" || return 1
        setup_make_venv "$base" || return 1
    elif [[ -n "$base" ]] && ! cmp -s <("$base" --version 2>&1) <("$venv" --version 2>&1); then
        setup_say "./.venv was made with $("$venv" --version 2>&1), but PYTHON=$base is $("$base" --version 2>&1): remove ./.venv to change it"
        return 1
    fi
    lacking="$(setup_lacks "$venv" "$1")" && status=0 || status=$?
    if [[ $status -eq 3 ]]; then
        setup_say "$lacking"
        return 1
    elif [[ $status -ne 0 ]]; then
        setup_install "$venv" "$1" || return 1
        if ! lacking="$(setup_lacks "$venv" "$1")"; then
            setup_say "the installation is incomplete: $lacking"
            return 1
        fi
    fi
}

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    set -euo pipefail
    setup_env "${1:-}"
    setup_say "$PYTHON"
fi
