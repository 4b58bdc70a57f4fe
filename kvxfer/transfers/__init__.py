"""Transfers and how they are carried out.

`transfer` is the completion handle; `fetch` and `send` are the two directions and `reserve` the receiving end of a
send.
`moves` carries out a plan without the peer's help, `packed` through `staging`; `pull` is the packed way of a
fetch, both ends. `match` says how two caches fit together.
"""
