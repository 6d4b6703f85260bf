"""What the command evaluates, and what it says where it cannot."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.make_debug_checkpoint import debug_model_args, write_tokenizer
from torchtitan import evaluate
from torchtitan.config.evaluations import eval_configs
from torchtitan.config.job_config import JobConfig, config_to_toml
from torchtitan.errors import UserError
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy
from torchtitan.trainer import job
from torchtitan.trainer.run_dir import begin_checkpoint, finish_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two checkpoints, remains of a third, and two exports."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = JobConfig()
    config.training.seed = 7
    config.rewards.functions, config.lora.rank, config.checkpoint.resume = ["arithmetic"], 8, "elsewhere"
    config.training.seq_len, config.rollout.max_completion_tokens = 32, 8
    (folder / "config.toml").write_text(config_to_toml(config))
    for step in (2, 10):
        begin_checkpoint(folder / "checkpoint", step)
        finish_checkpoint(folder / "checkpoint", step, {})
        (folder / "hf" / f"step-{step}").mkdir(parents=True)
        (folder / "hf" / f"step-{step}" / "config.json").write_text("{}")
    begin_checkpoint(folder / "checkpoint", 12)
    return folder


def test_a_run_is_all_its_whole_checkpoints_and_other_paths_are_one(run: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run)
    config_file = str(run / "config.toml")
    assert evaluate.find(str(tmp_path / "latest")) == evaluate.Evaluated(config_file, run / "checkpoint", [2, 10])
    assert evaluate.find(str(run / "checkpoint" / "step-2")) == evaluate.Evaluated(config_file, run / "checkpoint", [2])
    export = run / "hf" / "step-2"
    assert evaluate.find(str(export)) == evaluate.Evaluated(config_file, export)
    assert evaluate.find(str(export), "mine.toml") == evaluate.Evaluated("mine.toml", export)
    (run / "checkpoint").rename(tmp_path / "moved")
    assert evaluate.find(str(run)) == evaluate.Evaluated(config_file, run / "hf" / "step-10")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    export_policy(Decoder(debug_model_args()), folder)
    write_tokenizer(folder)
    return folder


def test_the_configuration_is_the_runs_and_options_win(run: Path, model: Path) -> None:
    _, options = evaluate.parse([str(run), "--samples", "3", "--backend", "vllm", "--training.seed", "9"])
    of_run = ["--model.hf_assets_path", str(model), *options]
    config = evaluate.configure(evaluate.find(str(run)), of_run)
    assert (config.inference.backend, config.training.seed, config.lora.rank) == ("vllm", 9, 8)
    assert config.eval.samples_per_prompt == 3
    assert (config.checkpoint.resume, config.training.steps) == ("", 0)
    directory = evaluate.Evaluated(str(run / "config.toml"), model)
    config = evaluate.configure(directory, [])
    assert (config.model.hf_assets_path, config.lora.rank, config.training.seed) == (str(model), 0, 7)


def test_it_says_what_is_missing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere: there is no such folder (looked in " in capsys.readouterr().err
    assert evaluate.main(["no-outputs/latest"]) == 2  # a link to a run, and no model of the Hub
    assert "no-outputs/latest: there is no such folder (looked in " in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"is no run folder \(config.toml\), no whole checkpoint"):
        evaluate.find(str(empty))
    (empty / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"belongs to no run .* add --config FILE"):
        evaluate.find(str(empty))
    (empty / "config.json").unlink()
    (empty / "config.toml").write_text((run / "config.toml").read_text())
    with pytest.raises(UserError, match=r"the run has no whole checkpoint \(checkpoint.enable = true"):
        evaluate.find(str(empty))
    # Of the number in its name another checkpoint may have become the one of that step.
    for name in ("abandoned-step-10", "abandoned-step-10-2"):
        aside = (run / "checkpoint" / "step-10").rename(run / "checkpoint" / name)
        with pytest.raises(UserError, match=r"went back to an earlier step: .* as step-10, and name .* --config"):
            evaluate.find(str(aside))
        aside.rename(run / "checkpoint" / "step-10")
    assert evaluate.main([str(run), "--dry-run"]) == 2
    assert "--dry-run: an evaluation has no plan of its own" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluate.main(["--samples", "3"])
    assert "name a run folder" in capsys.readouterr().err


def test_single_sets_can_be_chosen_and_options_are_for_all(run: Path, model: Path, tmp_path: Path) -> None:
    config_file = tmp_path / "sets.toml"
    sets = '[[eval.set]]\nname = "short"\nsamples_per_prompt = 8\n'
    sets += '[[eval.set]]\nname = "long"\nnum_prompts = 9\n'
    config_file.write_text((run / "config.toml").read_text() + sets)
    directory = evaluate.Evaluated(str(config_file), model)
    found = dict(eval_configs(evaluate.configure(directory, [])))
    assert list(found) == ["short", "long"] and found["long"].eval.num_prompts == 9
    assert found["short"].eval.samples_per_prompt == 8
    found = dict(eval_configs(evaluate.configure(directory, ["--eval.samples_per_prompt", "2"], ["short"])))
    assert list(found) == ["short"]
    assert found["short"].eval.samples_per_prompt == 2
    with pytest.raises(UserError, match=r"--set shrot: .*sets.toml has the sets short, long"):
        evaluate.configure(directory, [], ["shrot"])
    with pytest.raises(UserError, match=r"names none \(\[\[eval.set\]\], \[\[source\]\]\)"):
        evaluate.configure(evaluate.Evaluated(str(run / "config.toml"), model), [], ["short"])


def test_a_run_that_evaluated_nothing_is_evaluated_on_as_many_prompts_as_others(run: Path, model: Path) -> None:
    config_file = run / "config.toml"
    text = re.sub(r"num_prompts = \d+", "num_prompts = 0", config_file.read_text())
    config_file.write_text(text)
    assert "num_prompts = 0" in text
    directory = evaluate.Evaluated(str(config_file), model)
    assert evaluate.configure(directory, []).eval.num_prompts == 128
    with pytest.raises(UserError, match=r"eval.num_prompts = 0 evaluates nothing"):
        evaluate.configure(directory, ["--eval.num_prompts", "0"])


def test_students_are_evaluated_without_the_teachers_of_their_sources(run: Path, model: Path, tmp_path: Path) -> None:
    config_file = tmp_path / "students.toml"
    text = (run / "config.toml").read_text().replace('stage = "grpo"', 'stage = "distill"')
    config_file.write_text(
        text + '[[source]]\nname = "a"\ndistill.teacher = "gone"\n[[source]]\nname = "b"\ndistill.teacher = ""\n'
    )
    config = evaluate.configure(evaluate.Evaluated(str(config_file), model), [])
    assert config.job.stage == "grpo" and [source.values for source in config.source] == [{}, {}]


@pytest.mark.parametrize("deleted", [[2], [10], [2, 10]])
def test_checkpoints_that_are_deleted_meanwhile_are_named(
    run: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], deleted: list[int]
) -> None:
    steps: list[int] = []

    class FakeJob:
        """Writes the row that an evaluation writes."""

        run_dir, exit_code, controller = run, 0, object()

        def __init__(self, config: JobConfig):
            del config

        def __enter__(self) -> FakeJob:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def load(self, folder: Path, step: int) -> bool:
            assert folder == run / "checkpoint"
            return step not in deleted and not steps.append(step)

        def start(self) -> None:
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 0, "time": 0.0, "eval/version": steps[-1]}) + "\n")

        def raise_failure(self) -> None:
            pass

    monkeypatch.setattr(job, "TrainingJob", FakeJob)
    monkeypatch.setattr(evaluate, "follow_commands", lambda _: SimpleNamespace(kind=None))
    code = evaluate.main([str(run), "--model.hf_assets_path", str(model), "--output", str(run / "found.json")])
    output = capsys.readouterr()
    if len(deleted) == 2:
        assert code == 1 and "its run has deleted checkpoint/step-2, checkpoint/step-10 meanwhile" in output.err
        return
    found = json.loads((run / "found.json").read_text())
    rows = [(Path(row["checkpoint"]).name, row["eval/version"]) for row in found["evaluations"]]
    (kept,) = {2, 10} - {*deleted}
    assert code == 0 and rows == [(f"step-{kept}", kept)]
    assert found["deleted"] == [str(run / "checkpoint" / f"step-{deleted[0]}")]
    assert f"their run has deleted them meanwhile: checkpoint/step-{deleted[0]}" in output.err
    assert f"checkpoint/step-{kept}" in output.out
