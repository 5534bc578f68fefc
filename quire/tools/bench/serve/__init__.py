"""`quire bench serve`: `load` sends jobs to any server with OpenAI's API when they are due and
notes what comes back when; `figures` turns that into a report in the fields and words of `vllm
bench serve`.
"""
