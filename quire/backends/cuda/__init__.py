"""Kernels in CUDA C++, for what Triton can't say: sums that are one chain of fused products each, in an
order that the source fixes. They are compiled when they are first needed.
"""
