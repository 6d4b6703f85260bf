"""The figure that compares runs."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from scripts.compare_runs import main
from tests.unit_tests.report.test_report import write_run
from torchtitan.utils.definitions import is_installed


def test_what_draws_figures_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(tmp_path), "--output", str(tmp_path / "figure.svg")]) == 1
    assert "python -m pip install matplotlib" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("matplotlib"), reason="a figure is drawn by matplotlib, of the extra `test`")
def test_a_figure_names_its_runs_and_a_mistake_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(write_run(tmp_path / name, steps=150)) for name in ("first", "second")]
    svg = tmp_path / "figures" / "both.svg"
    assert main([*runs, "--labels", "asynchronous", "blocking", "--output", str(svg)]) == 0
    texts = "".join(ElementTree.parse(svg).getroot().itertext())
    assert "asynchronous" in texts and "blocking" in texts and "Held-out pass@1" in texts
    assert main([*runs, "--output", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    for arguments, message in (
        ([str(tmp_path)], "has no rows"),
        ([*runs, "--labels", "one"], "--labels names 1 runs, and there are 2"),
        ([*runs, "--output", "figure.gif"], "must be a .svg or a .png"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err
