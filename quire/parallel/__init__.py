"""One model on several devices, with the same bits as on one (docs/tensor_parallel.md); and what each process that
computes loads (`load.py`), be it the only one."""
