"""What hostile code attempts in a worker: run by a reward, a tool, an environment, an agent and an agent's command."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.patience import PATIENCE_S

About = dict[str, Any]
"""What an attacker might know: `pid` of the trainer, `mark` (a key of the run), folders `run`, `home` and `code`, a
`port`, an `abstract` socket and a `socket` in a file, and the `keyring` entry that holds the key"""

# System calls of x86-64, and the keyring of the session.
KEYCTL, KEYCTL_SEARCH, KEYCTL_READ, SESSION_KEYRING = 250, 10, 11, -3
LIBC = ctypes.CDLL(None, use_errno=True)


def _readable(path: str, mark: str) -> bool:
    with contextlib.suppress(OSError):
        return mark in Path(path).read_text(errors="replace")
    return False


def _writable(path: str) -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        return True
    return False


def _connected(family: int, address: Any, kind: int = socket.SOCK_STREAM) -> bool:
    with contextlib.suppress(OSError), socket.socket(family, kind) as connection:
        connection.settimeout(2)
        connection.connect(address)
        return True
    return False


def _signalled(about: About) -> bool:
    with contextlib.suppress(OSError):
        os.kill(about["pid"], 0)
        # In the process's own namespace the number may be one of its own.
        return Path(f"/proc/{about['pid']}/cmdline").read_text() == about["command"]
    return False


def _linked(about: About) -> bool:
    link = Path(os.environ.get("TMPDIR", "/tmp")) / f"link-{os.getpid()}-{time.monotonic_ns()}"
    link.symlink_to(f"{about['run']}/journal.jsonl")
    return _readable(str(link), about["mark"]) or _writable(str(link))


def _hard_linked(about: About) -> bool:
    link = f"{about['run']}/link-{os.getpid()}"
    with contextlib.suppress(OSError):
        os.link(f"{about['run']}/journal.jsonl", link)
        os.remove(link)
        return True
    return False


def _remounted(*words: str) -> bool:
    return not subprocess.run([*words, "mount", "-o", "remount,bind,rw", "/"], capture_output=True).returncode


def _uncovered(about: About) -> bool:
    words = ["unshare", "-rm", "sh", "-c", f"umount {about['run']} && grep -q {about['mark']} {about['run']}/*"]
    return not subprocess.run(words, capture_output=True).returncode


def _has_device() -> bool:
    path = f"/dev/shm/device-{os.getpid()}"
    try:
        os.mknod(path, 0o600 | 0o060000, os.makedev(8, 0))
        os.remove(path)
        return True
    except OSError:
        return any(os.path.exists(f"/dev/{name}") for name in ("mem", "kmsg", "sda", "vda", "nvme0n1"))


def _traced(about: About) -> bool:
    return bool(ctypes.CDLL(None).ptrace(0x4206, about["pid"], 0, 0) == 0 and _signalled(about))  # PTRACE_SEIZE


def _read_keyring(about: About) -> bool:
    if os.uname().machine != "x86_64":
        return False
    number = LIBC.syscall(KEYCTL, KEYCTL_SEARCH, SESSION_KEYRING, b"user", about["keyring"].encode(), 0)
    value = ctypes.create_string_buffer(64)
    return number > 0 and LIBC.syscall(KEYCTL, KEYCTL_READ, number, value, 64, 0) > 0


def left_behind(home: str) -> str:
    """What a process that was left behind by a test with this home folder has on its command line."""
    return f"left-behind-by-{home}"


def _found_what_was_left(about: About) -> bool:
    # What was killed takes a moment to go, and longer on a busy machine.
    deadline = time.monotonic() + PATIENCE_S / 2
    mark = left_behind(about["home"])
    while any(_readable(f"/proc/{pid}/cmdline", mark) for pid in os.listdir("/proc") if pid.isdigit()):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False


def _raised_clock() -> bool:
    with contextlib.suppress(OSError):
        os.nice(-5)
        return True
    return False


def _resolved() -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("localhost.localdomain.example.com", 80), timeout=2).close()
        return True
    return False


REACHES: dict[str, Callable[[About], bool]] = {
    "read a key in its environment": lambda about: about["mark"] in repr(os.environ),
    "read a key in another process's environment": lambda about: any(
        _readable(f"/proc/{pid}/environ", about["mark"]) for pid in os.listdir("/proc") if pid.isdigit()
    ),
    "read a key in the home folder": lambda about: any(
        _readable(f"{about['home']}/{name}", about["mark"]) for name in (".ssh/id", ".pgpass", ".agent/login", "notes")
    ),
    "read a key in a keyring": _read_keyring,
    "find what an earlier call has left behind": _found_what_was_left,
    "read the run's folder": lambda about: _readable(f"{about['run']}/journal.jsonl", about["mark"]),
    "change the run's folder": lambda about: _writable(f"{about['run']}/journal.jsonl"),
    "read the run's folder through a symbolic link": _linked,
    "read the trainer's files through /proc": lambda about: _readable(
        f"/proc/{about['pid']}/root{about['run']}/journal.jsonl", about["mark"]
    ),
    "see the trainer": lambda about: _readable(f"/proc/{about['pid']}/cmdline", "pytest"),
    "signal the trainer": lambda about: _signalled(about),
    "trace the trainer": lambda about: _traced(about),
    "connect to a port of this machine": lambda about: _connected(socket.AF_INET, ("127.0.0.1", about["port"])),
    "connect to another machine": lambda about: _connected(socket.AF_INET, ("192.0.2.1", 9), socket.SOCK_DGRAM),
    "look up a name": lambda about: _resolved(),
    "connect to an abstract socket": lambda about: _connected(socket.AF_UNIX, about["abstract"]),
    "connect to a socket in /tmp": lambda about: _connected(socket.AF_UNIX, about["socket"]),
    "change the reward's file": lambda about: _writable(__file__),
    "change the trainer's code": lambda about: _writable(f"{about['code']}/grpo_train.py"),
    "leave a start-up file": lambda about: _writable(f"{about['home']}/.profile"),
    "make a hard link": _hard_linked,
    "make files writable again": lambda about: _remounted() or _remounted("unshare", "-rm"),
    "uncover the run's folder": _uncovered,
    "make or find a device": lambda about: _has_device(),
    "set the kernel's options": lambda about: any(
        _writable(f"/proc/{name}") for name in ("sys/kernel/core_pattern", "sysrq-trigger", "mtrr")
    ),
    "take processor time from others": lambda about: _raised_clock(),
}
"""What must not be possible, and whether it was"""


def fill(folder: str) -> str:
    """Write 1 GB, of which less fits."""
    try:
        with open(f"{folder}/full-{os.getpid()}", "wb") as file:
            for _ in range(1024):
                file.write(bytes(1 << 20))
        return "reached"
    except OSError as error:
        return f"refused: {error.strerror}"
    finally:
        os.remove(f"{folder}/full-{os.getpid()}")


def bomb() -> str:
    """Fork for ever."""
    while True:
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)


def shout() -> str:
    for _ in range(1024):
        os.write(2, b"x" * (1 << 20))
    return "done"


def forge() -> str:
    """Claim a message of 4 GiB where replies are written."""
    for descriptor in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\xff" * 8)
    return "done"


def daemonise() -> str:
    """Leave something behind in a session of its own."""
    mark = left_behind(os.environ["HOME"])
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", mark], start_new_session=True)
    return "done"


def hoard() -> str:
    """Write 1.5 GB to a file in memory that is not mapped, after asking to be spared when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")
    file = os.memfd_create("hoard")
    for _ in range(1500):
        os.write(file, b"x" * (1 << 20))
    time.sleep(60)
    return "reached"


def share() -> str:
    """Fill shared memory that nobody is attached to, which outlives this process."""
    LIBC.shmat.restype = ctypes.c_void_p
    for _ in range(3):
        number = LIBC.shmget(0, 400 << 20, 0o1600)
        if number < 0:
            return f"refused: {os.strerror(ctypes.get_errno())}"
        address = LIBC.shmat(number, None, 0)
        ctypes.memset(address, 1, 400 << 20)
        LIBC.shmdt(ctypes.c_void_p(address))
    return "reached"


def eat() -> str:
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    held = []
    while True:
        held.append(bytearray(b"x" * (1 << 26)))


COSTS: dict[str, Callable[[], str]] = {
    "fill /tmp": lambda: fill("/tmp"),
    "fill /dev/shm": lambda: fill("/dev/shm"),
    "print 1 GB": shout,
    "return 80 MB": lambda: "x" * 80_000_000,
    "forge a message of 4 GiB": forge,
    "fork for ever": bomb,
    "eat all memory, with its limit lifted": eat,
    "fill a file in memory": hoard,
    "fill shared memory": share,
    "leave a process behind": daemonise,
    "kill all it can": lambda: str(os.kill(-1, signal.SIGKILL)),
    "hang": lambda: str(time.sleep(600)),
}
"""What costs the call at most"""


def reached(about: About) -> list[str]:
    return [name for name, attempt in REACHES.items() if attempt(about)]


def reward(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
    """Log what each completion's attempts have reached: all of REACHES, or one of COSTS."""
    reports = [COSTS[text]() if text in COSTS else json.dumps(reached(json.loads(text))) for text in completions]
    log_extra("said", reports)
    log_metric("".join(reports), 1.0)  # not cut, as columns are
    return [1.0] * len(completions)


def tool(about: str) -> str:
    """Attempt everything.

    Args:
        about: what is known.
    """
    return COSTS[about]() if about in COSTS else json.dumps(reached(json.loads(about)))


class Environment:
    def reset(self, **row: Any) -> None: ...

    def step(self, action: str) -> tuple[str, float, bool]:
        return tool(action), 0.0, True


def agent(base_url: str, row: About) -> float:
    """The gateway, and nothing else, must be reached."""
    place = urlsplit(base_url)
    found = reached(row) + ["not the gateway"] * (not _connected(socket.AF_INET, (place.hostname, place.port)))
    print(found, file=sys.stderr)
    return float(len(found))


if __name__ == "__main__":
    print(agent(os.environ["OPENAI_BASE_URL"], json.load(sys.stdin)))
