"""A tap on the control channel between two connectors."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import zmq


class Tap:
    """Stands between two connectors, records every frame, and passes it on, or what `mangle` makes of it."""

    def __init__(self, mangle: Callable[[bytes], list[bytes]] = lambda data: [data]) -> None:
        self.mangle = mangle
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._back = self._context.socket(zmq.DEALER)
        for socket in (self._front, self._back):
            socket.setsockopt(zmq.LINGER, 0)
        self.endpoint = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self.dialled: list[bytes] = []  # frames from the side that dials
        self.answered: list[bytes] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._pass_on)

    def connect(self, endpoint: str) -> None:
        self._back.connect(endpoint)
        self._thread.start()

    def _pass_on(self) -> None:
        route = b""
        while not self._ends.is_set():
            ready = zmq.select([self._front, self._back], [], [], 0.05)[0]
            if self._front in ready:
                route, data = self._front.recv_multipart()
                self.dialled.append(data)
                for frame in self.mangle(data):
                    self._back.send(frame)
            if self._back in ready:
                self.answered.append(self._back.recv())
                for frame in self.mangle(self.answered[-1]):
                    self._front.send_multipart([route, frame])

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self._front.close()
        self._back.close()
        self._context.term()


def mangler(seed: int, share: float = 0.1) -> Callable[[bytes], list[bytes]]:
    """For `Tap.mangle`: loses a share of the messages, doubles as many, and lets as many come behind the next one."""
    dice, late = random.Random(seed), []

    def mangle(data: bytes) -> list[bytes]:
        frames, fate = [data, *late], dice.random()
        late.clear()
        if fate < share:
            return frames[1:]
        if fate < 2 * share:
            return [data, *frames]
        if fate < 3 * share:
            late.append(data)
            return frames[1:]
        return frames

    return mangle
