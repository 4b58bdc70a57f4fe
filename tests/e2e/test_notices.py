"""Notices: an engine's own words, carried over the control channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import kvxfer
from kvxfer import errors
from tests.processes import until

SECRET = b"a secret of the tests"
Start = Callable[..., kvxfer.Connector]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start(name: str, **options: Any) -> kvxfer.Connector:
            limits = kvxfer.Limits(dial_timeout_s=1.0, heartbeat_s=0.1, peer_timeout_s=0.5, max_message_bytes=1 << 16)
            return stack.enter_context(kvxfer.Connector(name, **{"secret": SECRET, "limits": limits, **options}))

        yield start


def heard_by(connector: kvxfer.Connector) -> list[tuple[str, bytes]]:
    words: list[tuple[str, bytes]] = []
    connector.on_notice(lambda endpoint, payload: words.append((endpoint, payload)))
    return words


def test_words_arrive_in_order_and_can_be_answered(start: Start) -> None:
    first, second = start("first"), start("second")
    theirs, ours = heard_by(second), heard_by(first)
    sent = [bytes([number]) * number for number in range(100)]
    for word in sent:
        first.notify(second.endpoint, word)
    until(lambda: len(theirs) == len(sent))
    assert theirs == [(first.endpoint, word) for word in sent]
    for _, word in theirs:
        second.notify(theirs[0][0], word)
    until(lambda: len(ours) == len(sent))
    assert ours == [(second.endpoint, word) for word in sent]
    sessions = [len(connector._node.directory.peers) for connector in (first, second)]
    assert sessions == [1, 1]  # one connection, both ways, however many words


def test_a_connector_may_be_known_by_several_addresses(start: Start) -> None:
    first, second = start("first"), start("second")
    words = heard_by(second)
    for _ in range(5):
        first.notify(second.endpoint.replace("127.0.0.1", "localhost"), b"a word")
    until(lambda: len(words) == 5)
    assert len(second._node.directory.peers) == 1


def test_a_connector_may_talk_to_itself(start: Start) -> None:
    alone = start("alone")
    words = heard_by(alone)
    alone.notify(alone.endpoint, b"a word")
    until(lambda: words == [(alone.endpoint, b"a word")])


def test_nobody_listens_there(start: Start) -> None:
    stranger = start("stranger", secret=b"another secret of tests")
    words = heard_by(stranger)
    first, failures = start("first"), []
    for endpoint in ("tcp://127.0.0.1:9", stranger.endpoint):
        for _ in range(2):
            first.notify(endpoint, b"a word", failed=failures.append)
    until(lambda: len(failures) == 4)
    assert {type(error) for error in failures} == {errors.PeerGone}
    assert not words


def test_another_process_at_the_same_address_is_found(start: Start) -> None:
    first, second = start("first"), start("second")
    words = heard_by(second)
    first.notify(second.endpoint, b"before")
    until(lambda: words)
    endpoint = second.endpoint
    second.close()
    until(lambda: not first._node.directory.peers)
    again = heard_by(start("again", listen=endpoint))
    first.notify(endpoint, b"after")
    until(lambda: again == [(first.endpoint, b"after")])


def test_what_cannot_be_sent_is_refused(start: Start) -> None:
    first = start("first")
    for endpoint, payload in (("nonsense", b""), (first.endpoint, "text"), (first.endpoint, bytes((1 << 15) + 1))):
        with pytest.raises(errors.InvalidRequest):
            first.notify(endpoint, payload)
    first.close()
    for call in (lambda: first.notify(first.endpoint, b""), lambda: first.on_notice(print)):
        with pytest.raises(errors.Closed):
            call()


def test_a_transfer_goes_on_beside(start: Start) -> None:
    """The session that was opened for a word does not stand in the way of one that is opened for a ticket."""
    shape = (8, 2, 16, 2, 32)
    layout = kvxfer.CacheLayout.paged(
        layers=["l"], num_blocks=8, block_tokens=16, kv_heads=2, head_dim=32, dtype="float16", fingerprint={}
    )
    arrays = [{"l": kvxfer.shared_empty(shape, "float16")} for _ in range(2)]
    arrays[0]["l"][:], arrays[1]["l"][:] = 1.5, 0
    source, target = start("source"), start("target")
    words = heard_by(source)
    target.notify(source.endpoint, b"before")
    until(lambda: words)
    lease = source.register(arrays[0], layout).publish({"full": [1, 2]}, tokens=32)
    target.register(arrays[1], layout).fetch(lease.ticket, into={"full": [3, 4]}).wait(10.0)
    assert (arrays[1]["l"][[3, 4]] == 1.5).all()
    target.notify(source.endpoint, b"after")
    until(lambda: len(words) == 2)
