"""Import what a run imports, and write the bytecode of installed packages for later processes, none of this checkout.

scripts/setup_env.sh calls it where PYTHONDONTWRITEBYTECODE is set, since each process would compile torch again.
Compiling all that is installed would take four times as long.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
from importlib.machinery import SourceFileLoader

# What the processes of a run import; TensorBoard only once it is used.
MODULES = (
    "torchtitan.trainer.job",
    "torchtitan.inference.engines.embedded.__main__",
    "torchtitan.rollout.rewards.reward_worker",
    "torch.utils.tensorboard",
)


class InstalledPackages:
    """In the place of SourceFileLoader.set_data: keeps what is written to the folder of installed packages."""

    def __init__(self) -> None:
        self.folders = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        self.write = SourceFileLoader.set_data
        self.count = 0

    def set_data(self, loader: SourceFileLoader, path: str, data: bytes, **options: int) -> None:
        if path.startswith(self.folders):
            self.write(loader, path, data, **options)
            self.count += 1


def main() -> None:
    packages = InstalledPackages()
    SourceFileLoader.set_data = lambda loader, path, data, **options: packages.set_data(loader, path, data, **options)
    sys.dont_write_bytecode = False
    for module in MODULES:
        importlib.import_module(module)
    print(f"{packages.count} files compiled")


if __name__ == "__main__":
    main()
