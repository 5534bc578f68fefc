"""Benchmarks: each script is a command (`python bench/decode.py --help`); the other modules are
what they share.
"""
