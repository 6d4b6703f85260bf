"""docs/adding_a_transport.md, done as it says in a copy of the package: its transport carries versions there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import json, sys
from pathlib import Path

import torch

from torchtitan.config.job_config import JobConfig, WeightSync as Table
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.transports.transport import load_transport
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key

folder, held = Path(sys.argv[1]), []
weight = torch.arange(100_000, dtype=torch.float32)
table = Table(transport="spool")
table.bucket_bytes = 65536
sync = WeightSync(table, {"w": weight}, epoch="e1", token="secret", run_dir=folder)
apply = lambda staged: held.append([staged.version, bool(torch.equal(staged.tensors["w"][:], weight))])
actor = SyncActor(sync.registry_address, "actor-0", "e1", role_key("secret", ACTOR, "actor-0"), apply)
try:
    actor.start()
    for version in (1, 2):
        assert sync.reserve()
        sync.fence()
        weight += version
        sync.commit(version, 0)
        sync.wait_until_applied(version, 120, at_least=1)
finally:
    actor.close()
    sync.close()
config = JobConfig()
config.weight_sync, config.inference.servers = table, ["http://elsewhere:8000"]
problems = list(load_transport("spool").problems(config, lambda: None))
print(json.dumps({"held": held, "problems": problems}))
"""


def test_the_transport_of_the_page_carries_versions(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "adding_a_transport.md").read_text()
    file, line = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shutil.copytree(ROOT / "torchtitan", tmp_path / "torchtitan", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    name = re.match(r"# (torchtitan/\S+\.py)\n", file)
    assert name is not None
    (tmp_path / name[1]).write_text(file)
    refused = run("from torchtitan.config.job_config import WeightSync; WeightSync(transport='spool')")
    assert refused.returncode and "must be tcp or disk or ipc or nccl" in refused.stderr
    table = tmp_path / "torchtitan" / "config" / "transports.py"
    begin = "TRANSPORTS: dict[str, Descriptor] = {\n"
    assert begin in table.read_text()
    table.write_text(table.read_text().replace(begin, begin + line))
    assert (
        "spool (files in the run folder)" in run("import torchtitan.config.reference as r; print(r.markdown())").stdout
    )

    done = run(RUN, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["held"] == [[1, True], [2, True]]
    assert [key for key, _ in answer["problems"]] == ["inference.servers"]
    # 400 kB are seven buckets: each of them travelled by this transport, in slots 0 to 2.
    written = {path.name.partition("-")[2].partition("-")[2] for path in (tmp_path / "run" / "spool").iterdir()}
    assert written == {str(start) for start in range(0, 400_000, 65536)}

    # Whatever it raises, the actor has its versions over the connection, and what was raised is in a log.
    for side, marked in (
        ("def refer(slot, start, end):\n", 12 * " "),
        ("def fetch(self, reference, target):\n", 8 * " "),
    ):
        assert side in file
        (tmp_path / name[1]).write_text(file.replace(side, f'{side}{marked}raise OSError("no room")\n'))
        done = run(RUN, str(tmp_path / side[4:9]))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["held"] == [[1, True], [2, True]]
        logs = [path.read_text() for path in (tmp_path / side[4:9]).rglob("shard-server*.log")]
        assert any("no room" in text for text in [done.stderr, *logs])
