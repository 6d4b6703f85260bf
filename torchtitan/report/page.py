"""The page of a run: one HTML file that draws one object of data, and needs nothing from a network.

report.html holds its data. The page that a server shows is the same file with `null` in their place, and asks the
server for them (live_server.py).

What a model or an actor wrote is text in the data, never markup: JSON without `<` in the file, and set as the text of
elements by the script. A content security policy allows this script and this style sheet alone, by their hashes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import time
from importlib import resources
from pathlib import Path

from torchtitan.report.metrics import run_folder
from torchtitan.report.page_data import RunReader
from torchtitan.utils.json_lines import write_whole

REPORT_FILE = "report.html"
SCRIPTS = ("charts.js", "completions.js", "page.js")
STYLE = "page.css"
NO_DATA = "null"


def write_report(run_dir: str | Path) -> Path:
    """Write RUN_DIR/report.html atomically and return its path. Works with few rows or none.

    Raises:
        UserError: the folder does not exist.
    """
    path = run_folder(run_dir) / REPORT_FILE
    data = RunReader(path.parent).read() | {"written": round(time.time())}
    write_whole(path, page(json.dumps(data, separators=(",", ":"))))
    return path


def page(data: str) -> str:
    """Return the HTML with this JSON as its data."""
    # In a script element only `<` can end it, or begin a comment.
    return _template().replace("{{data}}", data.replace("<", "\\u003c"))


def content_policy() -> str:
    """Return the content security policy of the page."""
    script, style = (_hash(text) for text in (_script(), _resource(STYLE)))
    return (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


@functools.cache
def _template() -> str:
    text = _resource("page.html").replace("{{policy}}", content_policy())
    return text.replace("{{style}}", _resource(STYLE)).replace("{{script}}", _script())


def _script() -> str:
    return "\n".join(_resource(name) for name in SCRIPTS)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
