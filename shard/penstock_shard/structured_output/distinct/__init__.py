"""Makes the items of a set, and the names of an object, differ from each other.

No grammar can express this. So tokens that complete an equal item or name, or can lead only to one,
are cleared from the mask.
"""
