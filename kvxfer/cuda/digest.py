"""The checksum mix64 of bytes on a device; `kvxfer.formats.checksums` defines it."""

from __future__ import annotations

from kvxfer.cuda.native import check, native
from kvxfer.errors import InvalidRequest

_ALIGNMENT = 16


def checksum_on_device(
    data: int, nbytes: int, digest: int, *, device: int, stream: int, max_sms: int = 0
) -> None:
    """Enqueue: the 8 bytes of device memory at `digest` become the mix64 of `nbytes` bytes at `data`.

    `data` lies on 16 bytes and `digest` on 8. Can be captured into a graph.
    """
    if data % _ALIGNMENT or digest % 8:
        raise InvalidRequest(f"data must lie on {_ALIGNMENT} bytes and its checksum on 8")
    check(native().checksum(device, data, nbytes, digest, stream, max_sms), "launching a checksum")
