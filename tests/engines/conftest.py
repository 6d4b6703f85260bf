"""Real vLLM and real SGLang: their environments, small models for them, and one engine at a time.

Every test here gets its engine from the fixtures `vllm_python` or `sglang_python`, which skip, and say why, where it
cannot be had. All of them run in one process of pytest-xdist (tests/conftest.py), so no two servers share the cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.models import make_model
from tests.engines.processes import Processes

ROOT = Path(__file__).resolve().parents[2]
INSTALLER = ROOT / "scripts" / "install_engine.sh"
# Engine -> its environment on a machine without GPUs.
ENVIRONMENTS = {"vllm": "vllm-cpu", "sglang": "sglang-cpu"}
CANNOT_BE_HAD = 3
INSTALL_SECONDS = 1500
# Starts take up to a minute on two cores, and the first test of an engine may have to install it.
TEST_SECONDS = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        # Reports carry these to the summary at the end, whether the test ran or was skipped.
        names = getattr(item, "fixturenames", ())
        item.user_properties += [("engine", name) for name in ENVIRONMENTS if f"{name}_python" in names]
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


def engine_python(engine: str) -> Path:
    """The Python of the engine's environment, installed if it must be; skips where that is impossible."""
    unwanted = os.environ.get("TORCHTITAN_ENGINES_SKIP", "")
    if unwanted and (unwanted in ("1", "all") or engine in unwanted.split(",")):
        pytest.skip(f"{engine.upper()} NOT EXERCISED: TORCHTITAN_ENGINES_SKIP={unwanted}")
    command = [str(INSTALLER), ENVIRONMENTS[engine]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    if done.returncode == CANNOT_BE_HAD:
        why = " ".join(done.stderr.split())[-400:]
        pytest.skip(f"{engine.upper()} NOT EXERCISED: it cannot be installed here: {why}")
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stderr}"
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python that has vLLM's CPU build."""
    return engine_python("vllm")


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The Python that has SGLang."""
    return engine_python("sglang")


@pytest.fixture(scope="session")
def engine_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(tied=True, dtype="float32", seed=0) -> directory of a small random Qwen3 with the debug tokenizer, made once."""
    made: dict[tuple[bool, str, int], Path] = {}

    def model(tied: bool = True, dtype: str = "float32", seed: int = 0) -> Path:
        key = (tied, dtype, seed)
        if key not in made:
            name = f"qwen3-{'tied' if tied else 'untied'}-{dtype}-{seed}"
            made[key] = make_model(tmp_path_factory.mktemp("models") / name, tied, dtype, seed)
        return made[key]

    return model


@pytest.fixture(scope="session")
def debug_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the default run, made as ./run_grpo.sh makes it."""
    directory = tmp_path_factory.mktemp("assets") / "debug_arithmetic"
    script = ROOT / "scripts" / "make_debug_checkpoint.py"
    subprocess.run([sys.executable, script, "--output", directory], check=True, cwd=ROOT, timeout=240)
    return directory


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts processes for one test; what still runs at its end is killed, with all that it started."""
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture(scope="module")
def module_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Like `processes`, for a server that all tests of a module share."""
    with Processes(tmp_path_factory.mktemp("processes")) as started:
        yield started
