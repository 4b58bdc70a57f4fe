"""How long a message between two processes of a host takes, there and back: over a line, and over ZeroMQ alone.

    python benchmarks/bench_messages.py [--json FILE] [--rounds 200]

One process says a word to the other (`Connector.notify`), whose callback says it back. Between two rounds both sleep;
for how long makes a difference, since threads that have just run are woken sooner.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import tables
import timing

import kvxfer
from kvxfer.control import local

PAUSES_MS = (0, 2, 20)


def echo(pipe: Connection, secret: bytes) -> None:
    """The other process: says everything back, until the pipe closes."""
    with kvxfer.Connector("echo", backends=["shm"], secret=secret) as connector:
        connector.on_notice(connector.notify)
        pipe.send(connector.endpoint)
        pipe.poll(None)


def rounds_of(pause_ms: int, rounds: int, endpoint: str, connector: kvxfer.Connector) -> timing.Timing:
    """Round trips with such pauses between them."""
    back = threading.Event()
    connector.on_notice(lambda endpoint, payload: back.set())

    def there_and_back(_: None) -> None:
        back.clear()
        connector.notify(endpoint, b"x")
        assert back.wait(10)

    pause_s = pause_ms / 1000
    return timing.measure(there_and_back, [None], calls=rounds, warm_up=10, before=lambda: time.sleep(pause_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    secret, context = secrets.token_bytes(32), multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=echo, args=(theirs, secret), daemon=True)
    process.start()
    theirs.close()
    endpoint, results, dial = pipe.recv(), [], local.dial
    for how in ("line", "ZeroMQ"):
        local.dial = dial if how == "line" else lambda *_: None
        with kvxfer.Connector(f"over {how}", backends=["shm"], secret=secret) as connector:
            for pause_ms in PAUSES_MS:
                took = rounds_of(pause_ms, options.rounds, endpoint, connector)
                results.append(
                    {
                        "how": how,
                        "pause_ms": pause_ms,
                        "rounds": options.rounds,
                        "median_us": 1e6 * took.median_s,
                        "low_us": 1e6 * took.low_s,
                        "high_us": 1e6 * took.high_s,
                    }
                )
            (session,) = connector._node.directory.peers
            assert (session.line is not None) is (how == "line")
    pipe.close()
    process.join(10)
    print(table(results))
    if options.json:
        timing.save(options.json, timing.environment(), results)


def table(results: list[dict]) -> str:
    """Microseconds there and back, by how long both had slept."""
    cells = {
        (row["how"], row["pause_ms"]): f"{row['median_us']:.0f} ({row['low_us']:.0f} to {row['high_us']:.0f})"
        for row in results
    }
    hows, pauses = (list(dict.fromkeys(row[key] for row in results)) for key in ("how", "pause_ms"))
    head = ["us there and back: median (quartiles); pauses of", *(f"{pause} ms" for pause in pauses)]
    return tables.markdown(head, [[how, *(cells[how, pause] for pause in pauses)] for how in hows])


if __name__ == "__main__":
    main()
