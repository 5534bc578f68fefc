"""Looking inside a model: what its files hold, what runs through its layers, and where two models
part.
"""
