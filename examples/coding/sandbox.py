"""Runs a command on files of its own, shut in by bubblewrap.

Inside there are the system's programs, one Python environment, and a /tmp in memory: no other files, no other
processes, no variables but those given, and no network but one address outside, if that is asked for. All of it, with
every process that the command has started, ends with the process that called `run`, however that one ends.
"""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

from torchtitan.rollout.workers.port_forward import PortForward

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/passwd", "/etc/hosts")
# Of /tmp, and of what is brought back from it.
ROOM, FILES, LETTERS = 1 << 28, 100, 1 << 20
# Hands the socket of the way out over, reads {path: text}, runs the command beside them, and prints what it has left.
INSIDE = """
import json, os, socket, subprocess, sys
from itertools import islice
from pathlib import Path

variables = {}
if len(sys.argv) > 1:
    with socket.socket(fileno=int(sys.argv[1])) as outside, socket.create_server(("127.0.0.1", 0)) as listener:
        socket.send_fds(outside, [b"x"], [listener.fileno()])
        variables["OPENAI_BASE_URL"] = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
print("ready", flush=True)
files, command, git, keep, count, letters = json.load(sys.stdin)
os.makedirs("/tmp/repository")
os.chdir("/tmp/repository")
for path, text in files.items():
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
if git:
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "."], check=True)
    subprocess.run(["git", "-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "-qm", "Begin"], check=True)
code = subprocess.run(
    command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env={**os.environ, **variables}
).returncode
left = [path for path in islice(Path(".").glob(keep), count) if path.is_file() and not path.is_symlink()]
texts = {str(path): path.read_text(errors="replace") for path in left if path.stat().st_size <= letters}
print(json.dumps([code, texts]))
"""


@dataclass
class Done:
    """What a command has left."""

    code: int
    """Its exit code, negative for a signal"""
    files: dict[str, str]
    """Path -> text of those that were kept"""


def agent_python():
    """Return the Python that has mini-swe-agent and pytest, as scripts/install_engine.sh makes it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("TORCHTITAN_ENGINES") or cache / "torchtitan" / "engines") / "mini-swe-agent"
    if not (home / ".complete").exists():
        raise SystemExit("mini-swe-agent is not installed: run scripts/install_engine.sh mini-swe-agent")
    return home / "bin" / "python"


async def run(python, files, command, keep, *, git=False, variables=None, gateway=None, timeout_s=None):
    """Run a command in a folder of files {path: text}.

    Args:
        python: of the virtual environment that the command finds first on its PATH.
        keep: a pattern; the files that match it afterwards come back.
        git: make the folder a git repository first.
        variables: of its environment.
        gateway: (host, port), which the command reaches at OPENAI_BASE_URL.
        timeout_s: after which it is killed, and asyncio.TimeoutError raised.

    Raises RuntimeError if it could not run.
    """
    home = Path(python).parent.parent
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    words += ["--dev", "/dev", "--proc", "/proc", "--size", str(ROOM), "--tmpfs", "/tmp"]
    for folder in (*SYSTEM, str(home), _base(home)):
        words += ["--ro-bind-try", folder, folder]
    own = {"PATH": f"{home}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp/home", "LANG": "C.UTF-8"}
    for name, value in {**own, "PYTHONDONTWRITEBYTECODE": "1", **(variables or {})}.items():
        words += ["--setenv", name, value]
    words += ["--chdir", "/tmp", "--", f"{home}/bin/python", "-I", "-c", INSIDE]
    forward, given = PortForward(), []
    if gateway is not None:
        forward.target = gateway
        given.append(forward.new())
    passed = [one.fileno() for one in given]
    process = await asyncio.create_subprocess_exec(
        *words, *map(str, passed), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, pass_fds=passed
    )
    try:
        for one in given:
            one.close()
        ready = await asyncio.wait_for(process.stdout.readline(), timeout_s)
        if given and ready:
            await forward.open()
        told = json.dumps([files, command, git, keep, FILES, LETTERS]).encode()
        output, _ = await asyncio.wait_for(process.communicate(told), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
        await forward.close()
    if process.returncode:
        raise RuntimeError(f"the sandbox ended with exit code {process.returncode}")
    return Done(*json.loads(output))


def _base(home):
    """Return the folder of the Python that a virtual environment was made with."""
    settings = dict(line.split(" = ", 1) for line in (home / "pyvenv.cfg").read_text().splitlines() if " = " in line)
    return str(Path(settings["home"]).parent)
