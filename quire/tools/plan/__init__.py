"""`quire plan`: whether a model fits a device, and what to expect of it, from the allocator's own
code.
"""
