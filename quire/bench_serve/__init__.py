"""`quire bench serve`: load for any server with OpenAI's API, and what its clients see.

`workloads` makes the requests, `measuring` sends them when they are due over `http_client` and notes what comes back
when, `report` turns that into the figures of `vllm bench serve`, `plot` draws them.
"""
