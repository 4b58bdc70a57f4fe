"""The benchmarks of a checkout: how all of them are called."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
BENCHMARKS = sorted(FOLDER.glob("bench_*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_json_names_the_file_to_write(path):
    """Without running them: many need a GPU, or a package, before they read an argument."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    (flag,) = [call for call in calls if call.args and getattr(call.args[0], "value", None) == "--json"]
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in flag.keywords}
    assert (keywords.get("type"), keywords.get("metavar")) == ("Path", "'FILE'")
    saved = [ast.unparse(call) for call in calls if ast.unparse(call.func) in ("timing.save", "save")]
    assert len(saved) == 1 and ".json, " in saved[0]


def test_kvxfer_bench_passes_the_file_on(tmp_path):
    file = tmp_path / "plan.json"
    small = ("--regions", "2", "--blocks", "20", "--repeat", "2")
    command = [sys.executable, "-m", "kvxfer.cli", "bench", "plan", *small, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "blocks of 16 -> 16 tokens" in done.stdout and '"environment"' in file.read_text()
