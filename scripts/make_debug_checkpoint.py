"""Make the debug policy, which ./run_grpo.sh and train() make by themselves.

python scripts/make_debug_checkpoint.py --output outputs/assets/debug_arithmetic
"""

from torchtitan.preflight.debug_checkpoint import main

if __name__ == "__main__":
    main()
