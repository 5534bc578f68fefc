"""How a Python process behaves: what it is granted, loads first and leaves on disk, when it collects
garbage, and how the processes it starts begin and end.
"""
