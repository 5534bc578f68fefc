"""What the server costs beside the engine: HTTP, the router of replicas, heavy requests."""
