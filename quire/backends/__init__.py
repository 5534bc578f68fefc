"""What computes: a device and its kernels, one folder for each kind."""
