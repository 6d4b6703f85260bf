"""Make the debug policy, which ./run_grpo.sh and train() make by themselves.

python scripts/make_debug_checkpoint.py --output outputs/assets/debug_arithmetic
"""

from torchtitan.errors import UserError
from torchtitan.preflight.debug_checkpoint import main

if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
