"""The control channel: who a peer is, what it has, and what it asks for. Bytes of caches never pass here."""
