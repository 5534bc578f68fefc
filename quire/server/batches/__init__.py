"""Files full of requests, in the format of OpenAI's batch API."""
