"""Backends move bytes and nothing else: they know no layers, tokens or formats. One file each; see base.py."""
