"""From a step's logits to its tokens: one class per feature, their order in one table
(`sampler.FEATURES`).
"""
