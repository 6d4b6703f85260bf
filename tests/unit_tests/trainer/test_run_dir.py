"""Run folders: unique, linked, resumable, and honest about what is missing."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tomli

from torchtitan.config.job_config import JobConfig
from torchtitan.config.run_folders import NEWEST
from torchtitan.config.sources import Source
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.models.shape.exports import EXPORT_FOLDERS, WHOLE, newest_export
from torchtitan.trainer.run_dir import (
    Start,
    begin_checkpoint,
    claim,
    finish_checkpoint,
    go_back_to,
    locked,
    new_epoch,
    open_run_directory,
)
from torchtitan.utils.child_process import LAUNCH_VARIABLE, LOSS_VARIABLE
from torchtitan.utils.json_lines import read_json_lines


def make_config(root: Path, resume: str = "") -> JobConfig:
    config = JobConfig()
    config.job.dump_folder, config.job.name = str(root), "trial"
    config.checkpoint.resume = resume
    return config


def opened(config: JobConfig) -> Path:
    """Of a run that has started."""
    run_dir = Path(open_run_directory(config).run_dir)
    claim(config, run_dir)
    return run_dir


def add_checkpoint(run_dir: Path, step: int) -> None:
    begin_checkpoint(run_dir / "checkpoint", step)
    finish_checkpoint(run_dir / "checkpoint", step, {})


def test_launches_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: opened(make_config(tmp_path / "out")), range(16)))
    assert len(set(paths)) == 16
    assert all(re.fullmatch(r"trial-\d{8}-\d{6}(-\d+)?", path.name) for path in paths)
    assert (tmp_path / "out" / "latest").resolve() in [path.resolve() for path in paths]
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == sorted(
        [*(path.name for path in paths), "latest"]
    )


def test_latest_survives_a_move_of_the_whole_folder(tmp_path: Path) -> None:
    run_dir = opened(make_config(tmp_path / "out"))
    (tmp_path / "out").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "latest" / "config.toml").is_file()
    assert os.readlink(tmp_path / "moved" / "latest") == run_dir.name


def test_a_start_that_fails_leaves_latest_where_it_was(tmp_path: Path) -> None:
    before = opened(make_config(tmp_path))
    failed = Path(open_run_directory(make_config(tmp_path)).run_dir)
    assert (failed / "config.toml").is_file() and (tmp_path / "latest").resolve() == before != failed


def test_resume_continues_in_the_same_folder(tmp_path: Path) -> None:
    run_dir = opened(make_config(tmp_path))
    add_checkpoint(run_dir, 3)
    other = opened(make_config(tmp_path))
    config = make_config(tmp_path, resume=str(run_dir / "checkpoint" / "step-3"))
    config.rollout.temperature = 0.7
    before = (run_dir / "config.toml").read_text()
    assert open_run_directory(config) == Start(str(run_dir), load_step=3)
    # Something may still refuse it: until then all is as it was.
    assert (tmp_path / "latest").resolve() == other and (run_dir / "config.toml").read_text() == before
    assert claim(config, run_dir) == {"rollout.temperature": "1.0 -> 0.7"} and claim(config, run_dir) == {}
    assert (tmp_path / "latest").resolve() == run_dir != other
    assert open_run_directory(make_config(tmp_path, resume="latest")).run_dir == str(run_dir)
    kept = [tomli.loads((run_dir / name).read_text()) for name in ("config-1.toml", "config.toml")]
    assert [entry["checkpoint"]["resume"] for entry in kept] == ["", config.checkpoint.resume]


def test_resume_says_what_is_missing_and_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder .*latest. No run in .* has a whole checkpoint"):
        open_run_directory(make_config(tmp_path, resume="latest"))
    good, empty = opened(make_config(tmp_path)), opened(make_config(tmp_path))
    add_checkpoint(good, 4)
    begin_checkpoint(empty / "checkpoint", 2)  # begun, never finished
    with pytest.raises(UserError, match=rf"no whole checkpoint in .*Runs with .*: {good} \(step 4\)"):
        open_run_directory(make_config(tmp_path, resume=str(empty)))
    with pytest.raises(UserError, match=r"resume = .*step-5': .* of steps 4 only"):
        open_run_directory(make_config(tmp_path, resume=str(good / "checkpoint" / "step-5")))


def test_ranks_that_are_started_again_go_on_in_the_folder_of_their_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = opened(make_config(tmp_path))
    add_checkpoint(resumed, 3)
    config = make_config(tmp_path, resume=str(resumed / "checkpoint" / "step-3"))
    config.checkpoint.enable = True
    monkeypatch.setenv(LAUNCH_VARIABLE, "first")
    run_dir = opened(make_config(tmp_path))
    new_epoch(run_dir)
    add_checkpoint(run_dir, 7)
    # What the command line says of a beginning holds for the first start alone.
    monkeypatch.setenv(LOSS_VARIABLE, "rank 1 was killed by SIGKILL")
    assert open_run_directory(config) == Start(str(run_dir), NEWEST, "rank 1 was killed by SIGKILL")
    config.checkpoint.enable = False
    with pytest.raises(UserError, match="rank 1 was killed by SIGKILL, and without checkpoint.enable = true"):
        open_run_directory(config)
    for other in ("second", "", ""):
        monkeypatch.setenv(LAUNCH_VARIABLE, other)
        assert open_run_directory(config) == Start(str(resumed), load_step=3)


def test_ranks_that_are_lost_before_they_have_gone_back_go_back_to_the_same_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = opened(make_config(tmp_path))
    add_checkpoint(run_dir, 3)
    add_checkpoint(run_dir, 7)
    config = make_config(tmp_path, resume=str(run_dir / "checkpoint" / "step-3"))
    config.checkpoint.enable = True
    monkeypatch.setenv(LAUNCH_VARIABLE, str(tmp_path / "of the launcher"))
    for _ in range(2):
        assert open_run_directory(config) == Start(str(run_dir), load_step=3)
        monkeypatch.setenv(LOSS_VARIABLE, "rank 1 was killed by SIGKILL")
    claim(config, run_dir)
    assert open_run_directory(config) == Start(str(run_dir), NEWEST, "rank 1 was killed by SIGKILL")


@pytest.mark.parametrize("kind", EXPORT_FOLDERS)
def test_going_back_sets_later_exports_aside_and_cleans_killed_ones(tmp_path: Path, kind: str) -> None:
    """A run to step 10 that is resumed at 4 stands for what it exports from then on, not for the steps it has left."""
    config_file = "config.json" if kind == WHOLE else "adapter_config.json"

    def add(name: str, content: str = "{}") -> None:
        (tmp_path / kind / name).mkdir(parents=True)
        (tmp_path / kind / name / config_file).write_text(content)

    for step in (2, 4, 8, 10):
        add(f"step-{step}")
    add("abandoned-step-8")  # of an earlier return
    add(".step-12-0123abcd")  # killed while writing
    add(".step-2-old-x_y1z2w3")  # killed before the old one was removed
    add(".step-3-old-x_y1z2w3", "the only one")  # killed between the two renames
    (tmp_path / kind / ".step-5-old-abcdefgh").mkdir()  # killed before the first
    add("step-10-mine")  # somebody else's
    go_back_to(tmp_path, 4)
    kept = ["abandoned-step-10", "abandoned-step-8", "abandoned-step-8-2", "step-10-mine", "step-2", "step-3", "step-4"]
    assert sorted(entry.name for entry in (tmp_path / kind).iterdir()) == kept
    assert (tmp_path / kind / "step-3" / config_file).read_text() == "the only one"
    if kind == WHOLE:
        assert newest_export(str(tmp_path)) == str(tmp_path / kind / "step-4")
        add("step-6")
        (tmp_path / kind / "step-7").mkdir()  # no export
        assert newest_export(str(tmp_path)) == str(tmp_path / kind / "step-6")
        config = make_config(tmp_path)
        config.model.hf_assets_path = str(tmp_path / kind / "step-10")
        with pytest.raises(UserError, match="no config.json in it .* went back .* is now .*abandoned-step-10"):
            read_shape(config)


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path), pytest.raises(UserError, match=f"another run writes to {tmp_path}"), locked(tmp_path):
            pass


def test_unwritable_dump_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="job.dump_folder = .* cannot be written"):
        open_run_directory(make_config(tmp_path / "file" / "out"))


def test_config_of_a_run_names_what_exists_by_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "arithmetic"):
        Path(name).mkdir()
    for name in ("rows.jsonl", "held_out.jsonl"):
        Path(name).touch()
    config = make_config(Path("out"))
    # The folder arithmetic is not the built-in data set.
    config.model.hf_assets_path, config.rollout.dataset, config.eval.dataset = "model", "arithmetic", "gone.jsonl"
    config.source = [Source("sums", values={"rollout.dataset": "rows.jsonl", "rewards.functions": ["accuracy"]})]
    config.eval.set = [{"name": "held out", "eval.dataset": "held_out.jsonl"}]
    run_dir = opened(config)
    tables = tomli.loads((run_dir / "config.toml").read_text())
    assert tables["job"]["dump_folder"] == str(tmp_path / "out")
    assert tables["model"]["hf_assets_path"] == str(tmp_path / "model")
    assert tables["rollout"]["dataset"] == "arithmetic" and tables["eval"]["dataset"] == "gone.jsonl"
    assert str(tmp_path / "rows.jsonl") in str(tables["source"])
    assert str(tmp_path / "held_out.jsonl") in str(tables["eval"]["set"])
    # Where the run goes on with the relative paths, nothing has changed.
    assert not claim(config, run_dir)


def test_epochs_are_numbered_unique_and_durable(tmp_path: Path) -> None:
    epochs = [new_epoch(tmp_path), new_epoch(tmp_path)]
    with (tmp_path / "epochs.jsonl").open("a") as file:
        file.write('{"epoch": "e3-cut of')
    epochs.append(new_epoch(tmp_path))
    assert [epoch.split("-")[0] for epoch in epochs] == ["e1", "e2", "e3"]
    assert len(set(epochs)) == 3
    assert [row["epoch"] for row in read_json_lines(tmp_path / "epochs.jsonl")] == epochs
