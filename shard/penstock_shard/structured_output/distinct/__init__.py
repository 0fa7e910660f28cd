"""Keeps the items of a set, and the names of an object, different from one another.

No grammar can say so. It is held where the mask of a next token is made: tokens are cleared that
would end an equal item or name, or lead to nothing else.
"""
