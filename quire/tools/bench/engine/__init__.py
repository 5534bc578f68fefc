"""Benchmarks of parts of the engine: its kernels on a CPU, scheduling, sampling, speculation, and
what-if's predictions.
"""
