#!/usr/bin/env bash
# Starts a vLLM server with our agent beside it, for runs that name their actors in inference.servers.
#
#   scripts/launch_vllm_server.sh --model DIR [--host 127.0.0.1] [--port 8000] [agent's options] [-- vLLM's options]
#   scripts/launch_vllm_server.sh --model outputs/assets/Qwen3-0.6B --dtype bfloat16 -- --max-num-batched-tokens 16384
#
#   --python FILE             the interpreter that has vLLM (default: the one that scripts/install_engine.sh prints)
#   --dry-run                 print the command line and exit
#   TORCHTITAN_ACTOR_TOKEN    the token that a run must send; if not set, one is generated and printed
#   LOG_FILE                  the log of vLLM itself (default: vllm.engine.log)
# The agent's options: python -m torchtitan.inference.engines.sidecar --help
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/engines/launch.sh"
launch_server vllm "$@"
