"""Engines on many machines: the server's HTTP side on Ray Serve, its engines in Ray's actors."""
