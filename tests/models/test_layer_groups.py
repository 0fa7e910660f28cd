"""Groups of layers: which layers share block tables and memory."""

from __future__ import annotations

from penstock_shard.attention.base import LayerSpec
from penstock_shard.attention.cache_groups import cache_layout
from penstock_shard.ipc.runner_info import CacheGroup


def layers(*kinds: tuple[int | None, int], dim: int = 64) -> list[LayerSpec]:
    """Layers with a window, or None, and so many keys' heads."""
    return [
        LayerSpec(i, 8, heads, dim, dim, 1.0, window) for i, (window, heads) in enumerate(kinds)
    ]


def test_layers_that_are_alike_have_one_group_and_one_pool() -> None:
    layout = cache_layout(layers(*[(None, 2)] * 5))
    assert layout.groups == (CacheGroup(),)
    assert set(layout.group_of.values()) == {0}
    assert [len(planes) for planes in layout.planes] == [5]


def test_groups_of_one_size_share_the_planes_of_a_pool() -> None:
    layout = cache_layout(layers(*[(8, 2), (8, 2), (None, 2)] * 3))
    assert layout.groups == (CacheGroup(window=8), CacheGroup(window=8), CacheGroup())
    assert [[layer.index for layer in plane] for plane in layout.planes[0]] == [
        [0, 4, 2],
        [1, 6, 5],
        [3, 7, 8],
    ]
    for plane in layout.planes[0]:
        groups = [layout.group_of[layer.index] for layer in plane]
        assert len(groups) == len(set(groups))
    assert layout.block_bytes(0, 16, 2) == 3 * 2 * 2 * 64 * 16 * 2


def test_layers_of_another_size_have_a_pool_of_their_own() -> None:
    layout = cache_layout(layers((8, 4), (None, 1), (8, 4), (None, 1)))
    assert layout.groups == (CacheGroup(window=8), CacheGroup(pool=1))
    assert [len(planes) for planes in layout.planes] == [2, 2]


def test_few_layers_of_a_kind_do_not_make_many_groups_of_the_others() -> None:
    layout = cache_layout(layers((None, 2), *[(8, 2)] * 27))
    assert len(layout.groups) <= 8
    assert sorted(layout.group_of) == list(range(28))


def test_a_layer_that_reads_anothers_keys_has_its_group_and_no_memory() -> None:
    first, reader = LayerSpec(0, 8, 2, 64, 64, 1.0, 8), LayerSpec(2, 8, 2, 64, 64, 1.0, 8, reads=0)
    layout = cache_layout([first, LayerSpec(1, 8, 2, 64, 64, 1.0), reader])
    assert layout.group_of[2] == layout.group_of[0] != layout.group_of[1]
    assert all(layer.index != 2 for planes in layout.planes for plane in planes for layer in plane)


def test_latents_are_one_row_a_token() -> None:
    latent = LayerSpec(0, 128, 1, 576, 512, 1.0, values_in_keys=True)
    heads = LayerSpec(0, 128, 128, 192, 128, 1.0)
    assert cache_layout([latent]).block_bytes(0, 16, 2) == 576 * 16 * 2
    assert 4 * latent.elements_per_token <= heads.elements_per_token
