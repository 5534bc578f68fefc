"""Several HTTP processes in front of one engine (`--http-workers N`).

The server's own process keeps what there is one of: the engine's link, stored responses, batches,
everything that is asked about the server. Workers accept connections from the one listening socket
and do what costs time per token and per request: HTTP, JSON, tokenizing, text. docs/server.md has
the picture.
"""
