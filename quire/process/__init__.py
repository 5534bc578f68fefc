"""How a Python process behaves: what it loads first, when it collects garbage, what it leaves on disk."""
