"""Sizes against plans that are really made, and the command line."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from kvxfer.cli import size as command
from kvxfer.errors import InvalidRequest
from kvxfer.formats import join_packed
from kvxfer.models import PRESETS, layout_for
from kvxfer.plan import join
from kvxfer.sizing import least_staging_bytes, size
from kvxfer.transfers.staging import SLOTS, UNIT_BYTES


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tokens", [1, 127, 128, 1023, 5000])
def test_moved_bytes_are_those_of_a_plan(name, tokens):
    """What sizing says will move is what a plan between equal layouts moves."""
    probe = layout_for(name)
    held = [group.blocks_to_move(tokens) for group in probe.groups]
    layout = layout_for(name, num_blocks=sum(held) or 1)
    ends = np.cumsum(held)
    lists = {
        group.name: np.arange(end - count, end, dtype=np.int32)
        for group, count, end in zip(probe.groups, held, ends, strict=True)
    }
    plan = join([layout], layout)[0].plan(lists, lists, tokens=tokens)
    sizes = size(layout, tokens=tokens)
    assert plan.nbytes == sizes.moved_bytes_per_request
    assert sizes.moved_bytes_per_request <= sizes.stored_bytes_per_request
    largest = max(part.largest_segment_bytes for part in plan.parts)
    assert sizes.staging_bytes >= sizes.concurrency * SLOTS * largest


@pytest.mark.parametrize("name", PRESETS)
def test_the_parts_add_up(name):
    layout = layout_for(name)
    for tokens in (0, 1, 5000):
        sizes = size(layout, tokens=tokens, concurrency=2)
        assert sizes.request_bytes == sizes.growing_bytes + sizes.fixed_bytes_per_request
        assert sizes.fixed_bytes_per_request == sizes.window_bytes_per_request + sizes.state_bytes_per_request
        assert sizes.receive_buffer_bytes == 2 * sizes.stored_bytes_per_request
        assert sum(group.record_bytes for group in sizes.groups) == sizes.request_bytes
    long, longer = (size(layout, tokens=tokens) for tokens in (1 << 16, 1 << 17))
    assert longer.growing_bytes - long.growing_bytes == long.bytes_per_token * (1 << 16)
    assert long.fixed_bytes_per_request == longer.fixed_bytes_per_request


@pytest.mark.parametrize(("tokens", "concurrency"), [(-1, 1), (True, 1), (1, 0), (1.5, 1)])
def test_wrong_numbers(tokens, concurrency):
    with pytest.raises(InvalidRequest, match="must be an integer"):
        size(layout_for("Qwen3-0.6B"), tokens=tokens, concurrency=concurrency)


def run(capsys, *words: str) -> str:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(words)) == 0
    return capsys.readouterr().out


def test_json(capsys):
    words = [
        "--model",
        "deepseek-ai/DeepSeek-V4.1-Flash",
        "--tokens",
        "1000000",
        "--concurrency",
        "3",
        "--json",
    ]
    report = json.loads(run(capsys, *words))
    assert report["bytes_per_token"] == 890 and report["stored_bytes_per_token"] == 915.75
    assert report["block_stride_bytes"] == 117_216
    assert report["kv_cache"].startswith("v41.nvfp4_ds_mla.288")
    assert {group["name"] for group in report["groups"]} == {"mla", "ring", *(f"swa.{g}" for g in range(7))}
    for key in ("fixed_bytes_per_request", "request_bytes", "receive_buffer_bytes", "staging_bytes"):
        assert isinstance(report[key], int) and report[key] > 0
    sparse = json.loads(run(capsys, *words, "--indexer-sparse-logits", "--draft", "dspark"))
    assert sparse["stored_bytes_per_token"] == 990 and len(sparse["groups"]) == 10


@pytest.mark.parametrize(
    ("words", "record"),
    [
        ((), "v41.nvfp4_ds_mla.288.interleaved"),
        (("--engine-version", "0.32.1"), "v41.nvfp4_ds_mla.288.segregated"),
        (("--kv-cache-dtype", "fp8"), "v4.fp8.512"),
        (("--kv-cache-dtype", "fp8", "--arch", "sm90"), "v4.fp8_ds_mla.584"),
        (("--kv-cache-dtype", "fp8_ds_mla"), "v41.fp8_ds_mla.528.interleaved"),
        (("--kv-cache-dtype", "fp8_ds_mla", "--arch", "sm120"), "v4.fp8_ds_mla.584"),
        (("--engine-version", "0.30"), "v41.fp8_ds_mla.528.segregated"),
    ],
)
def test_a_name_resolves_to_a_record(capsys, words, record):
    report = json.loads(run(capsys, "--model", "DeepSeek-V4.1-Flash", "--json", *words))
    assert report["records"][0].startswith(record)


def test_config_file(capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PRESETS["Qwen/Qwen2.5-14B"]))
    assert json.loads(run(capsys, "--config", str(file), "--tp", "2", "--json"))["bytes_per_token"] == 98_304


def test_whether_it_fits(capsys):
    words = ["--model", "Llama-3.1-8B", "--tokens", "100000", "--concurrency", "2", "--weights-gib", "16"]
    report = json.loads(run(capsys, *words, "--gpu-memory-gib", "80", "--json"))
    assert report["fits"] and report["requests_that_fit"] >= 2
    assert report["needed_bytes"] == report["receive_buffer_bytes"] + report["staging_bytes"]
    assert "DOES NOT FIT" in run(capsys, *words, "--gpu-memory-gib", "24")
    with pytest.raises(InvalidRequest, match="pass both"):
        run(capsys, *words)
    with pytest.raises(InvalidRequest, match="finite"):
        run(capsys, *words, "--gpu-memory-gib", "nan")


def test_table(capsys):
    text = run(capsys, "--model", "DeepSeek-V4-Flash", "--tokens", "1048576")
    assert "3,850.25" in text and "1,002,240" in text and "c128_state" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("name", PRESETS)
def test_the_least_staging_holds_the_largest_chunk(name):
    probe = layout_for(name)
    layout = layout_for(name, num_blocks=sum(group.blocks_to_move(5000) for group in probe.groups))
    ends = np.cumsum([group.blocks_to_move(5000) for group in layout.groups])
    counts = [group.blocks_to_move(5000) for group in layout.groups]
    lists = {
        group.name: np.arange(end - count, end, dtype=np.int32)
        for group, count, end in zip(layout.groups, counts, ends, strict=True)
    }
    plan = join_packed([layout], layout, "raw")[0].plan(lists, lists, tokens=5000)
    least, largest = least_staging_bytes(layout), plan.largest_segment_bytes
    assert largest <= least < 2 * largest + UNIT_BYTES
