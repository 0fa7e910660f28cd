"""Bounds of requests. Shards check them; routers too, to refuse in their own words."""

MAX_ADAPTER_NAME_CHARACTERS = 256
MAX_ADAPTER_SOURCE_CHARACTERS = 4096
# A bad word is one that the output must not contain.
MAX_BAD_WORD_TOKENS = 64
MAX_CHOICE_OPTIONS = 1024
# For constraints built from tools and other demands. By default, shards accept less
# (--max-constraint-bytes).
MAX_BUILT_CONSTRAINT_BYTES = 2**20
# A suspect request that generates this many tokens in a new engine did not crash the earlier
# engines: it would have crashed the new one at the same position. When an engine dies, fewer tokens
# than this are computed but not sent.
TRIAL_TOKENS = 8
# Log-probabilities of a request that may wait for a slow reader; a request with more ends.
MAX_UNREAD_SCORES_BYTES = 64 * 2**20
# At lower temperatures, the most likely token is taken.
GREEDY_TEMPERATURE = 1e-5
