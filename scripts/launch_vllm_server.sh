#!/usr/bin/env bash
# Starts a vLLM server with our agent beside it, for runs that find their actors by address (inference.servers).
#
#   scripts/launch_vllm_server.sh --model DIR [--host 127.0.0.1] [--port 8000] [agent's options] [-- vLLM's options]
#   scripts/launch_vllm_server.sh --model outputs/assets/Qwen3-0.6B --dtype bfloat16 -- --max-num-batched-tokens 16384
#
#   --python FILE             the interpreter that has vLLM (default: what scripts/install_engine.sh makes)
#   --dry-run                 print the command line and leave
#   TORCHTITAN_ACTOR_TOKEN    what a run has to send to be let in; made up and printed where it is not set
#   LOG_FILE                  what vLLM itself says (default: vllm.engine.log)
# The agent's options: python -m torchtitan.inference.agent --help
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/engines/launch.sh"
launch_server vllm "$@"
