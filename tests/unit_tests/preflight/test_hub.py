"""Models of the Hub, downloaded by the real huggingface_hub from a server of this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download

from tests.hub_server import HubServer, hub_of
from tests.patience import PATIENCE_S
from tests.unit_tests.conftest import WriteConfig
from torchtitan import start
from torchtitan.config.job_config import JobConfig, config_to_toml
from torchtitan.config.reading import read_command_line
from torchtitan.errors import ConfigError, UserError
from torchtitan.evaluate import find
from torchtitan.preflight.hub import HubFolders, HubModel, download
from torchtitan.preflight.plan import describe_plan
from torchtitan.preflight.validate import load_config, validated

NAME = "tiny/guess"
SMALL = ["config.json", "tokenizer.json", "tokenizer_config.json"]
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub with one model, and an empty cache."""
    write_config()
    folder = tmp_path / "published"
    (tmp_path / "checkpoint").rename(folder)
    for name in ("pytorch_model.bin", "model.gguf", "onnx/model.safetensors", "consolidated.safetensors", "README.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not needed")
    with hub_of(folder) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def load(*more: str, name: str = NAME) -> JobConfig:
    return load_config(["--job.config_file", "job.toml", "--model.hf_assets_path", name, *more])


def plan() -> str:
    draft, _ = read_command_line(["--job.config_file", "job.toml", "--model.hf_assets_path", NAME])
    return describe_plan(validated(draft, planning=True), 1, draft.chosen)


def refusal(*more: str, name: str = NAME) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*more, name=name)
    assert caught.value.exit_code == 2
    assert len(caught.value.problems) == 1, caught.value.problems
    return caught.value.problems[0]


def snapshot(tmp_path: Path, commit: str) -> str:
    return str(tmp_path / f"cache/models--tiny--guess/snapshots/{commit}")


def test_name_of_the_hub_is_downloaded_once_without_files_that_no_run_reads(hub: HubServer, tmp_path: Path) -> None:
    config = load("--checkpoint.enable", "false")
    assert config.model.hf_assets_path == snapshot(tmp_path, hub.commit)
    assert hub.downloaded() == sorted([*SMALL, WEIGHTS])
    assert (Path(config.model.hf_assets_path) / WEIGHTS).read_bytes() == (hub.folder / WEIGHTS).read_bytes()
    hub.requests.clear()
    assert load().model == config.model
    assert find(NAME, "job.toml").place == Path(config.model.hf_assets_path)
    assert not hub.downloaded() and not [path for _, path, _ in hub.requests if NAME in path]


def test_folder_of_this_name_wins_over_the_hub(hub: HubServer, tmp_path: Path) -> None:
    shutil.copytree(hub.folder, tmp_path / NAME, ignore=lambda *_: ["onnx", "consolidated.safetensors"])
    assert load().model.hf_assets_path == NAME
    assert "nearest: guess" in refusal(name="tiny/gues")
    assert not hub.requests
    assert load(name=f"{NAME}@main").model.hf_assets_path == snapshot(tmp_path, hub.commit)


def test_weights_are_not_downloaded_for_a_plan_or_a_configuration_with_mistakes(hub: HubServer) -> None:
    assert re.search(r"model.hf_assets_path: 10 B of weights of tiny/guess@a+ are downloaded before", plan())
    assert "model's max_position_embeddings" in refusal("--training.seq_len", "256")
    assert "--training.step is not a known key" in refusal("--training.step", "1")
    assert hub.downloaded() == SMALL
    load()
    assert hub.downloaded() == sorted([*SMALL, WEIGHTS]) and "of weights of" not in plan()


@pytest.mark.parametrize(
    ("refuses", "reason"),
    [
        (
            {"token": "sesame"},
            "answers 401 for tiny/guess: .* gated or private; .* accept its terms on .* set HF_TOKEN",
        ),
        ({"name": "tiny/other"}, "answers 404: it has no model tiny/guess"),
        ({"status": 503}, "answers 503 for tiny/guess: try again later, or set HF_ENDPOINT"),
        ({"status": 500}, "answers 500 for tiny/guess"),
        ({"cut": WEIGHTS}, "broke off .* files that have arrived are kept"),
        ({"cut": "tokenizer.json"}, "broke off .* files that have arrived are kept"),
    ],
)
def test_hub_that_refuses_is_one_message_and_nothing_of_it_is_used(
    hub: HubServer, refuses: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {name: getattr(hub, name) for name in refuses}
    for name, value in refuses.items():
        setattr(hub, name, value)
    assert re.search(reason, refusal())
    with monkeypatch.context() as without_network:
        without_network.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "run hf download tiny/guess" in refusal()
    for name, value in good.items():
        setattr(hub, name, value)
    hub.requests.clear()
    folder = Path(load().model.hf_assets_path)
    assert all((folder / name).read_bytes() == (hub.folder / name).read_bytes() for name in [*SMALL, WEIGHTS])
    if refuses.get("cut") == WEIGHTS:
        assert hub.downloaded() == [WEIGHTS]


def test_revision_that_the_hub_does_not_have_is_named(hub: HubServer) -> None:
    assert "tiny/guess has no revision old on http" in refusal(name=f"{NAME}@old")


def test_gated_model_is_downloaded_with_the_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "sesame"
    monkeypatch.setenv("HF_TOKEN", "sesame")
    load()
    assert hub.downloaded() == sorted([*SMALL, WEIGHTS])


def test_cache_filled_by_others_is_used_without_a_network_if_it_is_whole(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older versions fill it, which keep no list of the files."""
    folder = Path(snapshot(tmp_path, hub.commit))
    shutil.copytree(hub.folder, folder, ignore=lambda *_: ["onnx", "consolidated.safetensors"])
    (tmp_path / "cache/models--tiny--guess/refs").mkdir()
    (tmp_path / "cache/models--tiny--guess/refs/main").write_text(hub.commit)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load().model.hf_assets_path == str(folder)
    for lost in (WEIGHTS, "tokenizer.json"):
        (folder / lost).unlink()
        assert "with HF_HUB_OFFLINE it has to be whole in the cache" in refusal()
    assert not hub.requests


def test_run_that_goes_on_takes_the_revision_that_it_began_with(hub: HubServer, tmp_path: Path) -> None:
    before = load()
    run = tmp_path / "run"
    (run / "checkpoint/step-1").mkdir(parents=True)
    (run / "config.toml").write_text(config_to_toml(before))
    hub.commit = "b" * 40
    assert load().model.hf_assets_path == before.model.hf_assets_path
    (hub.folder / "consolidated.safetensors").unlink()
    snapshot_download(NAME)  # as somebody does who wants the newest
    assert load().model.hf_assets_path == snapshot(tmp_path, "b" * 40)
    assert load("--checkpoint.resume", str(run)).model.hf_assets_path == before.model.hf_assets_path
    # On another machine the folder in the run's own configuration is downloaded, too.
    hub.commit = "a" * 40
    shutil.rmtree(tmp_path / "cache")
    again = load_config(["--job.config_file", str(run / "config.toml")])
    assert again.model.hf_assets_path == before.model.hf_assets_path


def test_two_revisions_of_a_model_stay_each_with_its_key(hub: HubServer, tmp_path: Path) -> None:
    """The policy begins as the newest one, and an older one teaches it."""
    older = load().model.hf_assets_path
    hub.commit = "b" * 40
    (hub.folder / "consolidated.safetensors").unlink()
    snapshot_download(NAME)
    keys = ["--job.stage", "distill", "--distill.teacher", f"{NAME}@{'a' * 40}"]
    before = load(*keys)
    newer = snapshot(tmp_path, "b" * 40)
    assert (before.model.hf_assets_path, before.distill.teacher) == (newer, older)
    run = tmp_path / "run"
    (run / "checkpoint/step-1").mkdir(parents=True)
    (run / "config.toml").write_text(config_to_toml(before))
    hub.commit = "c" * 40
    (hub.folder / "README.md").unlink()
    snapshot_download(NAME)
    again = load(*keys, "--checkpoint.resume", str(run))
    assert (again.model.hf_assets_path, again.distill.teacher) == (newer, older)


@pytest.mark.parametrize(
    ("key", "of_source", "commit"),
    [("model.hf_assets_path", False, "b"), ("distill.teacher", False, "a"), ("distill.teacher", True, "c")],
)
def test_revision_of_a_source_is_another_than_that_of_the_run(
    key: str, of_source: bool, commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, teacher, of_sources = (f'"{snapshot(tmp_path, letter * 40)}"' for letter in "bac")
    text = f"[model]\nhf_assets_path = {policy}\n[distill]\nteacher = {teacher}\n[[source]]\nname = 'math'\n"
    (tmp_path / "config.toml").write_text(f"{text}distill.teacher = {of_sources}\n")
    monkeypatch.setattr("torchtitan.preflight.hub.download", lambda model, **_: Path(str(model)))
    config = JobConfig()
    config.checkpoint.resume = str(tmp_path)
    assert HubFolders(config).find(key, NAME, of_source=of_source) == f"{NAME}@{commit * 40}"
    # What no key of its own tells is told only where all agree.
    assert HubFolders(config).find("another.key", NAME) == NAME


def test_processes_that_start_together_download_every_file_once(hub: HubServer) -> None:
    threads = [threading.Thread(target=download, args=(HubModel(NAME), True)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    fetched = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert len(fetched) == len(SMALL) + 1
    # The others found it in the cache, and asked for nothing.
    assert len([path for _, path, _ in hub.requests if "/tree/" in path]) == 1


def test_ranks_get_the_folder_that_the_launcher_has_downloaded(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("torchtitan.utils.launch.main", lambda arguments: started.append(arguments) or 0)
    keys = ["--job.config_file", "job.toml", "--model.hf_assets_path", NAME]
    assert start.main(["--nproc-per-node", "1", "--", *keys]) == 0
    (arguments,) = started
    ranks_keys = arguments[arguments.index("--job.config_file") :]
    hub.requests.clear()
    assert load_config(ranks_keys).model.hf_assets_path == snapshot(tmp_path, hub.commit)
    assert not hub.requests


def test_plan_of_a_local_checkpoint_does_not_import_huggingface_hub(write_config: WriteConfig) -> None:
    code = (
        "import sys; from torchtitan import start; start.main(['--', *sys.argv[1:], '--dry-run']); "
        "sys.exit('huggingface_hub' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *write_config()], capture_output=True, text=True)
    assert done.returncode == 0 and "# Plan" in done.stdout, done.stderr


def test_unwritable_cache_is_said(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="cannot be written .* set HF_HOME to another folder"):
        download(HubModel(NAME), weights=False)
