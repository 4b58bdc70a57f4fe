"""Memory in which the tables of plans are made, and from which kernels read them; kept, and used again.

It grows, and is freed when the connector is closed, not before: freeing waits for the device, and a stream of the
engine's may in turn be waiting for the very transfer whose tables these are (`Transfer.wait_on`).
"""

from __future__ import annotations

from kvxfer.backends.base import Operation
from kvxfer.cuda.packed import PreparedCudaPackedPlan
from kvxfer.cuda.plan import PreparedCudaPlan
from kvxfer.cuda.runtime import DeviceMemory, PinnedMemory

LEAST_BYTES = 1 << 20
_IN_PLACE_COPIES = 1024  # tables of up to as many copies are read from pinned memory, without being copied first


class TableMemory:
    """Memory of one device, and pinned memory, for the tables of one plan at a time. One thread at a time."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._pinned: PinnedMemory | None = None
        self._on_device: DeviceMemory | None = None
        self._outgrown: list[DeviceMemory | PinnedMemory] = []
        self.under_way: Operation | None = None
        """The last upload, where whoever enqueued it does not wait for it."""

    def is_idle(self) -> bool:
        """Whether no upload is at work here: it would write over the next one. Raises CudaError."""
        return self.under_way is None or self.under_way.poll()

    @property
    def pinned_address(self) -> int:
        """Where tables are made. After `room_for`."""
        return self._pinned.address

    def has_room(self, nbytes: int, copies: int) -> bool:
        """Whether tables of so many bytes and copies fit into what there is."""
        pinned = 0 if self._pinned is None else self._pinned.nbytes
        on_device = 0 if self._on_device is None else self._on_device.nbytes
        return nbytes <= (pinned if copies <= _IN_PLACE_COPIES else min(pinned, on_device))

    def room_for(self, nbytes: int, copies: int) -> int:
        """Have memory for tables, which take the place of earlier ones.

        Returns the address of device memory for them, or 0 where they are so short that kernels read pinned memory.
        """
        if self._pinned is None or self._pinned.nbytes < nbytes:
            self._retire(self._pinned)
            self._pinned = PinnedMemory(max(LEAST_BYTES, 2 * nbytes), device=self._device)
        if copies <= _IN_PLACE_COPIES:
            return 0
        if self._on_device is None or self._on_device.nbytes < nbytes:
            self._retire(self._on_device)
            self._on_device = DeviceMemory(max(LEAST_BYTES, 2 * nbytes), device=self._device)
        return self._on_device.address

    def reserve(self) -> None:
        """Have memory for the tables of ordinary transfers."""
        self.room_for(LEAST_BYTES // 2, _IN_PLACE_COPIES + 1)

    def upload(self, prepared: PreparedCudaPlan | PreparedCudaPackedPlan, *, stream: int) -> None:
        """Enqueue a plan's tables into this memory; an earlier plan's are gone."""
        on_device = self.room_for(prepared.table_bytes, prepared.plan.copies)
        memory = on_device or self._pinned.address
        prepared.upload(stream=stream, memory=memory, pinned=self._pinned.array)

    def close(self) -> None:
        """Free it all; may wait for the device."""
        for memory in (self._pinned, self._on_device, *self._outgrown):
            if memory is not None:
                memory.close()
        self._pinned = self._on_device = None
        self._outgrown.clear()

    def _retire(self, memory: DeviceMemory | PinnedMemory | None) -> None:
        if memory is not None:
            self._outgrown.append(memory)
