"""`kvxfer demo` and `kvxfer doctor` on NIXL, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("nixl_cu13")


def kvxfer(*args: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", *args],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("way", ["direct", "packed"])
def test_a_synthetic_cache_goes_over_nixl(way):
    done = kvxfer("demo", "--synthetic", "--tokens", "2000", "--backend", "nixl", "--way", way, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["backend"], report["way"], report["verified"]) == ("nixl", way, True)


def test_an_unknown_backend_is_named():
    done = kvxfer("demo", "--synthetic", "--backend", "carrier-pigeon")
    assert done.returncode != 0
    assert "carrier-pigeon" in done.stderr and "nixl" in done.stderr


def test_doctor_tries_nixl_and_says_what_stands_in_its_way():
    done = kvxfer("doctor", "--json", UCX_TLS="tcp", UCX_NET_DEVICES="lo,eth99")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    network = report["network"]
    assert "127.0.0.1" in network["interfaces"]["lo"]
    assert {"UCX_NET_DEVICES": "lo,eth99", "UCX_TLS": "tcp"}.items() <= network["ucx_variables"].items()
    assert network["ucx_transports"] == ["tcp/lo"]
    assert any("eth99" in line for line in network["advice"])
    tried = {way["way"]: way["works"] for way in report["ways"] if way["backend"] == "nixl"}
    assert tried == {"direct": True, "packed": True}
