"""Bodies of requests and responses, one file per API: pydantic for what comes in, plain dicts for what goes out."""
