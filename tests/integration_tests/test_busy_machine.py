"""How threads wait for each other, as OpenMP says it (OMP_DISPLAY_ENV); test_runs.py looks at a run's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.processes import ROOT

gnu_openmp = pytest.mark.skipif(
    not list((Path(torch.__file__).parent / "lib").glob("libgomp*")), reason="torch's OpenMP is another one here"
)
# Its policy is called PASSIVE also where none is set; how often it looks before it sleeps tells.
SAYS = "GOMP_SPINCOUNT = '{}'"


@gnu_openmp
@pytest.mark.parametrize(
    ("given", "found"), [({}, "0"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000")], ids=["ours", "the user's"]
)
def test_what_the_user_has_set_stays(given: dict[str, str], found: str) -> None:
    program = "from torchtitan.utils.machine import sleep_between_regions as s; s(); import torch"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S,
        env={**environment, "TORCHTITAN_DEVICE": "cpu", "OMP_DISPLAY_ENV": "VERBOSE", **given},
    )  # fmt: skip
    assert SAYS.format(found) in done.stderr
