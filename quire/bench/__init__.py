"""What `quire bench` runs: `jobs` to measure with, `offline` (the engine alone or beside one of the `peers`), `serve`
(any server with OpenAI's API), `ladder` (technique by technique), and the one form of their reports in `report`."""
