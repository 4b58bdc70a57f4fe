"""Where an array's bytes lie: address, size and device of NumPy arrays, torch tensors and CuPy arrays.

Imports NumPy and errors; array libraries are recognised by what their objects offer, never imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxfer.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class Span:
    """The memory of one array. `keep_alive` is the array; `dtype` its dtype's name, as NumPy or torch say it."""

    address: int
    nbytes: int
    device: str
    writable: bool
    keep_alive: Any
    dtype: str = "uint8"
    itemsize: int = 1
    shape: tuple[int, ...] = ()


def span_of(name: str, array: Any) -> Span:
    """The bytes of a contiguous array. Raises InvalidRequest for one that is not, or for an unknown type."""
    if isinstance(array, np.ndarray):
        contiguous, address, nbytes = array.flags.c_contiguous, array.ctypes.data, array.nbytes
        device, writable = "cpu", bool(array.flags.writeable)
        dtype, itemsize, shape = array.dtype.name, array.itemsize, array.shape
    elif hasattr(array, "data_ptr") and hasattr(array, "is_contiguous"):
        contiguous, address = array.is_contiguous(), array.data_ptr()
        nbytes = array.numel() * array.element_size()
        device, writable = str(array.device), True
        dtype, itemsize = str(array.dtype).removeprefix("torch."), array.element_size()
        shape = tuple(array.shape)
    elif hasattr(array, "__cuda_array_interface__"):
        interface = array.__cuda_array_interface__
        contiguous, address = interface.get("strides") is None, interface["data"][0]
        shape, itemsize = tuple(interface["shape"]), np.dtype(interface["typestr"]).itemsize
        nbytes = int(np.prod(shape, dtype=np.int64)) * itemsize
        device, writable = f"cuda:{getattr(array.device, 'id', 0)}", not interface["data"][1]
        held = getattr(array, "dtype", None)
        dtype = held.name if isinstance(held, np.dtype) else np.dtype(interface["typestr"]).name
    else:
        raise InvalidRequest(
            f"region {name!r}: expected a NumPy array, a torch tensor or a CuPy array, got {type(array).__name__}"
        )
    if not contiguous:
        raise InvalidRequest(
            f"region {name!r}: the array is not contiguous; register the storage that the views share, and "
            "describe the views in the layout"
        )
    return Span(
        address=address,
        nbytes=nbytes,
        device=device,
        writable=writable,
        keep_alive=array,
        dtype=dtype,
        itemsize=itemsize,
        shape=shape,
    )
