"""Models: what one is (spec), how it computes (decoder), and how its weights get in (load)."""
