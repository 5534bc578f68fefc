"""Draft tokens at the tokens that may follow: where they come from and how many are worth
checking.
"""
