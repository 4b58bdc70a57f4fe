"""Tickets that a scheduler has issued for its ranks, until the last rank has ended what stands under each.

Imports kvxfer's connector and ticket.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.connector import Connector
from kvxfer.ticket import Ticket


@dataclass
class Issued:
    """A ticket, and how many ranks have not ended its lease or reservation yet."""

    ticket: Ticket
    ranks_left: int


def last_has_ended(issued: dict[str, Issued], request_id: str, ranks: int, connector: Connector) -> bool:
    """Count so many ranks that have ended a request's ticket; whether they were the last, and it is retired."""
    one = issued.get(request_id)
    if one is None:
        return False
    one.ranks_left -= ranks
    if one.ranks_left > 0:
        return False
    del issued[request_id]
    connector.retire(one.ticket)
    return True
