"""`quire verify`: the promise of exactness, tried on this machine with this model, or on a server
from outside.
"""
