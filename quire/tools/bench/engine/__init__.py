"""Benchmarks of the engine's own work: scheduling, sampling, speculation, and what-if's predictions."""
