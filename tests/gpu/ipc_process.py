"""One side of a transfer between processes: holds one side of a plan family on its only GPU, and obeys its parent."""

from __future__ import annotations

import json
import sys

import numpy as np

from kvxfer import cuda
from tests.gpu import families
from tests.gpu.memory import Region

DEVICE = 0
FAMILIES = {"whole": lambda: families.whole([4096, 512]), **families.TOKEN_FAMILIES}


class Side:
    """The verbs."""

    def hold(self, family: str, side: str, apart: bool = False) -> dict:
        """Put the family's source or destination on the GPU, and export it: one allocation, or one a region."""
        contents = getattr(FAMILIES[family](), side)
        self.stream = cuda.Stream(device=DEVICE)
        self.sizes = [content.nbytes for content in contents]
        if apart:
            self.memory = [Region(content) for content in contents]
            self.addresses = [region.address for region in self.memory]
        else:
            starts = np.cumsum([0] + [-(-n // 256) * 256 for n in self.sizes]).tolist()
            self.memory = [Region(np.zeros(max(starts[-1], 4 << 20), np.uint8))]
            self.addresses = [self.memory[0].address + start for start in starts[:-1]]
            for content, start in zip(contents, starts, strict=False):
                self.memory[0].write(content, start)
        handles = []
        for address in self.addresses:
            base, _ = cuda.address_range(address)
            handles.append([cuda.export_memory(base).hex(), address - base])
        return {"handles": handles}

    def overwrite(self, byte: int) -> dict:
        """Enqueue a row of writes to the first region, the last one of `byte`, and export the event after it."""
        self.event = cuda.Event(device=DEVICE, interprocess=True)
        for value in [0] * 200 + [byte]:
            cuda.set_bytes(self.addresses[0], value, self.sizes[0], device=DEVICE, stream=self.stream.address)
        self.event.record(self.stream.address)
        return {"event": self.event.handle().hex()}

    def open(self, peer: list) -> dict:
        """Open the peer's regions. Regions that share one allocation share its handle."""
        self.opened: dict[str, int] = {}
        found = []
        for handle, offset in peer:
            if handle not in self.opened:
                self.opened[handle] = cuda.open_memory(bytes.fromhex(handle), device=DEVICE)
            found.append(self.opened[handle] + offset)
        self.peer = np.array(found, np.uint64)
        return {}

    def close(self) -> dict:
        """Close them."""
        for address in self.opened.values():
            cuda.close_memory(address, device=DEVICE)
        self.opened = {}
        return {}

    def copy(self, family: str, side: str, peer: list) -> dict:
        """Carry the plan out on this GPU."""
        self.open(peer)
        plan = FAMILIES[family]().plan
        mine = np.array(self.addresses, np.uint64)
        src, dst = (mine, self.peer) if side == "src" else (self.peer, mine)
        with cuda.PreparedCudaPlan(plan, device=DEVICE, src_bases=src, dst_bases=dst) as prepared:
            prepared.upload(stream=self.stream.address)
            for chunk in plan.chunks(10_000):
                prepared.copy(chunk, stream=self.stream.address)
            self.stream.synchronise()
        return self.close()

    def check(self, family: str) -> dict:
        """Whether this side's regions are what the CPU kernels make of the plan."""
        expected = FAMILIES[family]().expected
        found = [self._read(address, len(e)) for address, e in zip(self.addresses, expected, strict=True)]
        return {"equal": all(np.array_equal(f, e) for f, e in zip(found, expected, strict=True))}

    def first_bytes_after(self, peer: list, event: str) -> dict:
        """The values in the peer's first region, read on a stream that waits for the peer's event."""
        self.open(peer)
        with cuda.Event(device=DEVICE, handle=bytes.fromhex(event)) as ready:
            self.stream.wait_for(ready)
            found = self._read(int(self.peer[0]), self.sizes[0])
        self.close()
        return {"bytes": np.unique(found).tolist()}

    def _read(self, address: int, nbytes: int) -> np.ndarray:
        found = np.empty(nbytes, np.uint8)
        cuda.copy_bytes(found.ctypes.data, address, nbytes, device=DEVICE, stream=self.stream.address)
        self.stream.synchronise()
        return found


def main() -> None:
    side = Side()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(side, request.pop("verb"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
