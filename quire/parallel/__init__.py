"""One model on several devices, with the same bits as on one (docs/tensor_parallel.md)."""
