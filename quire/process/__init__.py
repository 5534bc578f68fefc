"""How a Python process behaves: what it is granted, loads first and leaves on disk, and when it
collects garbage.
"""
