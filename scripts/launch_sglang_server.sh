#!/usr/bin/env bash
# Starts an SGLang server with our agent beside it, for runs that name their actors in inference.servers.
#
#   scripts/launch_sglang_server.sh --model DIR [--host 127.0.0.1] [--port 8000] [agent's options] [-- SGLang's options]
#   scripts/launch_sglang_server.sh --model outputs/assets/Qwen3-0.6B --dtype bfloat16 -- --mem-fraction-static 0.8
#
#   --python FILE             the interpreter that has SGLang (default: the one that scripts/install_engine.sh prints)
#   --dry-run                 print the command line and exit
#   TORCHTITAN_ACTOR_TOKEN    the token that a run must send; if not set, one is generated and printed
#   LOG_FILE                  the log of SGLang itself (default: sglang.engine.log)
# The agent's options: python -m torchtitan.inference.engines.sidecar --help
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/engines/launch.sh"
launch_server sglang "$@"
