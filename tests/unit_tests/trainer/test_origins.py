"""A run goes on with what it has used until now, or is refused: files may have other contents at the same path."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from scripts.make_debug_checkpoint import write_tokenizer
from torchtitan.config.job_config import JobConfig
from torchtitan.config.sources import Source
from torchtitan.models.shape import checkpoint_files
from torchtitan.models.shape.checkpoint_shape import FLAVORS, read_shape
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.trainer import origins
from torchtitan.trainer.origins import Origins


def config_of(root: Path, changes: dict[str, Any]) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path = str(root / "model")
    for key, value in changes.items():
        if key == "source":
            config.source = [Source(**source) for source in value]
            continue
        table, name = key.split(".")
        setattr(getattr(config, table), name, value)
    return config


@pytest.fixture
def root(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> Path:
    """A folder with a model, two teachers and an adapter's directory."""
    for name in ("model", "teacher", "tutor", "adapter"):
        shutil.copytree(tiny_checkpoint("qwen3", tied=True), tmp_path / name)
        write_tokenizer(tmp_path / name)
    return tmp_path


def describe(root: Path, changes: dict[str, Any]) -> Origins:
    config = config_of(root, changes)
    args = read_shape(config)
    assert args is not None
    return Origins(config, args, Tokenizer(root / "model"))


def last_value(folder: Path) -> None:
    """Change the last value of the last tensor alone, and keep the file's size and time of change."""
    path = folder / "model.safetensors"
    tensors, before = load_file(path), path.stat()
    tensors[max(tensors)].view(-1)[-1] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def in_json(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))

    return change


def template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


CLOSE = {"grpo.kl_coefficient": 0.1}
ADAPTERS = {"lora.rank": 4}
TAUGHT = {"job.stage": "distill", "distill.teacher": "ROOT/teacher"}
SOURCES = {"job.stage": "distill", "distill.teacher": "ROOT/teacher",
           "source": [{"name": "a"}, {"name": "b", "values": {"distill.teacher": "ROOT/tutor"}}]}  # fmt: skip
WEIGHTS = "the weights in {} = .* are not those .* resume with {} as it stands"
CASES: list[tuple[str, dict[str, Any], str, Callable[[Path], None], str]] = [
    ("reference", CLOSE, "model", last_value, WEIGHTS.format("model.hf_assets_path", "model.hf_assets_path")),
    ("no reference", {}, "model", last_value, ""),
    ("a reference that follows", {**CLOSE, "grpo.reference_ema_decay": 0.5}, "model", last_value, ""),
    ("base of adapters", ADAPTERS, "model", last_value, "the weights in model.hf_assets_path"),
    ("start of adapters", {**CLOSE, **ADAPTERS, "lora.adapter_path": "ROOT/adapter"}, "adapter", last_value,
     "the weights in lora.adapter_path"),
    ("start that nothing refers to", {**ADAPTERS, "lora.adapter_path": "ROOT/adapter"}, "adapter", last_value, ""),
    ("teacher", TAUGHT, "teacher", last_value, "the weights in distill.teacher ="),
    ("a student's own start", TAUGHT, "model", last_value, ""),
    ("teacher of a source", SOURCES, "tutor", last_value, "the weights in distill.teacher of b ="),
    ("teacher's model", TAUGHT, "teacher", in_json("config.json", rms_norm_eps=0.5),
     r"the model in distill.teacher is another one \(rms_norm_eps .* -> 0.5\)"),
    ("model", {}, "model", in_json("config.json", rms_norm_eps=0.5), r"model.hf_assets_path .*rms_norm_eps .* -> 0.5"),
    ("end tokens", {}, "model", in_json("generation_config.json", eos_token_id=[7]), "eos_token_ids"),
    ("what means nothing", {}, "model", in_json("config.json", transformers_version="9"), ""),
    ("tokenizer", {}, "model", in_json("tokenizer.json", added_tokens=[]), r"the tokenizer .*\(tokenizer.json"),
    ("padding", {}, "model", in_json("tokenizer.json", truncation=None), ""),
    ("template", {}, "model", template, r"the tokenizer in model.hf_assets_path is another one \(chat template"),
]  # fmt: skip


def placed(changes: dict[str, Any], root: Path) -> dict[str, Any]:
    return dict(json.loads(json.dumps(changes).replace("ROOT", str(root))))


@pytest.mark.parametrize(("changes", "folder", "change", "expected"), [pytest.param(*c[1:], id=c[0]) for c in CASES])
def test_a_resume_with_changed_origins_is_refused(
    root: Path, changes: dict[str, Any], folder: str, change: Callable[[Path], None], expected: str
) -> None:
    changes = placed(changes, root)
    saved = json.loads(json.dumps(describe(root, changes).describe()))
    assert describe(root, changes).problem(saved, root) == ""
    change(root / folder)
    found = describe(root, changes).problem(saved, root)
    assert re.search(expected, found) if expected else found == ""


def test_an_evaluation_may_write_prompts_in_another_way(root: Path) -> None:
    saved = describe(root, {}).describe()
    template(root / "model")
    assert describe(root, {}).problem(saved, root, evaluates=True) == ""
    in_json("config.json", rms_norm_eps=0.5)(root / "model")
    assert "rms_norm_eps" in describe(root, {}).problem(saved, root, evaluates=True)


def test_weights_are_read_once_and_known_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    digest = checkpoint_files.fingerprint
    monkeypatch.setattr(origins, "fingerprint", lambda path: read.append(str(path)) or digest(path))
    first = describe(root, CLOSE)
    saved = first.describe()
    assert first.describe() == saved and len(read) == 1
    assert describe(root, CLOSE).problem(saved, root) == "" and len(read) == 1
    # An export may link the file; who then changes it changes it for both.
    os.link(root / "model" / "model.safetensors", root / "linked.safetensors")
    assert describe(root, CLOSE).problem(saved, root) == "" and len(read) == 1
    (root / "linked.safetensors").unlink()
    # A copy elsewhere is another file with the same values.
    shutil.move(root / "model", root / "moved")
    shutil.copytree(root / "moved", root / "model")
    assert describe(root, CLOSE).problem(saved, root) == "" and len(read) == 2


def test_random_weights_are_those_of_their_seed(root: Path) -> None:
    args = FLAVORS["qwen3"]["debug"]

    def of_seed(seed: int) -> Origins:
        changes = {"model.hf_assets_path": "", "model.flavor": "debug", "training.seed": seed}
        return Origins(config_of(root, {**CLOSE, **changes}), args)

    saved = of_seed(1).describe()
    assert of_seed(1).problem(saved, root) == ""
    assert "are not those that the run has used" in of_seed(2).problem(saved, root)


def test_a_checkpoint_that_does_not_say_is_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert describe(root, CLOSE).problem({}, root) == ""
    assert "does not say with which weights in model.hf_assets_path" in caplog.text


@pytest.mark.parametrize(("family", "flavor"), [(family, name) for family, names in FLAVORS.items() for name in names])
def test_every_shape_can_be_compared(family: str, flavor: str, root: Path) -> None:
    config = config_of(root, {})
    before, after = (Origins(config, FLAVORS[family][flavor]).describe() for _ in range(2))
    assert Origins(config, FLAVORS[family][flavor]).problem(json.loads(json.dumps(before)), root) == ""
    assert before == after
