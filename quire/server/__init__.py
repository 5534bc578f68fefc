"""The HTTP server: OpenAI's and Anthropic's protocols in front of an engine that runs in a process
of its own.

The road of a request: `limits`, `auth` and `routes/` (one file per endpoint, translating between
`protocol/` and `generation`), `generation` (text to tokens and back), `admission`, `engine_client`,
then over the wire (`messages`) to `engine_process`.
"""
