"""A call: from a request of any protocol to the engine, and its text back."""
