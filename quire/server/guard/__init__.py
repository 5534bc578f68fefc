"""What stands between the network and the routes: keys, limits, admission, and one connection's
HTTP.
"""
