"""Whether the other tests of this folder can run here."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here; make test-vllm has it"
)
def test_a_version_of_vllm_that_is_known() -> None:
    from kvxfer.vllm import versions

    assert versions.installed().startswith(versions.KNOWN)
