"""Fills docs/benchmarks.md, and a table of docs/vllm.md, from what is in benchmarks/results.

python benchmarks/page.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_messages
import latency
import tables

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
PAGE, VLLM_PAGE = DOCS / "benchmarks.md", DOCS / "vllm.md"
SMS = (4, 8, 16, 32, 64, 132)
VARIANT = "768x8"


def load(name: str) -> tuple[dict, list[dict]]:
    """The environment and the results of one file."""
    content = json.loads((RESULTS / name).read_text())
    return content["environment"], content["results"]


def shm() -> str:
    """Host memory between two processes."""
    environment, [result] = load("shm.json")
    kinds = list(dict.fromkeys(row["row"] for row in result["rows"]))
    sizes = list(dict.fromkeys(row["block_kib"] for row in result["rows"]))
    cells = {(row["row"], row["block_kib"]): row for row in result["rows"]}
    body = [
        [kind]
        + [
            f"{cells[kind, size]['gigabytes_per_s']:.2f} ({cells[kind, size]['low']:.2f} to "
            f"{cells[kind, size]['high']:.2f}), x{cells[kind, size]['of_plain_gather']:.2f}"
            for size in sizes
        ]
        for kind in kinds
    ]
    control, plan = result["control"], result["plan"]
    return (
        tables.markdown(
            ["GB/s: median (quartiles), ratio to the same kernel"] + [f"{s} KiB blocks" for s in sizes], body
        )
        + f"\n\nOne block: publish {control['publish_us']:.0f} us, fetch p50 {control['fetch_p50_us']:.0f} us, "
        f"p99 {control['fetch_p99_us']:.0f} us. A plan of {plan['blocks']:,} blocks: {plan['median_ms']:.1f} ms.\n\n"
        f"{_where(environment)}"
    )


def staging() -> str:
    """What filling staging costs, by how long ago the other end has read it."""
    environment, rows = load("staging.json")
    hows = list(dict.fromkeys(row["how"] for row in rows))
    slots = list(dict.fromkeys(row["slots"] for row in rows))
    cells = {(row["how"], row["slots"]): f"{row['gb_s']:.1f} ({row['low']:.1f} to {row['high']:.1f})" for row in rows}
    body = [[how, *(cells[how, count] for count in slots)] for how in hows]
    head = ["filling, GB/s of processor time: median (quartiles); chunks:", *map(str, slots)]
    return f"{tables.markdown(head, body)}\n\n{_where(environment)}"


def nixl(name: str) -> str:
    """The NIXL backend between two processes."""
    environment, [result] = load(name)
    kinds = list(dict.fromkeys(row["row"] for row in result["rows"]))
    sizes = list(dict.fromkeys(row["block_kib"] for row in result["rows"]))
    cells = {(row["row"], row["block_kib"]): row for row in result["rows"]}

    def cell(row: dict) -> str:
        way = f" {row['way']}" if "chooses" in row["row"] else ""
        return f"{row['gigabytes_per_s']:.2f} ({row['low']:.2f} to {row['high']:.2f}), x{row['of_ceiling']:.2f}{way}"

    body = [[kind, *(cell(cells[kind, size]) for size in sizes)] for kind in kinds]
    body += _parts(result, sizes)
    rest = "; ".join(f"{who} {share:.3f}" for who, share in result["at_rest"].items())
    head = ["GB/s: median (quartiles), ratio to the better ceiling", *(f"{size} KiB blocks" for size in sizes)]
    age = "" if "parts" in result else "Measured before the packed way was reworked, and not since. "
    return f"{tables.markdown(head, body)}\n\n{age}Of a core at rest: {rest}.\n\n{_where(environment)}"


def _parts(result: dict, sizes: list[int]) -> list[list[str]]:
    """Rows of what a packed transfer consists of, and what two cores that share it would reach."""
    apart = {parts["block_kib"]: parts for parts in result.get("parts", [])}
    if not apart:
        return []
    names = ("gather", "wire", "scatter")
    best = {row["block_kib"]: row["gigabytes_per_s"] / row["of_ceiling"] for row in result["rows"]}
    bound = {size: apart[size]["bound_gigabytes_per_s"] for size in sizes}
    gigabytes = {size: bound[size] * sum(apart[size][f"{name}_s"] for name in names) / 2 for size in sizes}
    return [
        *(
            [f"part: {name}, one core", *(f"{gigabytes[size] / apart[size][f'{name}_s']:.2f}" for size in sizes)]
            for name in names
        ),
        [
            "bound: two cores share the parts",
            *(f"{bound[size]:.2f}, x{bound[size] / best[size]:.2f}" for size in sizes),
        ],
    ]


def nixl_link(*names: str) -> str:
    """NIXL between two hosts, over links of given rates."""
    environments, rows, columns = [], {}, []
    names = tuple(name for name in names if (RESULTS / name).exists())
    if not names:
        return "Not run yet with this version: `benchmarks/bench_link.py` makes this table."
    for name in names:
        environment, [result] = load(name)
        environments.append(environment)
        for row in result["rows"]:
            column = f"{environment['rate']}, {row['block_kib']} KiB"
            columns += [column] if column not in columns else []
            spread = f"{row['gigabytes_per_s']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
            ratio = f"raw x{row['of_raw']:.2f}" if "nvfp4" in row["row"] else f"x{row['of_ceiling']:.2f}"
            way = f" {row['way']}" if "chooses" in row["row"] else ""
            rows.setdefault(row["row"], {})[column] = f"{spread}, {ratio}{way}"
    body = [[kind, *(cells.get(column, "") for column in columns)] for kind, cells in rows.items()]
    head = ["GB/s of bf16: median (quartiles), ratio to the better ceiling", *columns]
    return f"{tables.markdown(head, body)}\n\n{_where({k: v for k, v in environments[0].items() if k != 'rate'})}"


def nixl_cost() -> str:
    """What packed transfers over NIXL cost beside time."""
    if not (RESULTS / "nixl_cost.json").exists():
        return "Not run yet with this version: `benchmarks/bench_nixl_cost.py` makes this table."
    environment, [result] = load("nixl_cost.json")
    whose = ("copies", "engine", "kvxfer", "NIXL")
    body = [
        [row["transport"], f"{row['gigabytes_per_s']:.2f}"]
        + [f"{row['ms_per_gib'][who]:.1f} ms, {row['share_of_a_core'][who]:.3f}" for who in whose]
        for row in result["processors"]
    ]
    staging, memory = result["staging"], result["memory"]
    grown = ", ".join(f"{side} {grown / 1024:+,.0f} KiB" for side, grown in memory["grown_bytes"].items())
    most, bound = (staging[name] >> 20 for name in ("most_lent_bytes", "bound_bytes"))
    return (
        tables.markdown(["transport", "GB/s", *(f"{who}: per GiB, of a core" for who in whose)], body)
        + f"\n\nStaging: {staging['requests']} fetches of 4 MiB at once were lent at most {most} of {bound} MiB, with "
        f"up to {staging['most_waiting']} of them in line. Resident memory, from transfer "
        f"{memory['transfers'] // 10:,} to {memory['transfers']:,}: {grown}."
        f"\n\n{_where(environment)}"
    )


def cuda_copy() -> str:
    """The copy kernel on GPUs."""
    environment, results = load("h200x2/cuda_copy.json")
    ceilings = {r["way"]: r["gb_s"] for r in results if r["what"] == "ceiling: one piece"}
    sections = []
    for way, title in (("push", "into the peer (push)"), ("pull", "out of the peer (pull)"), ("local", "within a GPU")):
        rows = [r for r in results if r["what"] == "copy" and r["way"] == way and r.get("variant", VARIANT) == VARIANT]
        cells = {(r["piece"], r["max_sms"]): r["gb_s"] for r in rows}
        pieces = sorted({r["piece"] for r in rows})
        body = [[f"{piece:,} B"] + [f"{cells[piece, sms]:.0f}" for sms in SMS] for piece in pieces]
        peers = [r for r in results if r["what"].startswith("peer") and r["way"] == way]
        others = "; ".join(f"{r['what'].removeprefix('peer: ')} {r['piece']:,} B {r['gb_s']:.1f}" for r in peers)
        others = f" Others on the same blocks: {others}." if others else ""
        sections.append(
            f"**{title}**, GB/s; one piece of as many bytes: {ceilings[way]:.0f}.{others}"
            "\n\n" + tables.markdown(["scattered pieces"] + [f"{sms} SMs" for sms in SMS], body)
        )
    return "\n\n".join(sections) + f"\n\n{_where(environment)}"


def cuda_formats() -> str:
    """Formats on a GPU."""
    environment, results = load("h200x2/cuda_formats.json")
    ceilings = [r for r in results if r["what"].startswith("ceiling")]
    rows = [r for r in results if r.get("max_sms") == SMS[-1]]
    cells = {(r["wire"], r["cache"], r["what"]): r["tb_s"] for r in rows}
    ways = list(dict.fromkeys(r["what"] for r in rows))
    body = [
        [f"`{wire}`", cache] + [f"{cells[wire, cache, way]:.2f}" for way in ways]
        for wire, cache in dict.fromkeys((r["wire"], r["cache"]) for r in rows)
    ]
    best = ", ".join(f"{r['what'].removeprefix('ceiling: ')} {r['tb_s']:.2f}" for r in ceilings)
    return (
        tables.markdown(["wire format", "cache", *ways], body) + f"\n\nCeilings, TB/s: {best}.\n\n{_where(environment)}"
    )


def bare() -> str:
    """NVFP4's kernels beside their loads and stores alone."""
    environment, results = load("h200/cuda_formats.json")
    rates = {(r.get("wire", ""), r["what"]): r for r in results if "tb_s" in r}
    pairs = {
        "pack": ("ceiling: 16 bits read for 4.5 written", ("nvfp4", "pack")),
        "unpack": ("ceiling: 4.5 bits read for 16 written", ("nvfp4", "unpack")),
    }

    def cell(row: dict) -> str:
        low, high = (row["nbytes"] / row["timing"][end] / 1e12 for end in ("high_s", "low_s"))
        return f"{row['tb_s']:.2f} ({low:.2f} to {high:.2f})"

    body = [
        [what, cell(rates["", ceiling]), cell(rates[ours]), f"{rates[ours]['tb_s'] / rates['', ceiling]['tb_s']:.2f}"]
        for what, (ceiling, ours) in pairs.items()
    ]
    head = ["TB/s of bf16: median (quartiles)", "loads and stores alone", "the kernel", "of it"]
    return f"{tables.markdown(head, body)}\n\n{_where(environment)}"


def messages() -> str:
    """Round trips between two processes of a host."""
    environment, results = load("h200/messages.json")
    return f"{bench_messages.table(results)}\n\n{_where(environment)}"


def cuda_ipc() -> str:
    """Whole fetches between GPUs of two processes."""
    environment, [result] = load("h200x2/cuda_ipc.json")
    body = [
        [
            f"{row['block_kib']} KiB",
            row["row"],
            f"{row['gigabytes_per_s']:.0f} ({row['low']:.0f} to {row['high']:.0f})",
            f"{row['of_ceiling']:.2f}",
        ]
        for row in result["rows"]
    ]
    control = result["control"]
    return (
        tables.markdown(["blocks", "", "GB/s: median (quartiles)", "of one plain copy"], body)
        + f"\n\nOne plain copy: {result['ceiling']['gigabytes_per_s']:.0f} GB/s. One block: fetch p50 "
        f"{control['fetch_p50_us']:.0f} us, p99 {control['fetch_p99_us']:.0f} us.\n\n{_where(environment)}"
    )


GPU_RUNS = {
    "A": "h200x2/gpu.json",
    "B": "h200/gpu.json",
    "C": "h200x2/gpu_kernels.json",
    "D": "h200x2/gpu_packed.json",
}


def gpu() -> str:
    """What is asked of GPUs, what was reached in the newest run that has the row, and others on the same work."""
    runs = {name: load(path) for name, path in GPU_RUNS.items()}

    def row(what: str, only: str = "", **wanted: object) -> tuple[str, dict | None]:
        for name, (_, results) in runs.items():
            for r in results:
                if only in ("", name) and r["what"] == what and all(r.get(k) == v for k, v in wanted.items()):
                    return name, r
        return "", None

    def value(what: str, key: str, only: str = "", **wanted: object) -> tuple[str, float | None]:
        name, found = row(what, only, **wanted)
        return name, found and found.get(key)

    def least(what: str, pieces: tuple[int, ...], only: str = "", **wanted: object) -> tuple[str, float | None]:
        found = [value(what, "gb_s", only, piece=piece, **wanted) for piece in pieces]
        return found[0][0], None if any(rate is None for _, rate in found) else min(rate for _, rate in found)

    def tera(wire: str, way: str) -> tuple[str, float | None]:
        name, found = value("format", "gb_s", wire=wire, way=way)
        return name, found and found / 1e3

    def packed(wire: str, gib: int) -> tuple[str, float | None]:
        return value("packed", "gb_s", "D", wire=wire, max_sms=64, nbytes=gib << 30)

    sizes, larger = (4096, 16384, 65536, 1 << 20), (4096, 65536, 1 << 20)
    alone, together = {"only": "A", "layers": 64, "at_once": 1}, {"only": "A", "layers": 64, "at_once": 2}
    pull = {"way": "pull", "only": "C"}
    goals = [
        ("fetch, 4 KiB to 1 MiB pieces, 16 SMs", "GB/s", 360, least("fetch", sizes, max_sms=16, **alone)),
        ("the same, two fetches at a time", "GB/s", 360, least("fetch", sizes, max_sms=16, **together)),
        ("the same, 4 GiB", "GB/s", 360, least("large", larger, "D", max_sms=16)),
        ("fetch, 1 KiB pieces, 16 SMs", "GB/s", 330, least("fetch", (1024,), max_sms=16, **alone)),
        ("fetch, 512 B pieces, 16 SMs", "GB/s", 300, least("fetch", (512,), max_sms=16, **alone)),
        ("fetch, 4 to 64 KiB pieces, 8 SMs", "GB/s", 352, least("fetch", sizes[:3], max_sms=8, **alone)),
        ("the same, two fetches at a time", "GB/s", 352, least("fetch", sizes[:3], max_sms=8, **together)),
        ("the same, 4 GiB", "GB/s", 352, least("large", larger[:2], "D", max_sms=8)),
        ("kernel, pull, 4 to 64 KiB pieces, 16 SMs", "GB/s", 360, least("kernel", sizes[:3], max_sms=16, **pull)),
        ("kernel, pull, 4 to 64 KiB pieces, 8 SMs", "GB/s", 352, least("kernel", sizes[:3], max_sms=8, **pull)),
        ("kernel within a GPU, 4 KiB pieces", "GB/s", 1900, least("kernel", (4096,), only="B", way="local")),
        ("DeepSeek-V4.1-Flash, 1,048,576 tokens, 16 SMs", "ms", -2.7, value("model", "milliseconds", "A", max_sms=16)),
        ("bf16 to NVFP4, gather and pack", "TB/s", 3.0, tera("nvfp4", "pack")),
        ("NVFP4 to bf16, unpack and scatter", "TB/s", 3.0, tera("nvfp4", "unpack")),
        ("bf16 to NVFP4, packed into the peer", "TB/s", 1.27, tera("nvfp4", "pack into the peer")),
        ("fp8 pack", "TB/s", 2.6, tera("fp8_e4m3", "pack")),
        ("bf16 to NVFP4 to peer to bf16, two processes, 8 GiB", "GB/s", 1200, packed("nvfp4", 8)),
        ("the same, 1 GiB", "GB/s", 1200, packed("nvfp4", 1)),
        ("NIXL, packed, 64 KiB pieces, 4 GiB", "GB/s", 300, value("nixl", "gb_s", "D", piece=65536, nbytes=4 << 30)),
        ("the same, 1 GiB", "GB/s", 300, value("nixl", "gb_s", "D", piece=65536, nbytes=1 << 30)),
        ("one V4.1 request of 64 tokens, p50", "us", -250, value("latency", "p50_us", "A")),
        ("host time for 100,000 pieces in 100 layers", "us", -1000, value("post", "host_us", layers=100)),
        ("host time for 100,000 pieces in one layer", "us", -1000, value("post", "host_us", layers=1)),
    ]  # a goal below zero is a limit
    body = [
        [what, f"{'at most' if goal < 0 else 'at least'} {abs(goal):g} {unit}", _reached(found, goal, unit), run]
        for what, unit, goal, (run, found) in goals
    ]
    _, kernels = runs["C"]
    ceilings = ", ".join(f"{r['way']} {r['gb_s']:.0f}" for r in kernels if r["what"] == "ceiling")
    others = [
        [r["peer"], r.get("name", ""), f"{r['piece']:,} B" if "piece" in r else "", _rate_or_reason(r)]
        for r in kernels
        if r["what"] == "peer"
    ]
    return (
        tables.markdown(["what", "wanted", "reached", "run"], body)
        + f"\n\nCeilings of run C, one piece, GB/s: {ceilings}.\n\nOthers on the same work, in run C:\n\n"
        + tables.markdown(["library", "what", "pieces", "GB/s"], others)
        + "\n\n"
        + "\n".join(f"- Run {name}. {_where(environment)}" for name, (environment, _) in runs.items())
    )


LAUNCHES = {
    "NVFP4 pack": (0, 1, 2, 6),
    "NVFP4 pack, into the other GPU": (3, 4, 5),
    "NVFP4 unpack": (7, 8, 9),
    "copy, 4 KiB, 132 SMs": (10, 11),
    "copy, 4 KiB, into the other GPU, 16 SMs": (12, 13),
}
"""What kernel_counters.py launches with two GPUs, in Nsight Compute's order."""


def counters() -> str:
    """Hardware counters of kernels: the least and the most of their launches."""
    reports = re.split(r"^  void ", (RESULTS / "h200x2" / "kernel_counters.txt").read_text(), flags=re.MULTILINE)[1:]
    nbytes, gpu_sms = 512 << 20, SMS[-1]

    def number(report: str, metric: str) -> float:
        return float(re.search(rf"^ +{re.escape(metric)} .*?([\d.,]+)$", report, re.MULTILINE)[1].replace(",", ""))

    def microseconds(report: str) -> float:
        return number(report, "Duration") * (1e3 if re.search(r"^ +Duration +ms ", report, re.MULTILINE) else 1)

    def active(report: str) -> float:
        grid = int(re.search(r"\) \((\d+), 1, 1\)x", report)[1])
        return 100 * number(report, "SM Active Cycles") * gpu_sms / grid / number(report, "Elapsed Cycles")

    def waiting(report: str) -> float:
        return float(re.search(r"spends ([\d.]+) cycles being stalled waiting for a scoreboard", report)[1])

    metrics = {
        "TB/s": (2, lambda r: nbytes / microseconds(r) / 1e6),
        "DRAM, %": (0, lambda r: number(r, "DRAM Throughput")),
        "L2, %": (0, lambda r: number(r, "L2 Cache Throughput")),
        "issue slots, %": (0, lambda r: number(r, "Issue Slots Busy")),
        "cycles between instructions": (1, lambda r: number(r, "Warp Cycles Per Issued Instruction")),
        "of these waiting for loads": (1, waiting),
        "occupancy, %": (1, lambda r: number(r, "Achieved Occupancy")),
        "possible": (1, lambda r: number(r, "Theoretical Occupancy")),
        "SMs active, %": (0, active),
    }

    def cell(launches: tuple[int, ...], metric: str) -> str:
        digits, of = metrics[metric]
        least, most = (f"{f(of(reports[i]) for i in launches):.{digits}f}" for f in (min, max))
        return least if least == most else f"{least} to {most}"

    return tables.markdown(
        ["kernel", *metrics], [[name, *(cell(launches, m) for m in metrics)] for name, launches in LAUNCHES.items()]
    )


def nccl() -> str:
    """Fetches over the NCCL backend, and NCCL alone."""
    environment, results = load("h200x2/nccl.json")
    [best] = [r for r in results if r["what"] == "plain" and r["bytes_each"] == 256 << 20]
    body = []
    for r in results:
        if r["what"] == "plain":
            body.append([f"ceiling: NCCL alone, one buffer of {_bytes(r['bytes_each'])}", _rates(r), ""])
        elif r["what"] in ("fetch", "other", "chunks"):
            by = f", {r['backend']}, {r['way']}" if r["what"] == "other" else ""
            chunks = f", chunks of {_bytes(r['chunk_bytes'])}" if r["what"] == "chunks" else ""
            what = f"kvxfer{by}, {_bytes(r['nbytes'])} in pieces of {_bytes(r['piece'])}{chunks}"
            body.append([what, _rates(r), f"{r['gb_s'] / best['gb_s']:.2f}"])
        elif r["what"] == "wire":
            body.append([f"kvxfer, {_bytes(r['nbytes'])} of bf16 as {r['wire']}, {r['max_sms']} SMs", _rates(r), ""])
        elif r["what"] == "latency":
            quartiles = f"{r['low_us']:.0f} to {r['high_us']:.0f}"
            body.append([f"kvxfer, 16 tokens, {r['request']}", f"{r['p50_us']:.0f} us ({quartiles})", ""])
    head = ["", "GB/s, or us: median (quartiles)", "of NCCL at 256 MiB"]
    return tables.markdown(head, body) + f"\n\n{_where(environment)}"


HANDOFF_RUNS = {"1": "h200x2/vllm_handoff.json", "2": "h200x2/vllm_handoff_packed.json"}
TOKEN_RUNS = {"3": "h200x2/vllm_tokens.json", "4": "h200x2/vllm_tokens_batch_invariant.json"}


def _connector(result: dict) -> str:
    if result["connector"] != "kvxfer":
        return result["connector"]
    return f"kvxfer, {result['wire']}" + ("" if result["backend"] == "auto" else f", {result['backend']}")


def vllm_handoff() -> str:
    """A prompt's way between two engines of vLLM on two GPUs."""
    runs = {name: load(path) for name, path in HANDOFF_RUNS.items()}
    measured = [(name, result) for name, (_, results) in runs.items() for result in results]
    body = [
        [
            f"{_connector(result)}, {row['pool']} pool",
            run,
            f"{row['tokens']:,}",
            f"{row['bytes'] / row['transfers'] / 1e9:.2f} GB",
            f"{row['transfer_ms']:.1f} ms",
            f"{row['first_token_ms']:.0f} ms ({min(row['first_token_ms_all']):.0f} to "
            f"{max(row['first_token_ms_all']):.0f})",
            f"{row['local_hit_ms']:.0f} ms",
            f"{row['descriptors'] / row['transfers']:,.0f}" if "descriptors" in row else "",
        ]
        for run, result in measured
        for row in result["rows"]
    ]
    rates = [
        [_connector(r), run, *(f"{r['prefill_tokens_per_s'][key]:,.0f}" for key in ("alone", "handing_over"))]
        for run, r in measured
    ]
    head = ["", "run", "prompt", "moved", "transfer, mean", "decode's first token (range)", "cached by decode"]
    return (
        tables.markdown([*head, "descriptors"], body)
        + "\n\n"
        + tables.markdown(["prefill, tokens a second", "run", "alone", "handing over"], rates)
        + "\n\n"
        + "\n".join(f"- Run {name}. {_where(environment)}" for name, (environment, _) in runs.items())
    )


def vllm_tokens() -> str:
    """Answers of decode after a hand-off beside those that it gives alone."""
    runs = {name: load(path) for name, path in (HANDOFF_RUNS | TOKEN_RUNS).items()}

    def equal(result: dict, key: str) -> str:
        return f"{result[key]} of {result['answers_compared_with_decode_alone']}" if key in result else ""

    keys = ("answers_equal_to_those_out_of_its_cache", "answers_with_equal_tokens", "answers_that_decode_repeats")
    body = [
        [_connector(r), run, *(equal(r, key) for key in keys)] for run, (_, results) in runs.items() for r in results
    ]
    head = ["answers equal to decode's own", "run", "out of its cache", "computed at once", "decode's own, again"]
    return (
        tables.markdown(head, body)
        + "\n\n"
        + "\n".join(f"- Run {name}. {_where(runs[name][0])}" for name in TOKEN_RUNS)
    )


def vllm_serve() -> str:
    """Latencies of vLLM's servers on two GPUs, and of one server on one GPU in another run."""
    path = RESULTS / "h200x2" / "vllm_serve.json"
    if not path.exists():
        return "Not run yet with this version: `tests/gpu/run_vllm.sh` with `STEPS=serve` makes this table."
    both, alone = (json.loads(p.read_text()) for p in (path, path.with_name("vllm_serve_alone.json")))
    results = both["results"] + [row | {"variant": f"{row['variant']}, another run"} for row in alone["results"]]
    return (
        latency.table({"environment": both["environment"], "results": results})
        + f"\n\n*Alone* is of another run. {_where(alone['environment'])}"
    )


def host() -> str:
    """What a fetch costs the host, and what it had cost before whole blocks had a short way."""
    environment, now = load("host.json")
    earlier, before = load("host_before.json")

    def both(key: str, **wanted: str) -> str:
        found = [next(r[key] for r in rows if all(r.get(k) == v for k, v in wanted.items())) for rows in (before, now)]
        return " / ".join(f"{microseconds:.0f}" for microseconds in found)

    cases = [row["case"] for row in now if "steps" in row]
    steps = {row["case"]: row["steps"] for row in now if "steps" in row}
    old_steps = {row["case"]: row["steps"] for row in before if "steps" in row}
    body = [
        [name, *(f"{old_steps[case][name]:.0f} / {steps[case][name]:.0f}" for case in cases)]
        for name in steps[cases[0]]
    ]
    whole = [
        [
            f"{'host memory' if row['backend'] == 'shm' else 'between GPUs, without them'}, {row['case']}",
            *(both(key, case=row["case"], backend=row["backend"]) for key in ("first_byte_us", "done_us", "thread_us")),
            f"{row['low_us']:.0f} to {row['high_us']:.0f}",
        ]
        for row in now
        if "backend" in row
    ]
    return (
        tables.markdown(["step, us: before / now", *cases], body)
        + "\n\n"
        + tables.markdown(
            ["whole fetch, us: before / now", "first byte", "done, p50", "processor time", "quartiles now"], whole
        )
        + f"\n\nBefore: commit {earlier['commit']}. {_where(environment)}"
    )


def _bytes(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count // unit} {name}"
    return f"{count} B"


def _rates(row: dict) -> str:
    return f"{row['gb_s']:.1f} ({row['low']:.1f} to {row['high']:.1f})"


def _reached(found: float | None, goal: float, unit: str) -> str:
    if found is None:
        return "not measured"
    met = found <= -goal if goal < 0 else found >= goal
    return f"{found:.3g} {unit}" + ("" if met else ", short")


def _rate_or_reason(row: dict) -> str:
    if "skipped" in row:
        return f"skipped: {row['skipped'].splitlines()[0][:80]}"
    quota = f" ({row['max_sms']} SMs)" if "max_sms" in row else ""
    return f"{row['gb_s']:.1f}{quota}"


def _where(environment: dict) -> str:
    shown = ", ".join(f"{key} {value}" for key, value in environment.items() if value not in ("unknown", ""))
    return f"Measured on: {shown}."


def main() -> None:
    made = {
        "gpu": gpu,
        "counters": counters,
        "bare": bare,
        "messages": messages,
        "nccl": nccl,
        "vllm-handoff": vllm_handoff,
        "vllm-tokens": vllm_tokens,
        "host": host,
        "shm": shm,
        "staging": staging,
        "nixl": lambda: nixl("nixl.json"),
        "nixl-tcp": lambda: nixl("nixl_tcp.json"),
        "nixl-link": lambda: nixl_link("nixl_10gbit.json", "nixl_1gbit.json"),
        "nixl-cost": nixl_cost,
        "cuda-copy": cuda_copy,
        "cuda-formats": cuda_formats,
        "cuda-ipc": cuda_ipc,
    }
    for name, make in made.items():
        tables.replace(PAGE, name, make())
    tables.replace(VLLM_PAGE, "latency-gpu", vllm_serve())


if __name__ == "__main__":
    main()
