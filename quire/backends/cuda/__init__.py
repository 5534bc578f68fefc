"""Kernels in CUDA C++, for what Triton can't say: sums that are one chain of fused products each, in an
order that the source fixes, and blocks that share what they copy. They are compiled when they are first
needed.
"""
