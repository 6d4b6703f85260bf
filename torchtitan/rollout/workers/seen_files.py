"""What an isolated process sees of the machine's files: all of them read-only, save for some folders that look empty.

The home folder is such a folder, because anything in it may hold a key. Shown are the places in it where programs are
installed and data is cached, the folders of PATH, what the run itself needs, and what a table's `readable` names.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterable, Iterator
from pathlib import Path

# The folders that an isolated process can write to.
SCRATCH = ("/tmp", "/dev/shm")
# Where programs are installed and data is cached in a home folder. No program keeps a key in one of these.
PROGRAMS_AND_CACHES = (
    ".bun/bin", ".bun/install", ".cache/huggingface/assets", ".cache/huggingface/datasets", ".cache/huggingface/hub",
    ".cache/huggingface/modules", ".cache/ms-playwright", ".cache/nltk", ".cache/torch", ".cache/torchtitan",
    ".cache/uv", ".cargo/bin", ".deno/bin", ".fnm", ".local/bin", ".local/lib", ".local/pipx/venvs",
    ".local/share/claude/versions", ".local/share/fnm", ".local/share/pipx", ".local/share/pnpm", ".local/share/uv",
    ".npm/_cacache", ".npm/_npx", ".npm-global", ".nvm", ".pyenv", ".rustup", ".volta", "go/bin", "nltk_data",
)  # fmt: skip
# Variables that name another place for what PROGRAMS_AND_CACHES holds, and what of that place is shown.
PLACES = {
    "CARGO_HOME": ("bin",), "HF_DATASETS_CACHE": ("",), "HF_HOME": ("assets", "datasets", "hub", "modules"),
    "HF_HUB_CACHE": ("",), "NLTK_DATA": ("",), "NVM_DIR": ("",), "PLAYWRIGHT_BROWSERS_PATH": ("",), "PYENV_ROOT": ("",),
    "TORCH_HOME": ("",), "UV_PYTHON_INSTALL_DIR": ("",), "UV_TOOL_DIR": ("",), "VOLTA_HOME": ("bin", "tools"),
    "XDG_CACHE_HOME": ("huggingface/datasets", "huggingface/hub", "ms-playwright", "nltk", "torch", "torchtitan", "uv"),
}  # fmt: skip
# Tokens that Hugging Face's library keeps in HF_HOME, and variables that name a file with keys, or several.
TOKENS = ("token", "stored_tokens")
KEY_FILES = ("AWS_SHARED_CREDENTIALS_FILE", "GOOGLE_APPLICATION_CREDENTIALS", "KUBECONFIG", "NETRC")

Mount = tuple[str, str, str]
"""(kind, source, target): "scratch" is an empty folder that can be written to, "empty" one that cannot, "null" an empty
file, and "show" has a file or folder as it is."""


def homes() -> list[Path]:
    """Return the home folder of the environment, and of this user if that is another one."""
    found: list[str] = [os.path.expanduser("~")]
    with contextlib.suppress(KeyError):  # a container's user may have no entry
        found.append(pwd.getpwuid(os.getuid()).pw_dir)
    real = [os.path.realpath(folder) for folder in found]
    return [Path(folder) for folder in dict.fromkeys(real)]


def mounts_over(visible: Iterable[str | Path], hidden: Iterable[Path]) -> list[Mount]:
    """Return what is mounted over the read-only files, outer folders first.

    visible: what is shown even if it lies in /tmp or in a folder that looks empty; hidden: folders that look empty.
    """
    needed = {os.path.abspath(os.path.expanduser(str(path))) for path in visible if str(path)}
    empty = [Path("/run"), *(Path(os.path.realpath(str(path))) for path in (*hidden, *_files_with_keys()))]
    for home in homes():
        programs = list(_programs_of_home(home))
        empty += [path for path in _unseen_of_home(home, needed) if path not in programs]
        needed |= {str(path) for path in programs}
    covered = [*(Path(folder) for folder in SCRATCH), *empty]
    mounts = [("show", path, path) for path in _of_kernel()]
    mounts += [("scratch", "", folder) for folder in SCRATCH]
    # Unlike Path's, these functions take a path that may not be looked at, or is none at all, for a missing one.
    mounts += [("null", "/dev/null", str(path)) for path in empty if os.path.isfile(path)]
    mounts += [("empty", "", str(path)) for path in empty if os.path.isdir(path)]
    shown = {
        Path(target): os.path.realpath(path)
        for path in needed
        for target in (path, os.path.realpath(path))
        if os.path.exists(path)
    }
    for target, source in shown.items():
        # What lies in a folder that is shown is there already, and nothing can be mounted into that one.
        above = [folder for folder in target.parents if folder in covered or folder in shown]
        if above and above[0] in covered:
            mounts.append(("show", source, str(target)))
    return sorted(set(mounts), key=lambda mount: (len(Path(mount[2]).parts), mount))


def is_withheld(path: str) -> bool:
    """Return whether a path exists in a home folder, where an isolated process may not see it."""
    if not os.path.exists(path):
        return False
    folders = Path(os.path.realpath(path)).parents
    return any(home in folders for home in homes())


def _of_kernel() -> Iterator[str]:
    """For the kernel, root of a user namespace may be root: then all but the folders of processes could be written
    to."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit() or path.is_symlink():
            continue
        if path.is_dir() or path.stat().st_mode & 0o222:
            yield str(path)


def _files_with_keys() -> Iterator[str]:
    """Yield files with keys that may lie outside of a home folder."""
    if hub := os.environ.get("HF_HOME", ""):
        yield from (os.path.join(hub, name) for name in TOKENS)
    for variable in KEY_FILES:
        yield from (path for path in os.environ.get(variable, "").split(os.pathsep) if path)


def _unseen_of_home(home: Path, needed: set[str]) -> list[Path]:
    """Return what looks empty of a home folder: all of it, or where a run is started in it, what begins with a dot."""
    scratch = [Path(folder) for folder in SCRATCH]
    if home != Path("/") and any(home == folder or home in folder.parents for folder in scratch):
        return []
    if home != Path("/") and str(home) not in {os.path.realpath(path) for path in needed}:
        return [home]
    with contextlib.suppress(OSError):
        return [Path(os.path.realpath(path)) for path in home.iterdir() if path.name.startswith(".")]
    return []


def _programs_of_home(home: Path) -> Iterator[Path]:
    """Yield where programs and caches lie in a home folder."""
    yield from (home / name for name in PROGRAMS_AND_CACHES)
    for variable, names in PLACES.items():
        for place in filter(None, os.environ.get(variable, "").split(os.pathsep)):
            real = Path(os.path.realpath(place))
            if home in real.parents:
                yield from (real / name for name in names)
    for text in os.environ.get("PATH", "").split(os.pathsep):
        folder = Path(os.path.realpath(text)) if text else home
        if home not in folder.parents:
            continue
        yield from _installed_around(folder, home)
        with contextlib.suppress(OSError):
            for entry in folder.iterdir():
                # A program may be a link to where its package is installed.
                target = Path(os.path.realpath(entry))
                if entry.is_symlink() and home in target.parents and folder not in target.parents:
                    yield target
                    yield from _installed_around(target.parent, home)


def _installed_around(folder: Path, home: Path) -> Iterator[Path]:
    """Yield a folder of programs, with the folder around it where that is an installation (`bin` beside `lib`, a
    package in `node_modules`), but no folder that a program shares with its settings, such as ~/.local or ~/.cargo."""

    def is_of_settings(path: Path) -> bool:
        return path == home or (path.parent == home and path.name.startswith("."))

    if not is_of_settings(folder):
        yield folder
    if folder.name == "bin" and not is_of_settings(folder.parent):
        yield folder.parent
    for above in folder.parents:
        if above.name == "node_modules" and home in above.parents:
            yield above
