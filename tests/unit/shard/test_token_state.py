"""Token counts and bad words against the plainest way to have them."""

from __future__ import annotations

from collections import Counter

from support.budget import budget, seeded

from penstock_shard.worker.token_state import BadWords, TokenCounts, WindowCounts


def test_counts_follow_the_output_wherever_they_began() -> None:
    rng = seeded("token counts")
    for _ in range(budget(20, 500)):
        vocabulary = rng.choice([3, 50, 5000])
        prompt = rng.choices(range(vocabulary), k=rng.randint(0, 80))
        output = rng.choices(range(vocabulary), k=rng.randint(0, 300))
        known = rng.randint(0, len(output))
        counts = TokenCounts(prompt, output[:known])
        for token_id in output[known:]:
            counts.add(token_id)
        found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
        assert len(found) == len(counts.ids)
        assert found.keys() == {*prompt, *output}
        assert {i: n for i, n in found.items() if n} == Counter(output)


def test_a_window_counts_the_last_tokens_only_wherever_it_began() -> None:
    rng = seeded("window counts")
    for _ in range(budget(60, 2000)):
        vocabulary = rng.choice([3, 50, 5000])
        prompt = rng.choices(range(vocabulary), k=rng.randint(0, 80))
        output = rng.choices(range(vocabulary), k=rng.randint(0, 300))
        size = rng.choice([1, 2, 7, 64, 200, 1000])
        known = rng.randint(0, len(output))
        counts = WindowCounts(size, prompt, output[:known])
        for place in range(known, len(output) + 1):
            marked = [*((i, 0) for i in prompt), *((i, 1) for i in output[:place])][-size:]
            found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
            assert len(found) == len(counts.ids) <= size
            assert found.keys() == {token_id for token_id, _ in marked}
            expected = Counter(token_id for token_id, is_output in marked if is_output)
            assert {i: n for i, n in found.items() if n} == expected
            if place < len(output):
                counts.add(output[place])


def test_what_completes_a_bad_word_is_what_would_contain_it() -> None:
    rng = seeded("bad words")
    for _ in range(budget(200, 5000)):
        words = [rng.choices(range(4), k=rng.randint(1, 4)) for _ in range(rng.randint(0, 6))]
        output = rng.choices(range(4), k=rng.randint(0, 8))
        bad_words = BadWords(words)
        expected = {
            word[-1] for word in words if output[len(output) - len(word) + 1 :] == word[:-1]
        }
        tail = output[len(output) - min(len(output), bad_words.num_tail_tokens) :]
        assert set(bad_words.completing(tail)) == expected
        assert set(bad_words.completing(output)) == expected


def test_the_tail_that_matters_is_the_longest_beginning() -> None:
    assert BadWords([]).num_tail_tokens == 0
    assert BadWords([[1], [2]]).num_tail_tokens == 0
    assert BadWords([[1], [1, 2, 3]]).num_tail_tokens == 2
