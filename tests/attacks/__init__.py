"""Attacks: wrong, hostile and absurd input in many forms, each of which must be refused in words or
taken.
"""
