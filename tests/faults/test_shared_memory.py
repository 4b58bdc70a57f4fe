"""Shared-memory segments: a full /dev/shm, and nothing left of processes that ended in whatever way."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import descriptors, segments, until

from kvxfer.backends.segments import remove_orphans

pytestmark = pytest.mark.timeout(60)
WAYS = ("mapped", "direct", "packed")
QUICK = {"heartbeat_s": 0.2, "peer_timeout_s": 1.0, "dial_timeout_s": 2.0}


def in_small_dev_shm(size: str, code: str) -> str:
    """Run code in a mount namespace of its own whose /dev/shm has `size`; its output."""
    with_imports = "import kvxfer, os\nfrom processes import *\n" + textwrap.dedent(code)
    mount = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$0" -c "$1"'
    try:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", mount, sys.executable, with_imports],
            capture_output=True,
            text=True,
            timeout=50,
            env={**os.environ, "PYTHONPATH": ":".join([str(Path(__file__).resolve().parents[1]), *sys.path])},
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare command here")
    if done.returncode and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_cache_that_does_not_fit_is_refused_and_leaves_nothing():
    assert "SharedMemoryFull 0 True" in in_small_dev_shm(
        "4m",
        """
        try:
            kvxfer.shared_empty(8 << 20)
        except kvxfer.errors.SharedMemoryFull as error:
            helpful = "8388608 bytes" in str(error) and "shm-size" in str(error)
            print(type(error).__name__, len(os.listdir("/dev/shm")), helpful)
        """,
    )


def test_a_lease_table_that_does_not_fit_is_refused_and_the_connector_closes():
    assert in_small_dev_shm(
        "4m",
        """
        connector = Connector("c", secret=SECRET)
        layout = make_layout()
        arrays = {r.name: np.zeros(r.nbytes, np.uint8) for r in layout.regions}
        for _ in range(3):
            try:
                connector.register(arrays, layout)
            except kvxfer.errors.SharedMemoryFull as error:
                print(type(error).__name__, end=" ")
        connector.close()
        print(os.listdir("/dev/shm"))
        """,
    ) == "SharedMemoryFull SharedMemoryFull SharedMemoryFull []"


def test_staging_that_does_not_fit_fails_the_fetch_and_room_helps():
    assert in_small_dev_shm(
        "20m",
        """
        limits = dict(limits={"staging_bytes": 8 << 20}, shared=False, ways=("packed",))
        prefill, decode = Process("prefill", fill=1, **limits), Side("decode", **limits)
        room = kvxfer.shared_empty(2 << 20)
        print(decode.fetch_now(prefill.publish([1])), end=" ")
        _, key = reservation, _ = decode.reserve([2])
        print(prefill.outcome(prefill.send(reservation, [2], timeout_s=5)), end=" ")
        decode.cancel(key)
        del room
        prefill.fetch_now(decode.publish([1]))
        prefill.end()
        decode.close()
        print(os.listdir("/dev/shm"))
        """,
    ) == "SharedMemoryFull SharedMemoryFull []"


def test_no_room_for_even_one_page_is_an_error_that_says_so():
    assert "SharedMemoryFull" in in_small_dev_shm(
        "1m",
        """
        room = kvxfer.shared_empty((1 << 20) - 4096)
        more = []
        try:
            while True:
                more.append(kvxfer.shared_empty(1))
        except kvxfer.errors.SharedMemoryFull:
            pass
        try:
            Connector("c", secret=SECRET)
        except kvxfer.KvxferError as error:
            print(type(error).__name__)
        """,
    )


def test_segments_are_private_to_the_user(here):
    side = here("side")
    for name in segments(os.getpid()):
        assert Path("/dev/shm", name).stat().st_mode & 0o777 == 0o600
    assert len(segments(os.getpid())) >= 3  # identity, table, the layers
    side.close()


def test_a_clean_end_leaves_no_segment(start):
    process = start("process")
    assert segments(process.pid)
    assert process.end() == 0
    assert segments(process.pid) == []


@pytest.mark.parametrize("how", ["kill", "kill_group", "terminate"])
def test_a_killed_process_leaves_no_segment(start, how):
    process = start("process")
    process.publish([1])
    assert segments(process.pid)
    if how == "terminate":
        os.kill(process.pid, signal.SIGTERM)
        process._popen.wait()
    else:
        getattr(process, how)()
    until(lambda: not segments(process.pid), 3, "the sweeper")


def test_a_killed_process_whose_sweeper_was_killed_too_is_swept_by_the_next_start(start):
    process = start("process")
    sweepers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in sweepers:
        os.kill(int(pid), signal.SIGKILL)
    process.kill()
    assert segments(process.pid)
    remove_orphans()
    assert segments(process.pid) == []


def test_orphans_of_living_processes_are_left_alone(start):
    process = start("process")
    before = segments(process.pid)
    remove_orphans()
    assert segments(process.pid) == before


@pytest.mark.parametrize("way", WAYS)
def test_peers_that_come_and_go_leave_no_descriptor_and_no_mapping(start, here, way):
    options = {"shared": way == "mapped", "ways": (way,), "limits": QUICK}
    prefill = here("prefill", fill=1, **options)

    def visit(kill: bool) -> None:
        decode = start("decode", **options)
        assert decode.fetch_now(prefill.publish([1], ttl_s=5)) == way
        decode.kill() if kill else decode.end()
        until(lambda: prefill.connector.metrics.peers == 0, 5)

    def held() -> list[str]:
        gc.collect()
        mappings = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
        ours = f"kvxfer-{os.getuid()}-{os.getpid()}-"
        return [name for name in [*descriptors(), *mappings] if "kvxfer-" in name and ours not in name]

    before = set(held())  # of other tests' peers
    for kill in (True, False, True, False):
        visit(kill)
    until(lambda: not set(held()) - before, 3, "descriptors and mappings of dead peers going")


def test_repeated_connectors_leave_no_thread_no_descriptor_no_segment(here):
    before = None
    for _ in range(6):
        side = here("again")
        side.publish([1])
        side.close()
        del side
        now = len(os.listdir("/proc/self/fd"))
        assert before is None or now <= before + 8  # this test's own list of sides holds their memory
        before = now
