"""Keeps the items of a set, and the names of an object, different from one another.

No grammar can express this. So the next token's mask is cleared of tokens that complete an equal
item or name, or can lead only to one.
"""
