"""The runner: takes a Step, computes it on the device, returns the tokens."""
