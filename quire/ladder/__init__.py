"""The learner's ladder: from the naive loop to the full engine, one technique at a time.

The first rungs are loops a few dozen lines long over the same decoder the engine runs; the later ones are settings of
the engine. `quire bench ladder` climbs them all; docs/ladder/ has a chapter on each.
"""
