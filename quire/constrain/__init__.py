"""Constrained generation: JSON schema, any JSON, regex, choice or Lark grammar → masks over the
vocabulary.

`GrammarCompiler` turns a request's `StructuredOutput` into a `Grammar` at the border, where a bad
one is refused. The runner's `Constrainer` (in `masks`, which needs torch) keeps one `GrammarState`
per row and computes masks while the model runs. The grammar engine is llguidance, an optional
dependency.
"""

from quire.constrain.grammar import Grammar, GrammarCompiler, GrammarState

__all__ = ["Grammar", "GrammarCompiler", "GrammarState"]
