"""Shared fixtures: tiny random checkpoints as transformers writes them; how tests share workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: threads that spin would take the cores from what they wait for (utils/machine.py).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# No test asks the Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.processes import Processes
from tests.tiny_models import SHAPE
from torchtitan.models.shape.exports import SHIPPED_FOLDER

# A busy machine must not fail a test: only pytest's own limit looks at the time.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

pytest_plugins = ("tests.tiers", "tests.processor_seconds")

ROOT = Path(__file__).resolve().parents[1]
ENGINES_FOLDER = ROOT / "tests" / "engines"
# Those of its files that share no vLLM server with the others, and take as long.
ENGINES_OF_THEIR_OWN = (
    "test_colocated",
    "test_colocated_runs",
    "test_sglang",
    "test_vllm_benchmarks",
    "test_vllm_traps",
)

FAMILIES = ("llama3", "qwen2", "qwen3")


def pytest_configure(config: pytest.Config) -> None:
    """Processes that tests start have to end at SIGHUP, also under nohup: what ignores a signal starts others that
    ignore it, and what handles it starts others that do not. A worker of xdist ends with the process that it is for."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or hasattr(config, "workerinput"):
        signal.signal(signal.SIGHUP, lambda *_: None)


def make_checkpoint(directory: Path, family: str, tied: bool, **overrides: object) -> Path:
    """Write a tiny random checkpoint (no tokenizer) with transformers.

    Weights are large enough for logits of several units, norms and biases are random too, so that nothing that is
    left out or mixed up stays hidden.
    """
    import transformers

    shape: dict[str, object] = {
        **SHAPE,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": 10000.0}
    if family == "llama3":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    if family == "qwen3":
        shape["head_dim"] = 32  # Qwen3's head size is not hidden size / heads
    shape.update(rope_parameters=rope, **overrides)
    config = transformers.AutoConfig.for_model(family.replace("llama3", "llama"), **shape)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(FAMILIES.index(family) * 2 + tied)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.2 * noise)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(family="qwen3", tied=True) -> directory of a tiny random checkpoint, made once per session.

    Vocabulary 128, hidden 64, 2 layers, 4 query and 2 key-value heads, end token 1, fp32.
    """
    made: dict[tuple[str, bool], Path] = {}

    def checkpoint(family: str = "qwen3", tied: bool = True) -> Path:
        key = (family, tied)
        if key not in made:
            name = f"{family}-{'tied' if tied else 'untied'}"
            made[key] = make_checkpoint(tmp_path_factory.mktemp("checkpoints") / name, family, tied)
        return made[key]

    return checkpoint


@pytest.fixture(scope="session")
def debug_checkpoint() -> Path:
    """The checkpoint of the default run."""
    return SHIPPED_FOLDER / "debug_arithmetic"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes with one thread for the time of one test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.fixture(autouse=True, scope="module")
def no_process_group_stays() -> Iterator[None]:
    """FSDP2 makes one of this process alone where none is there; the next file's tests may want another."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay together, and share its fixtures, and so do those that start engines, in two groups: one
    engine starts and computes on a core while the other core has the other group, or the other tests.

    Marks of groups do not do it: xdist 3.8 writes them where pytest 9.2 does not look.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0])
            if ENGINES_FOLDER not in (ROOT / file).parents:
                return str(file)
            return "engines of their own" if file.stem in ENGINES_OF_THEIR_OWN else "vLLM servers"

    return ByGroup(config, log)
