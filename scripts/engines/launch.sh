#!/usr/bin/env bash
# Sourced by scripts/launch_vllm_server.sh and scripts/launch_sglang_server.sh: starts an engine's server with our agent
# beside it, for inference.servers. Other options go to the agent, and everything after -- to the engine.

LAUNCH_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# The run sends this as its bearer token (torchtitan.inference.actor_client).
export TORCHTITAN_ACTOR_TOKEN="${TORCHTITAN_ACTOR_TOKEN:-}"

launch_server() { # $1: vllm or sglang, then the command line
    local engine="$1" host=127.0.0.1 port=8000 model="" dry="" named="" kind made=""
    shift
    local say=(printf "[$engine] %s\n")
    local ours=() theirs=()
    while (($#)); do
        case "$1" in
            --help | -h)
                sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
                exit 0
                ;;
            --dry-run) dry=1 ;;
            --)
                theirs=("$@")
                break
                ;;
            --model=* | --host=* | --port=* | --python=*)
                set -- "${1%%=*}" "${1#*=}" "${@:2}"
                continue
                ;;
            --model | --host | --port | --python)
                if (($# < 2)); then
                    "${say[@]}" "$1 needs a value" >&2
                    exit 2
                fi
                case "$1" in
                    --model) model="$2" ;;
                    --host) host="$2" ;;
                    --port) port="$2" ;;
                    --python) named="$2" ;;
                esac
                shift
                ;;
            *) ours+=("$1") ;;
        esac
        shift
    done
    if [[ -z "$model" || ! -f "$model/config.json" ]]; then
        "${say[@]}" "--model ${model:-(nothing)}: must be a Hugging Face checkpoint directory (config.json)" >&2
        exit 2
    fi
    if [[ -z "$TORCHTITAN_ACTOR_TOKEN" && "$host" != 127.* && "$host" != localhost && "$host" != ::1 ]]; then
        "${say[@]}" "--host $host accepts other machines: set the same TORCHTITAN_ACTOR_TOKEN here and where the run starts" >&2
        exit 2
    fi
    if [[ -z "$TORCHTITAN_ACTOR_TOKEN" ]]; then
        made=1
        TORCHTITAN_ACTOR_TOKEN="$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"
    fi
    if [[ -z "$named" && -z "$dry" ]]; then
        kind="$engine-cpu"
        command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && kind="$engine"
        named="$("$LAUNCH_ROOT/scripts/install_engine.sh" "$kind")"
    fi
    if [[ -z "$dry" ]]; then
        source "$LAUNCH_ROOT/scripts/setup_env.sh"
        setup_env
    fi
    local command=("${PYTHON:-python}" -m torchtitan.inference.engines.sidecar --engine "$engine" --model "$model"
        --host "$host" --port "$port" --token-env TORCHTITAN_ACTOR_TOKEN --log-file "${LOG_FILE:-$engine.engine.log}"
        ${named:+--python "$named"} "${ours[@]}" "${theirs[@]}")
    printf '[%s]' "$engine" >&2
    printf ' %q' "${command[@]}" >&2
    printf '\n' >&2
    [[ -n "$dry" ]] && exit 0
    [[ -n "$made" ]] && "${say[@]}" "set this where the run starts: export TORCHTITAN_ACTOR_TOKEN=$TORCHTITAN_ACTOR_TOKEN" >&2
    exec "${command[@]}"
}
