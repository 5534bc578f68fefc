"""Bodies of requests, one file per API, and how they become what is asked of the engine."""
