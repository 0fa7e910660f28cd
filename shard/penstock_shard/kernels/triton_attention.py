"""Attention over paged keys and values: Triton kernels.

Not yet run on hardware: checked in Triton's interpreter and compiled for several cards.

There are two ways. By splits (flash-decoding, Dao et al., 2023), a program takes a few queries of
one sequence and KV head, and one split of the keys; a second kernel combines the splits in order.
By rows (flash attention 2, Dao, 2023), a program takes many queries and loops over all their keys.
A KV head's query heads are adjacent in a tile, so that keys and values are read once for all of
them. If a tile cannot hold them, several programs divide them.

If values are the first elements of keys, as with latents, a tile of keys is loaded in two parts:
the value elements, which are used twice, and the rest. A score is the sum of two products.

By splits, a query's bits depend only on its own keys, if all launches use the same smallest split
size. The query's position determines where splits and tiles of keys begin, tiles have one shape,
and unseen keys change no bit. The host needs only the width of the block table, not the lengths, so
a captured launch serves all lengths.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# No split has fewer keys. Each launch chooses its smallest split size, a power of two. The size is
# doubled until a query has at most MOST_SPLITS splits, to bound scratch memory and launches.
SPLIT = 256
MOST_SPLITS = 64
_MOST_SPLITS = tl.constexpr(MOST_SPLITS)
# Splits of a query that are combined at once.
_SPLITS_TOGETHER = tl.constexpr(8)
_LOG2_E = tl.constexpr(1.4426950408889634)
# Arguments that differ between steps. Kernels are not specialized on them, because recompiling
# takes time and may change bits.
_VARYING = ("decodes", "rows")
_VARYING_SPLITS = ("low", "num_splits", "smallest")
_UNALIGNED = ("cu_queries_ptr", "seq_lens_ptr")


@triton.jit
def _tanh(x):
    # If exp overflows, this is 1, which is right.
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _split_size(position, smallest):
    size = 0 * position + smallest
    while position >= size * _MOST_SPLITS:
        size *= 2
    return size


@triton.jit
def _first_key(position, WINDOW: tl.constexpr):
    return tl.maximum(position - (WINDOW - 1), 0) if WINDOW > 0 else 0 * position


@triton.jit
def _first_tile_of(queries_before, row_index, QUERIES: tl.constexpr):
    """Return the index of a row's first tile. Tiles are cut at multiples of QUERIES in the
    sequence, so a row has at most two tiles more than its queries need.
    """
    return queries_before // QUERIES + 2 * row_index


@triton.jit
def _row_of(cu_queries_ptr, tile, decodes, rows, QUERIES: tl.constexpr):
    """Return the row of a tile: the last row, from `decodes` on, that begins at or before it."""
    low = decodes
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        start = _first_tile_of(
            tl.load(cu_queries_ptr + middle) - decodes, middle - decodes, QUERIES
        )
        low = tl.where(start <= tile, middle, low)
        high = tl.where(start <= tile, high, middle)
    return low


@triton.jit
def _queries_of(cu_queries_ptr, seq_lens_ptr, tile, decodes, rows, QUERIES: tl.constexpr):
    """Return a tile's row, first token, first position and number of queries; a number of 0 or less
    means an empty tile.

    The first tiles have one decode each.
    """
    row = tile
    token = tile
    count = 0 * tile + 1
    if tile >= decodes:
        tile -= decodes
        row = _row_of(cu_queries_ptr, tile, decodes, rows, QUERIES)
        begin = tl.load(cu_queries_ptr + row)
        end = tl.load(cu_queries_ptr + row + 1)
        start = tl.load(seq_lens_ptr + row) - (end - begin)
        inner = tile - _first_tile_of(begin - decodes, row - decodes, QUERIES)
        cut = (start // QUERIES + inner) * QUERIES
        first = tl.maximum(cut, start)
        last = tl.minimum(cut + QUERIES, start + end - begin)
        token = begin + first - start
        position = first
        count = last - first
    else:
        position = tl.load(seq_lens_ptr + row) - 1
    return row, token, position, count


@triton.jit
def _load_queries(
    query_ptr, places, exists, DIM: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr
):
    """Load SIZE of the DIM elements of queries, as [queries, PADDED]; zeros if a query does not
    exist.
    """
    dims = tl.arange(0, PADDED)
    return tl.load(
        query_ptr + places[:, None] * DIM + dims[None, :],
        mask=exists[:, None] & (dims < SIZE)[None, :],
        other=0.0,
    )


@triton.jit
def _load_part(
    part_ptr, slots, in_range, head, HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    PADDED: tl.constexpr
):  # fmt: skip
    """Load SIZE of the DIM elements of keys or values from a cache, as [tokens, PADDED]; zeros for
    slots out of range.
    """
    dims = tl.arange(0, PADDED)
    pointers = part_ptr + (slots * (HEADS * DIM) + head * DIM)[:, None] + dims[None, :]
    if PADDED == SIZE:
        return tl.load(pointers, mask=in_range[:, None], other=0.0)
    return tl.load(pointers, mask=in_range[:, None] & (dims < SIZE)[None, :], other=0.0)


@triton.jit
def _add_keys(
    query, latent, highest, total, weighted, start, limit, positions, keys_ptr, values_ptr,
    table_ptr, kv_head, scale, softcap, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, LATENT: tl.constexpr, PADDED: tl.constexpr,
    PADDED_V: tl.constexpr
):  # fmt: skip
    """Add a tile of keys to the online softmax: update each row's highest score (times log2 e), sum
    of weights, and weighted sum of values. Keys from `limit` on are not read. A row that sees no
    key of the tile keeps all three bit for bit.

    The first LATENT elements of keys are the values too: `latent` has these elements of queries,
    `query` the others. `values_ptr` is then not read.
    """
    index = start + tl.arange(0, BLOCK_N)
    in_range = index < limit
    blocks = tl.load(table_ptr + index // PAGE, mask=in_range, other=0)
    slots = blocks.to(tl.int64) * PAGE + index % PAGE
    keys = _load_part(
        keys_ptr + LATENT, slots, in_range, kv_head, KV_HEADS, DIM, DIM - LATENT, PADDED
    ).to(query.dtype)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if LATENT > 0:
        values = _load_part(keys_ptr, slots, in_range, kv_head, KV_HEADS, DIM, LATENT, PADDED_V).to(
            query.dtype
        )
        scores = tl.dot(latent, tl.trans(values), scores, input_precision="ieee")
    if SOFTCAP:
        scores = _tanh(scores * (scale / softcap)) * (softcap * _LOG2_E)
    else:
        scores = scores * (scale * _LOG2_E)
    if MASKED:
        seen = index[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (index[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    raised = tl.maximum(highest, tl.max(scores, 1))
    # Before a row's first visible key, the difference of infinities would be NaN.
    base = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp2(scores - base[:, None])
    shrunk = tl.exp2(highest - base)
    total = total * shrunk + tl.sum(weights, 1)
    if LATENT == 0:
        values = _load_part(
            values_ptr, slots, in_range, kv_head, KV_HEADS, DIM_V, DIM_V, PADDED_V
        ).to(query.dtype)
    weighted = weighted * shrunk[:, None]
    weighted = tl.dot(weights.to(query.dtype), values, weighted, input_precision="ieee")
    return raised, total, weighted


@triton.jit
def _tile_rows(
    token, position, count, part, HEADS: tl.constexpr, SHARES: tl.constexpr, QUERIES: tl.constexpr,
    GROUP: tl.constexpr
):  # fmt: skip
    """Return the token, position and head of each row of a tile of QUERIES x GROUP rows, and true
    if the row exists. A query's heads are adjacent. SHARES programs divide the HEADS query heads of
    a KV head; `part` numbers these shares over all KV heads.
    """
    row = tl.arange(0, QUERIES * GROUP)
    inner = row // GROUP
    in_group = part % SHARES * GROUP + row % GROUP
    exists = (inner < count) & (in_group < HEADS)
    return token + inner, position + inner, part // SHARES * HEADS + in_group, exists


@triton.jit(
    do_not_specialize=(*_VARYING, *_VARYING_SPLITS, "table_stride", "first_tile", "high"),
    do_not_specialize_on_alignment=(*_UNALIGNED, "table_ptr"),
)
def split_kernel(
    query_ptr, keys_ptr, values_ptr, table_ptr, cu_queries_ptr, seq_lens_ptr, part_weighted_ptr,
    part_highest_ptr, part_total_ptr, scale, softcap, table_stride, decodes, rows, first_tile, low,
    high, num_splits, smallest, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SHARES: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, LATENT: tl.constexpr, PADDED: tl.constexpr,
    PADDED_V: tl.constexpr, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Attend with a tile's queries over one split of the keys. Write to scratch [tokens, HEADS,
    num_splits, ...].

    Computes only tokens [low, high). A split's place in scratch is its number modulo num_splits,
    which must be at least the number of splits that a tile sees.
    """
    tile = first_tile + tl.program_id(0) // (KV_HEADS * SHARES)
    part = tl.program_id(0) % (KV_HEADS * SHARES)
    row, token, position, count = _queries_of(
        cu_queries_ptr, seq_lens_ptr, tile, decodes, rows, QUERIES
    )
    last = position + count - 1
    # A tile has one split size, because no tile crosses a position where splits grow.
    size = _split_size(position, smallest)
    first_key = _first_key(position, WINDOW)
    split = first_key // size + tl.program_id(1)
    if (count <= 0) | (split * size > last):
        return
    tokens, positions, heads, exists = _tile_rows(
        token, position, count, part, HEADS // KV_HEADS, SHARES, QUERIES, GROUP
    )
    exists = exists & (tokens >= low) & (tokens < high)
    places = tokens.to(tl.int64) * HEADS + heads
    query = _load_queries(query_ptr + LATENT, places, exists, DIM, DIM - LATENT, PADDED)
    latent = query
    if LATENT > 0:
        latent = _load_queries(query_ptr, places, exists, DIM, LATENT, PADDED_V)
    highest = tl.full([QUERIES * GROUP], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP], tl.float32)
    weighted = tl.zeros([QUERIES * GROUP, PADDED_V], tl.float32)
    table_ptr += row.to(tl.int64) * table_stride
    begin = tl.maximum(split * size, first_key // BLOCK_N * BLOCK_N)
    end = tl.minimum(split * size + size, last + 1)
    for start in range(begin, end, BLOCK_N):
        highest, total, weighted = _add_keys(
            query, latent, highest, total, weighted, start, end, positions, keys_ptr, values_ptr,
            table_ptr, part // SHARES, scale, softcap, True, WINDOW, SOFTCAP, BLOCK_N, PAGE,
            KV_HEADS, DIM, DIM_V, LATENT, PADDED, PADDED_V
        )  # fmt: skip
    dims = tl.arange(0, PADDED_V)
    parts = (places - low.to(tl.int64) * HEADS) * num_splits + split % num_splits
    tl.store(part_highest_ptr + parts, highest, mask=exists)
    tl.store(part_total_ptr + parts, total, mask=exists)
    tl.store(
        part_weighted_ptr + parts[:, None] * DIM_V + dims[None, :],
        weighted,
        mask=exists[:, None] & (dims < DIM_V)[None, :],
    )


@triton.jit(
    do_not_specialize=(*_VARYING, *_VARYING_SPLITS), do_not_specialize_on_alignment=_UNALIGNED
)
def combine_kernel(
    output_ptr,
    part_weighted_ptr,
    part_highest_ptr,
    part_total_ptr,
    cu_queries_ptr,
    seq_lens_ptr,
    sinks_ptr,
    decodes,
    rows,
    low,
    num_splits,
    smallest,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
):
    token = low + tl.program_id(0)
    head = tl.program_id(1)
    row = token
    if token >= decodes:
        row = _row_holding(cu_queries_ptr, token, decodes, rows)
    position = tl.load(seq_lens_ptr + row) - 1
    if token >= decodes:
        position -= tl.load(cu_queries_ptr + row + 1) - 1 - token
    size = _split_size(position, smallest)
    first = _first_key(position, WINDOW) // size
    last = position // size
    base = ((token - low).to(tl.int64) * HEADS + head) * num_splits
    order = tl.arange(0, _MOST_SPLITS)
    # The order of splits does not change a maximum.
    highest = tl.max(
        tl.load(
            part_highest_ptr + base + (first + order) % num_splits,
            mask=first + order <= last,
            other=float("-inf"),
        ),
        0,
    )
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2_E
        highest = tl.maximum(highest, sink)
    dims = tl.arange(0, PADDED_V)
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.zeros([PADDED_V], tl.float32)
    # Read several splits at once, to wait less for memory. The position determines the splits, so
    # their sums have one order.
    for start in range(first, last + 1, _SPLITS_TOGETHER):
        splits = start + tl.arange(0, _SPLITS_TOGETHER)
        exists = splits <= last
        parts = base + splits % num_splits
        peaks = tl.load(part_highest_ptr + parts, mask=exists, other=float("-inf"))
        shares = tl.exp2(peaks - highest)
        values = tl.load(
            part_weighted_ptr + parts[:, None] * DIM_V + dims[None, :],
            mask=exists[:, None] & (dims < DIM_V)[None, :],
            other=0.0,
        )
        totals = tl.load(part_total_ptr + parts, mask=exists, other=0.0)
        total = total + tl.sum(totals * shares, 0)
        weighted = weighted + tl.sum(values * shares[:, None], 0)
    if SINKS:
        total = total + tl.exp2(sink - highest)
    place = token.to(tl.int64) * HEADS + head
    tl.store(
        output_ptr + place * DIM_V + dims,
        (weighted / total).to(output_ptr.dtype.element_ty),
        mask=dims < DIM_V,
    )


@triton.jit
def _row_holding(cu_queries_ptr, token, decodes, rows):
    low = decodes
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(cu_queries_ptr + middle) <= token
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    return low


@triton.jit(
    do_not_specialize=(*_VARYING, "table_stride"),
    do_not_specialize_on_alignment=(*_UNALIGNED, "table_ptr"),
)
def rows_kernel(
    output_ptr, query_ptr, keys_ptr, values_ptr, table_ptr, cu_queries_ptr, seq_lens_ptr, sinks_ptr,
    scale, softcap, table_stride, decodes, rows, SINKS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    SHARES: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    LATENT: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr
):  # fmt: skip
    """Attend with a tile's queries over all their keys: first the keys that all queries see,
    unmasked, then the rest with a mask.
    """
    # The last tiles of a long sequence take longest, so start them first.
    tile = decodes + (tl.num_programs(0) - 1 - tl.program_id(0)) // (KV_HEADS * SHARES)
    part = tl.program_id(0) % (KV_HEADS * SHARES)
    row, token, position, count = _queries_of(
        cu_queries_ptr, seq_lens_ptr, tile, decodes, rows, QUERIES
    )
    if count <= 0:
        return
    tokens, positions, heads, exists = _tile_rows(
        token, position, count, part, HEADS // KV_HEADS, SHARES, QUERIES, GROUP
    )
    places = tokens.to(tl.int64) * HEADS + heads
    query = _load_queries(query_ptr + LATENT, places, exists, DIM, DIM - LATENT, PADDED)
    latent = query
    if LATENT > 0:
        latent = _load_queries(query_ptr, places, exists, DIM, LATENT, PADDED_V)
    highest = tl.full([QUERIES * GROUP], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP], tl.float32)
    weighted = tl.zeros([QUERIES * GROUP, PADDED_V], tl.float32)
    table_ptr += row.to(tl.int64) * table_stride
    limit = position + count
    begin = _first_key(position, WINDOW) // BLOCK_N * BLOCK_N
    # Without a window, all queries see all keys up to the first query's own. With latents, a second
    # loop would take registers that sums need.
    middle = begin if (WINDOW > 0) | (LATENT > 0) else (position + 1) // BLOCK_N * BLOCK_N
    for start in range(begin, middle, BLOCK_N):
        highest, total, weighted = _add_keys(
            query, latent, highest, total, weighted, start, limit, positions, keys_ptr, values_ptr,
            table_ptr, part // SHARES, scale, softcap, False, WINDOW, SOFTCAP, BLOCK_N, PAGE,
            KV_HEADS, DIM, DIM_V, LATENT, PADDED, PADDED_V
        )  # fmt: skip
    for start in range(middle, limit, BLOCK_N):
        highest, total, weighted = _add_keys(
            query, latent, highest, total, weighted, start, limit, positions, keys_ptr, values_ptr,
            table_ptr, part // SHARES, scale, softcap, True, WINDOW, SOFTCAP, BLOCK_N, PAGE,
            KV_HEADS, DIM, DIM_V, LATENT, PADDED, PADDED_V
        )  # fmt: skip
    if SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=exists, other=0.0).to(tl.float32) * _LOG2_E
        raised = tl.maximum(highest, sinks)
        shrunk = tl.exp2(highest - raised)
        total = total * shrunk + tl.exp2(sinks - raised)
        weighted = weighted * shrunk[:, None]
    # Padding rows may have no keys.
    total = tl.where(exists, total, 1.0)
    dims = tl.arange(0, PADDED_V)
    tl.store(
        output_ptr + places[:, None] * DIM_V + dims[None, :],
        (weighted / total[:, None]).to(output_ptr.dtype.element_ty),
        mask=exists[:, None] & (dims < DIM_V)[None, :],
    )
