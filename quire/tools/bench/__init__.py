"""Benchmarks. What `quire bench` runs: `jobs` to measure with, `offline` (the engine alone),
`comparison` (beside `peers`, each in an `engine_process`), `quality` (what weight formats cost),
`serve` (any server with OpenAI's API), `ladder` (technique by technique), and the one form of their
reports in `report`.

And what developers measure, each a command of its own (`python -m quire.tools.bench.gpu.decode
--help`): `gpu`, `engine`, `server_costs`, with random models (`shapes`, `random_engine`,
`random_checkpoint`).
"""
