"""The command line's own conduct: statuses, and one line for an error."""

from __future__ import annotations

import json

import pytest

from kvxfer import cli
from kvxfer.cli import bench, size
from kvxfer.errors import InvalidRequest, LayoutMismatch

PHI = {
    "model_type": "phi3",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 64,
    "sliding_window": 2047,
}


@pytest.mark.parametrize(("error", "status"), [(InvalidRequest, 2), (LayoutMismatch, 1)])
def test_an_error_is_one_line_whatever_its_message(monkeypatch, capsys, error, status):
    def run(args):
        raise error("no plan:\n  - dtype\n  - heads")

    monkeypatch.setattr(bench, "run", run)
    assert cli.main(["bench"]) == status
    out, err = capsys.readouterr()
    assert out == "" and err == f"kvxfer bench: {error.__name__}: no plan: - dtype - heads\n"


def test_ctrl_c_says_nothing(monkeypatch, capsys):
    def run(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(size, "run", run)
    assert cli.main(["size", "--model", "Qwen3-0.6B"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["/nope", "nope", "Qwen3-0.6B"])
def test_a_path_given_as_one_is_never_a_models_name(capsys, name):
    assert cli.main(["size", "--config", name]) == 2
    assert f"no configuration at '{name}'" in capsys.readouterr().err


def test_a_model_that_stops_growing_is_said_to(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PHI))
    assert cli.main(["size", "--config", str(file)]) == 0
    table = capsys.readouterr().out
    (line,) = [line for line in table.splitlines() if line.startswith("bytes per token")]
    assert line.split()[3] == "0" and "a request stops growing at 2,047 tokens" in line
    assert cli.main(["size", "--config", str(file), "--tokens", "4096", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["bytes_per_token"], report["window_bytes_per_request"]) == (0, 2047 * 2 * 2 * 8 * 64 * 2)
