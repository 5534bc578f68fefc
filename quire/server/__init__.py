"""The HTTP server: OpenAI's, Anthropic's and Ollama's protocols in front of an engine that runs in a
process of its own.

The road of a request: `guard/` (connections, keys, limits), `api/` (one file per protocol: its
fields, its writer, its routes), `service` and `calls/` (text to tokens and back), then over the
`link/` to the engine's process. docs/server.md names the files in order.
"""
