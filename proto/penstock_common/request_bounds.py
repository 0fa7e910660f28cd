"""Bounds of requests that are told at both ends: whoever comes first refuses in words of its own,
and a shard refuses whatever gets so far.
"""

# A LoRA adapter's name, and where it is loaded from.
MAX_ADAPTER_NAME_CHARACTERS = 256
MAX_ADAPTER_SOURCE_CHARACTERS = 4096
# A sequence of tokens that is never completed.
MAX_BAD_WORD_TOKENS = 64
# Texts of which an output must be one.
MAX_CHOICE_OPTIONS = 1024
# A constraint that is made of tools and of what else an answer is held to: longer than shards take
# unless they are told to (--max-constraint-bytes).
MAX_BUILT_CONSTRAINT_BYTES = 2**20
# A request that gives this many tokens in an engine did not crash the earlier ones: it would have
# crashed this one at the same position, and fewer tokens than this are computed but not yet sent
# when an engine dies.
TRIAL_TOKENS = 8
# Log-probabilities of a request that wait for who reads slowly, at either end; beyond that it ends.
MAX_UNREAD_SCORES_BYTES = 64 * 2**20
# Below this temperature nothing is drawn.
GREEDY_TEMPERATURE = 1e-5
