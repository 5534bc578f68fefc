"""Benchmarks of a GPU: random weights of true shapes, beside what the card could do and the peers'
figures. Each is a command (`python -m quire.tools.bench.gpu.decode --help`); `all` runs several.
"""
