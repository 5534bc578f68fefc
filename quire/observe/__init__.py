"""What shows the engine and its requests to the outside: traces."""
