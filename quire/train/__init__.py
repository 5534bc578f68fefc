"""Training on what was sampled: logprobs with the engine's bits and true gradients, of weights that
the engine gets back after each step.
"""

from quire.train.forward import logprobs
from quire.train.weights import Weights

__all__ = ["Weights", "logprobs"]
