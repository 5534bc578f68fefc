"""Kernels for the CPU in C++, compiled on first use."""
