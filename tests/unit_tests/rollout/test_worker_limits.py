"""What a worker may take of the machine and see of the home folder, part by part (test_red_team.py tries the whole)."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.patience import PATIENCE_S
from tests.trajectories import answer
from torchtitan.config.job_config import JobConfig
from torchtitan.rollout.environments import agent_worker
from torchtitan.rollout.rewards.reward_pool import RewardPool
from torchtitan.rollout.types import Prompt
from torchtitan.rollout.workers import control_group, isolation, restrictions, seen_files, usage
from torchtitan.rollout.workers import worker_process as process
from torchtitan.rollout.workers.control_group import candidates, make_control_group, our_groups

MIB = 1 << 20
# System calls of x86-64: those that are refused, and some that agents need.
REFUSED = {
    "add_key": 248, "request_key": 249, "keyctl": 250, "ptrace": 101, "process_vm_readv": 310,
    "process_vm_writev": 311, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "shmget": 29,
}  # fmt: skip


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for child in started:
        child.kill()
        child.wait()


def python(code: str, children: list[subprocess.Popen[bytes]]) -> int:
    """Start Python with some code and return its number once the code has printed something."""
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    children.append(child)
    assert child.stdout is not None and child.stdout.read(1), "it has ended"
    return child.pid


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86-64")
@pytest.mark.parametrize("shared_memory_bytes", [1 << 20, 1 << 80])
def test_system_calls_are_refused_and_namespaces_are_not(shared_memory_bytes: int) -> None:
    code = f"""
        import ctypes, errno, os
        from torchtitan.rollout.workers.restrictions import restrict
        assert restrict({shared_memory_bytes}) == ""
        libc = ctypes.CDLL(None, use_errno=True)
        for name, number in {REFUSED}.items():
            ctypes.set_errno(0)
            result = libc.syscall(number, -1, -1, -1, -1, -1)
            if result == -1 and ctypes.get_errno() == errno.EPERM:
                print(name)
        if os.fork() == 0:
            # As agents do that isolate their own programs.
            os._exit(libc.unshare(0x10000000))
        assert os.wait()[1] == 0 or not os.path.exists("/proc/self/ns/user")
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Shared memory is refused where no namespace bounds it.
    expected = set(REFUSED) - ({"shmget"} if shared_memory_bytes == 1 << 80 else set())
    assert set(done.stdout.split()) == expected


def test_a_machine_without_known_numbers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    assert restrictions.restrict(0) == "no filter of system calls is known for Linux on vax"


@pytest.mark.parametrize(
    "holds",
    [
        "x = bytearray(b'x') * (100 << 20)",
        "import mmap; x = mmap.mmap(-1, 100 << 20); x.write(b'x' * (100 << 20))",
        "import os; f = os.memfd_create('f'); os.write(f, bytes(100 << 20))",
        "import mmap, os; f = os.memfd_create('f'); os.write(f, bytes(100 << 20)); mmap.mmap(f, 100 << 20).find(b'y')",
    ],
    ids=["its own", "shared", "a file in memory", "such a file, mapped"],
)
def test_memory_counts_once_whatever_holds_it(holds: str, children: list[subprocess.Popen[bytes]]) -> None:
    """Two processes share what the first has; 100 MiB are more than 90, and with the interpreters not more than 160."""
    code = f"{holds}\nimport os, time\nif os.fork() == 0: time.sleep(600)\nprint('x', flush=True)\ntime.sleep(600)"
    pids = usage.descendants(python(code, children), 10)
    try:
        assert len(pids) == 2
        assert usage.exceeds(pids, 90 * MIB) and not usage.exceeds(pids, 160 * MIB)
    finally:
        usage.kill(pids)


def test_threads_that_run_together_weigh_as_much_as_they_may(children: list[subprocess.Popen[bytes]]) -> None:
    """Eight that run weigh as two: 8 / 1.25^7 = 1.7. One that sleeps keeps its priority."""
    spinning = (
        "import os, time\nfor _ in range(7):\n    if os.fork() == 0: break\nprint('x', flush=True)\nwhile True: pass"
    )
    pid = python(spinning, children)
    asleep = python("import time; print('x', flush=True); time.sleep(600)", children)
    deadline = time.monotonic() + PATIENCE_S
    while len(pids := usage.descendants(pid, 20)) < 8 or usage._running_threads(asleep):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        before = os.getpriority(os.PRIO_PROCESS, asleep)
        usage.put_behind([*pids, asleep], allowed=8)
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {before}
        usage.put_behind([*pids, asleep], allowed=2)
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {7}
        assert os.getpriority(os.PRIO_PROCESS, asleep) == before
        usage.end_before_us([asleep])
        assert Path(f"/proc/{asleep}/oom_score_adj").read_text() == "1000\n"
    finally:
        usage.kill(pids)


def test_a_control_group_bounds_what_no_process_has_mapped() -> None:
    group = make_control_group(64 * MIB)
    if group is None:
        pytest.skip("this user can make no control group here")
    fill = "import os; f = os.memfd_create('f')\nfor _ in range(200): os.write(f, bytes(1 << 20))"
    try:
        done = subprocess.run([*group.command(), sys.executable, "-c", fill], capture_output=True)
        assert done.returncode == -9 and group.killed_for_memory == 1
        if "cpu" in our_groups():
            assert group.shares_processors
        fits = subprocess.run([*group.command(), "/bin/sh", "-c", "echo $0 $1", "a b", "c"], capture_output=True)
        assert fits.stdout == b"a b c\n"
    finally:
        deadline = time.monotonic() + PATIENCE_S
        while not group.remove() and time.monotonic() < deadline:
            time.sleep(0.01)


def test_groups_are_made_where_controllers_are_shared_out(tmp_path: Path) -> None:
    """With version 2 a group that has processes cannot share out its controllers: the next one above it that does is
    taken. With version 1 each controller has a tree of its own."""
    unified, memory, pids = tmp_path / "unified", tmp_path / "memory", tmp_path / "pids"
    scope = unified / "user.slice" / "app.slice" / "run.scope"
    for folder in (scope, memory / "job", pids / "job"):
        folder.mkdir(parents=True)
    for folder, controllers in ((scope, ""), (scope.parent, "memory pids cpu"), (scope.parent.parent, "memory")):
        (folder / "cgroup.subtree_control").write_text(controllers)
    (tmp_path / "cgroup").write_text("4:memory:/job\n3:pids:/job\n0::/user.slice/app.slice/run.scope\n")
    (tmp_path / "mountinfo").write_text(
        f"30 1 0:2 / {unified} rw - cgroup2 cgroup2 rw\n"
        f"31 1 0:3 / {memory} rw - cgroup cgroup rw,memory\n"
        f"32 1 0:4 /job {pids}/job rw - cgroup cgroup rw,pids\n"
        "33 1 0:5 / /odd rw - tmpfs  rw\n"  # a mount without a source
    )
    with (tmp_path / "mountinfo").open("ab") as file:
        file.write(b"34 1 0:6 / /old\xff rw - tmpfs tmpfs rw\n")
    assert candidates(our_groups(tmp_path)) == [(scope.parent,), (memory / "job", pids / "job")]
    assert candidates(our_groups(tmp_path / "nowhere")) == []


def test_a_group_ends_with_all_that_it_has(children: list[subprocess.Popen[bytes]]) -> None:
    """Also what its starter has left in a session of its own."""
    group = make_control_group(64 * MIB)
    if group is None:
        pytest.skip("this user can make no control group here")
    code = (
        "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3, start_new_session=True).pid)"
    )
    done = subprocess.run([*group.command(), sys.executable, "-c", code], capture_output=True, text=True)
    assert Path(f"/proc/{done.stdout.strip()}").exists()
    group.kill()
    deadline = time.monotonic() + PATIENCE_S
    while not group.remove():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_groups_of_ended_processes_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / f"torchtitan-{ended.pid}-0").mkdir()
    (tmp_path / f"torchtitan-{os.getpid()}-0").mkdir()
    control_group._remove_abandoned((tmp_path,))
    assert [folder.name for folder in tmp_path.iterdir()] == [f"torchtitan-{os.getpid()}-0"]


RESERVES = "import mmap; x = mmap.mmap(-1, 16 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)"


@pytest.mark.parametrize(("code", "reward"), [(RESERVES, 1.0), ("x = bytearray(b'x') * (400 << 20)", None)])
def test_an_agent_may_reserve_what_it_does_not_use(code: str, reward: float | None) -> None:
    """Node and Bun reserve far more memory than they use."""
    words = [sys.executable, "-c", f"{code}\nimport time\ntime.sleep({0 if reward else 600})\nprint(1.0)"]
    message = {"base_url": "http://127.0.0.1:1/v1", "key": "key", "row": {}}
    playing = agent_worker.run_command(words, message, 256)
    if reward is None:
        with pytest.raises(
            RuntimeError, match=r"used more than 256 MiB of memory \(environment.sandbox.memory_limit_mb\)"
        ):
            asyncio.run(asyncio.wait_for(playing, PATIENCE_S))
    else:
        assert asyncio.run(asyncio.wait_for(playing, PATIENCE_S)) == {"reward": reward}


LIMITED = """
import mmap, subprocess, sys
from torchtitan.rollout.workers.inside import limit_memory
limit_memory(512)
mmap.mmap(-1, 16 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
if len(sys.argv) > 1:
    memory = "new WebAssembly.Memory({initial: 1, maximum: 65536})"
    reserve = f"const held = []; for (let n = 0; n < 8; n++) held.push({memory})"
    subprocess.run([sys.argv[1], "-e", reserve], check=True)
try:
    bytearray(600 << 20)
except MemoryError:
    print("refused")
"""


def test_a_worker_may_reserve_what_it_cannot_write_and_so_may_node() -> None:
    node = shutil.which("node")
    done = subprocess.run([sys.executable, "-c", LIMITED, *([node] if node else [])], capture_output=True, text=True)
    assert done.stdout.strip() == "refused", done.stderr


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder as people have it, outside of the folders that look empty anyhow."""
    monkeypatch.setattr(seen_files, "SCRATCH", ("/dev/shm",))
    home = tmp_path / "home"
    for name in (
        ".ssh/id", ".claude/login", ".npm/_logs/debug", ".npm/_cacache/index", ".nvm/nvm.sh", ".cargo/credentials.toml",
        ".cargo/bin/rg", ".nvm/versions/node/v22/bin/node", ".nvm/versions/node/v22/lib/node_modules/agent/cli.js",
        ".claude/local/node_modules/agent/cli.js", ".cache/huggingface/token", ".cache/huggingface/hub/model",
        ".pyenv/versions/3.11/bin/python", ".config/gcloud/key", "notes.txt", "project/rewards.py",
        "project/.venv/bin/python", "tools/bin/solver", "tools/lib/solver.so",
    ):  # fmt: skip
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (home / ".local" / "bin").mkdir(parents=True)
    (home / ".local" / "bin" / "agent").symlink_to(home / ".claude/local/node_modules/agent/cli.js")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(seen_files, "homes", lambda: [home])
    folders = (".local/bin", ".cargo/bin", "tools/bin", ".nvm/versions/node/v22/bin")
    monkeypatch.setenv("PATH", os.pathsep.join(["/usr/bin", *(str(home / name) for name in folders)]))
    return home


def seen(home: Path, visible: list[Path]) -> set[str]:
    """Return the files of the home folder that an isolated process sees: what the innermost mount shows."""
    mounts = {Path(target): kind for kind, _, target in seen_files.mounts_over(visible, [])}
    files = (path for path in home.rglob("*") if path.is_file() and not path.is_symlink())
    around = {path: next((above for above in (path, *path.parents) if above in mounts), None) for path in files}
    return {str(path.relative_to(home)) for path, above in around.items() if above is None or mounts[above] == "show"}


PROGRAMS = {
    ".npm/_cacache/index", ".nvm/nvm.sh", ".cargo/bin/rg", ".nvm/versions/node/v22/bin/node",
    ".nvm/versions/node/v22/lib/node_modules/agent/cli.js", ".claude/local/node_modules/agent/cli.js",
    ".cache/huggingface/hub/model", ".pyenv/versions/3.11/bin/python", "tools/bin/solver", "tools/lib/solver.so",
}  # fmt: skip


def test_of_the_home_folder_programs_and_what_is_needed_are_seen(home: Path) -> None:
    project = {"project/rewards.py", "project/.venv/bin/python"}
    assert seen(home, []) == PROGRAMS
    assert seen(home, [home / "project"]) == PROGRAMS | project
    assert seen(home, [home / "notes.txt", home / ".config" / "gcloud"]) == PROGRAMS | {
        "notes.txt",
        ".config/gcloud/key",
    }
    # A run that is started in the home folder itself needs what lies there, but nothing that begins with a dot.
    assert seen(home, [home]) == PROGRAMS | project | {"notes.txt"}


def test_caches_are_seen_where_variables_say_that_they_are(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hf/hub/model", "hf/token", "t/hub/weights", "cargo/bin/rg", "cargo/credentials.toml"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    monkeypatch.setenv("TORCH_HOME", str(home / "t"))
    monkeypatch.setenv("CARGO_HOME", str(home / "cargo"))
    assert seen(home, []) == PROGRAMS | {"hf/hub/model", "t/hub/weights", "cargo/bin/rg"}


def test_a_home_folder_behind_a_link_shows_the_same(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(home)
    monkeypatch.setenv("HOME", str(link))
    monkeypatch.setenv("PATH", os.environ["PATH"].replace(str(home), str(link)))
    assert seen(home, []) == PROGRAMS
    assert seen_files.is_withheld(str(link / "notes.txt"))


def test_code_in_an_editable_installation_is_seen(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no folder of sys.path: a finder of its own knows where it lies."""
    package = home / "src" / "my_package_of_rewards"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location(
        package.name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    finder = SimpleNamespace(find_spec=lambda name, path, target=None: spec if name == package.name else None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    found = list(process._code_of({"functions": [f"{package.name}:f", "accuracy"], "agent": "run --this"}))
    assert found == [package]


def test_files_of_the_home_folder_are_withheld_and_missing_ones_are_not(home: Path) -> None:
    assert seen_files.is_withheld(str(home / "notes.txt"))
    assert not seen_files.is_withheld(str(home / "nothing")) and not seen_files.is_withheld("/usr/bin")


@pytest.mark.parametrize(
    ("function", "isolate", "is_missed"),
    [
        ("tests.unit_tests.rollout.reward_examples:echo", "auto", True),
        ("tests.unit_tests.rollout.reward_examples:echo", False, False),
        ("accuracy", "auto", False),
    ],
)
def test_isolation_is_missed_where_code_of_others_asks_for_it(
    function: str, isolate: bool | str, is_missed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "problem_of", lambda tool: f"{tool} is not installed")
    config = JobConfig()
    config.rewards.functions, config.rewards.sandbox.isolate = [function], isolate
    reason = RewardPool(config).missing_isolation
    assert ("unshare is not installed" in reason) == is_missed == bool(reason)


def test_a_hidden_file_that_is_missed_names_the_key(home: Path) -> None:
    async def failure() -> str:
        config = JobConfig()
        config.rewards.functions = ["tests.unit_tests.rollout.reward_examples:reads"]
        pool = RewardPool(config)
        await pool.start()
        try:
            await pool.score(Prompt(0, "", [1], {}), [answer([1, 7], str(home / "notes.txt"))])
            return pool.last_failure
        finally:
            await pool.close()

    if all(isolation.problem_of(tool) for tool in isolation.NAMES):
        pytest.skip("no isolation can be had here")
    reason = asyncio.run(asyncio.wait_for(failure(), PATIENCE_S))
    assert f'rewards.sandbox.readable = ["{home}/notes.txt"] would show it' in reason
