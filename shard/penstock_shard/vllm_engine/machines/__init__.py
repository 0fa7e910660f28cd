"""A model over several machines: their connections, and the process on machines other than
machine 0.
"""
