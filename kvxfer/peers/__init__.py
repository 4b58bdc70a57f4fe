"""The other side: `remote` is what is known of one peer, `directory` finds and dials engines of several."""
