"""What of pyproject.toml's requirements does this interpreter lack? Standard library only; imports none of them.

    python scripts/check_environment.py [--extras test,dev] [--only NAME]

Prints one line per requirement that is missing or has another version (exit code 1), or nothing (exit code 0). Exit
code 3 with one line: this interpreter cannot be used at all.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_PYTHON = (3, 11)


def read_requirements(extras: list[str]) -> list[str]:
    """Requirement strings of the project and of the named extras."""
    # Not tomli, because this runs before anything is installed; and only a Python that is new enough has it.
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = list(project["dependencies"])
    for name in extras:
        if name not in project["optional-dependencies"]:
            raise SystemExit(f"{ROOT / 'pyproject.toml'} declares no list {name!r}")
        found += project["optional-dependencies"][name]
    return found


def version_numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version, without its local part: 2.13.0+cpu -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def complaint(requirement: str) -> str | None:
    """One line about a requirement that does not hold here, or None."""
    match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(.*)", requirement)
    if match is None:
        raise SystemExit(f"unreadable requirement {requirement!r} in {ROOT / 'pyproject.toml'}")
    name, bounds = match.group(1), match.group(2)
    try:
        installed = installed_version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is missing"
    if name == "torch" and installed.endswith("+cpu") and gpu_is_wanted():
        return f"torch {installed} is a CPU build, and this machine has an NVIDIA GPU (TORCH_BACKEND=cpu keeps it)"
    numbers = version_numbers(installed)
    for operator, version in re.findall(r"(>=|<)\s*([0-9.]+)", bounds):
        wanted = version_numbers(version)
        if (numbers >= wanted) != (operator == ">="):
            return f"{name} {installed} is installed, {bounds.strip()} is needed"
    return None


def installed_version(name: str) -> str:
    """As metadata.version(), which would also parse the description that follows. Raises PackageNotFoundError."""
    head = (metadata.distribution(name).read_text("METADATA") or "").partition("\n\n")[0]
    line = re.search(r"^Version: *(.+?) *$", head, re.MULTILINE)
    return metadata.version(name) if line is None else line.group(1)


def gpu_is_wanted() -> bool:
    """Whether the NVIDIA driver lists a GPU, and neither TORCH_BACKEND nor TORCHTITAN_DEVICE says cpu."""
    if "cpu" in (os.environ.get("TORCH_BACKEND"), os.environ.get("TORCHTITAN_DEVICE")):
        return False
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.startswith("GPU ")


def other_torchtitan() -> str | None:
    """Where `torchtitan` is found other than in this checkout, or None."""
    # The folder of this script comes first on sys.path; it holds no packages, so what is found is what is installed.
    from importlib.util import find_spec

    spec = find_spec("torchtitan")
    if spec is None:
        return None
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    for place in places:
        if not Path(place).resolve().is_relative_to(ROOT / "torchtitan"):
            return str(Path(place).parent if spec.origin else place)
    return None


def main() -> int:
    if sys.version_info < MINIMUM_PYTHON:
        print(f"Python {sys.version.split()[0]} at {sys.executable} is too old; 3.11 or newer is needed (set PYTHON=…)")
        return 3
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", default="")
    parser.add_argument("--only", default="", help="look at this requirement alone")
    arguments = parser.parse_args()
    other = other_torchtitan()
    if other is not None:
        print(f"`torchtitan` resolves to {other}, not to this checkout ({ROOT}): uninstall it or use another venv")
        return 3
    requirements = read_requirements([extra for extra in arguments.extras.split(",") if extra])
    if arguments.only:
        requirements = [item for item in requirements if re.match(rf"{re.escape(arguments.only)}\b", item)]
    complaints = [line for line in map(complaint, requirements) if line is not None]
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
