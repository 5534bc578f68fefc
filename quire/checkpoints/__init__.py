"""A model's files: where they come from, and how the tensors in them are read and written."""
