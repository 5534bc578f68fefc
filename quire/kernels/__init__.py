"""Kernels: `ops.py` is the contract, `reference.py` its definition in plain torch, the others are
fast.
"""
