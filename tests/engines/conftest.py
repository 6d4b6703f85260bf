"""Real vLLM and real SGLang: their environments, small models for them, and servers that tests share.

Every test here gets its engine from the fixtures `vllm_python` or `sglang_python`, which skip, and say why, where it
cannot be had. Starting an engine takes longest: tests share one where none of them does it harm.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.job import TOKEN, Actor, start_actor
from tests.engines.models import make_model
from tests.processes import Processes
from torchtitan.inference.actor_client import TOKEN_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
INSTALLER = ROOT / "scripts" / "install_engine.sh"
# Engine -> its environment on a machine without GPUs.
ENVIRONMENTS = {
    "vllm": "vllm-cpu",
    "sglang": "sglang-cpu",
    "verifiers": "verifiers",
    "mini_swe_agent": "mini-swe-agent",
}
CANNOT_BE_HAD = 3
INSTALL_SECONDS = 1500


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder not in item.path.parents:
            continue
        # Reports carry these to the summary at the end, whether the test ran or was skipped.
        names = getattr(item, "fixturenames", ())
        item.user_properties += [("engine", name) for name in ENVIRONMENTS if f"{name}_python" in names]


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
def verifiers_python() -> Path:
    """The Python that has verifiers."""
    return engine_python("verifiers")


@pytest.fixture(scope="session")
def mini_swe_agent_python() -> Path:
    """The Python that has mini-swe-agent and pytest."""
    return engine_python("mini_swe_agent")


@pytest.fixture(scope="session")
def engine_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(tied=True, dtype="float32", seed=0) -> directory of a small random Qwen3 with the debug tokenizer, made once."""

    @functools.cache
    def model(tied: bool = True, dtype: str = "float32", seed: int = 0) -> Path:
        name = f"qwen3-{'tied' if tied else 'untied'}-{dtype}-{seed}"
        return make_model(tmp_path_factory.mktemp("models") / name, tied, dtype, seed)

    return model


@pytest.fixture(autouse=True)
def token_of_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a client looks for it whose agent serves beside another one's engine."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


@pytest.fixture(scope="session")
def unmerged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While it exists, the engine of `untied_actor` leaves adapters out."""
    return tmp_path_factory.mktemp("unmerged") / "unmerged"


@pytest.fixture(scope="session")
def untied_actor(
    vllm_python: Path, engine_model: Callable[..., Path], unmerged: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Actor]:
    """A vLLM that several files share, since none of their tests does it any harm. Its head is a matrix of its own: an
    agent beside an engine that is not its own cannot pack a tied one anew."""
    with Processes(tmp_path_factory.mktemp("processes")) as started:
        yield start_actor(
            started, "vllm", vllm_python, engine_model(tied=False),
            "--", "--worker-extension-cls", "tests.engines.vllm_unmerged.WorkerExtension",
            name="untied", TORCHTITAN_TEST_UNMERGED=str(unmerged),
        )  # fmt: skip
