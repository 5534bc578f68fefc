"""Responses that were answered, kept so that clients can go on with them."""
