"""Endpoints, one file each: they translate between a protocol and `quire.server.calls.generation`."""
