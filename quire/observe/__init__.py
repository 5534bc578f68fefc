"""What shows the engine and its requests to the outside: step log, request records, metrics,
traces.
"""
