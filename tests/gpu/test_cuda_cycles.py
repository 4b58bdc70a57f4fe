"""Connectors that come and go over the stand-in for the device: what each held there is given back. Needs the
extension, and no GPU."""

from __future__ import annotations

import functools
import gc
import time

import numpy as np
import pytest

import kvxfer
from kvxfer import Limits
from tests.gpu import stand_in
from tests.processes import descriptors, until

stand_in.need_no_gpu()
from tests.gpu.test_cuda_conveyor import BLOCKS, IDS, INTO, SECRET, layout  # noqa: E402  (it skips itself as well)

WARM_UP, CYCLES = 4, 12  # of which plans of the last are foreseen


@pytest.mark.parametrize(("way", "wire"), [("mapped", "raw"), ("packed", "raw"), ("packed", "nvfp4")])
def test_what_a_connector_held_on_the_device_is_given_back(way, wire):
    limits = Limits(chunk_bytes=1 << 20, staging_bytes=4 << 20)
    options = {"backends": ["cuda_ipc"], "secret": SECRET, "ways": (way,), "limits": limits}

    def arrays() -> dict[str, stand_in.DeviceArray]:
        return {region.name: stand_in.DeviceArray(np.ones(region.nbytes, np.uint8)) for region in layout().regions}

    def held(device: stand_in.Device) -> tuple[int, int, int]:
        """Allocations, mappings of peers' memory, descriptors."""
        gc.collect()
        return len(device._memory), len(device._opened), sum(descriptors().values())

    def no_more_than(most: tuple[int, int, int], device: stand_in.Device) -> bool:
        return all(now <= then for now, then in zip(held(device), most, strict=True))

    with stand_in.installed() as device, kvxfer.Connector("prefill", **options) as prefill:
        source, target = prefill.register(arrays(), layout(), name="kv"), arrays()
        for cycle in range(CYCLES):
            with kvxfer.Connector("decode", **options) as decode:
                cache = decode.register(target, layout(), name="kv")
                lease = source.publish({"full": IDS}, tokens=16 * BLOCKS)
                assert cache.fetch(lease.ticket, into={"full": INTO}, wire=wire, timeout_s=20).wait().way == way
                until(lease.released.is_set)
            del decode, cache
            until(lambda: not prefill._node.directory.peers, what="the peer forgotten")
            if cycle < WARM_UP:
                time.sleep(0.2)  # what ends by itself has ended
                most = held(device)
            else:
                until(functools.partial(no_more_than, most, device), what=f"no more than {most} to be held")
