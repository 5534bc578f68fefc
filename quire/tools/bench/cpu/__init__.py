"""Benchmarks of the CPU: single kernels, and throughput beside transformers."""
