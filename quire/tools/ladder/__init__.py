"""The learner's ladder: from the naive loop to the full engine, one technique at a time.

Here are the rungs that are loops a few dozen lines long over the same decoder the engine runs; the
later ones are settings of the engine. `quire bench ladder` (`quire/tools/bench/ladder`) climbs them
all; docs/ladder/ has a chapter on each.
"""
