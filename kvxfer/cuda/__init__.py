"""The CUDA half of the door to csrc: plans carried out on GPUs, and the little of CUDA's runtime that transfers need.

Importing this package touches no driver and loads no extension; the first call does. Where the extension was not
built, that call raises MissingExtra; where there is no driver or no GPU, BackendError with CUDA's own name for it.
Imports NumPy, plan, formats, errors and the native module; never torch or CuPy. Addresses, streams and events are
plain integers.
"""

from kvxfer.cuda.digest import checksum_on_device
from kvxfer.cuda.native import CudaError, available, why_unavailable
from kvxfer.cuda.packed import PreparedCudaPackedPlan
from kvxfer.cuda.plan import PreparedCudaPlan
from kvxfer.cuda.runtime import (
    DeviceMemory,
    Event,
    PinnedMemory,
    PinnedRange,
    Stream,
    address_range,
    can_access_peer,
    close_memory,
    compute_capability,
    copy_bytes,
    copy_bytes_batch,
    copy_bytes_peer,
    current_device,
    device_count,
    driver_version,
    enable_peer_access,
    event_address,
    export_memory,
    open_memory,
    pinned_address,
    set_bytes,
    sm_count,
    stream_address,
    wait_for_event,
    write_after,
)
from kvxfer.cuda.virtual_memory import ExportedRange, MappedRange, Piece, is_exportable_by_ipc, is_from_pool

__all__ = [
    "CudaError",
    "DeviceMemory",
    "Event",
    "ExportedRange",
    "MappedRange",
    "Piece",
    "PinnedMemory",
    "PinnedRange",
    "PreparedCudaPackedPlan",
    "PreparedCudaPlan",
    "Stream",
    "address_range",
    "available",
    "can_access_peer",
    "checksum_on_device",
    "close_memory",
    "compute_capability",
    "copy_bytes",
    "copy_bytes_batch",
    "copy_bytes_peer",
    "current_device",
    "device_count",
    "driver_version",
    "enable_peer_access",
    "event_address",
    "export_memory",
    "is_exportable_by_ipc",
    "is_from_pool",
    "open_memory",
    "pinned_address",
    "set_bytes",
    "sm_count",
    "stream_address",
    "wait_for_event",
    "why_unavailable",
    "write_after",
]
