"""The real engine under a virtual clock, with a fake model and random workloads."""
