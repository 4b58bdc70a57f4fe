"""What a paged KV cache looks like: `CacheLayout` and its parts.

`cache_layout` has the types, `records` the formats in which engines store entries, `tensors` derives a layout from what
an engine registers, and `coverage` makes sure that every byte of a block is claimed once.
"""

from kvxfer.layout.cache_layout import (
    DTYPE_BYTES,
    MAX_RECORD_BYTES,
    CacheLayout,
    Group,
    GroupKind,
    Padding,
    Plane,
    Record,
    Region,
    Slice,
    attention_record,
    fingerprint_differences,
)

__all__ = [
    "DTYPE_BYTES",
    "MAX_RECORD_BYTES",
    "CacheLayout",
    "Group",
    "GroupKind",
    "Padding",
    "Plane",
    "Record",
    "Region",
    "Slice",
    "attention_record",
    "fingerprint_differences",
]
