"""Stop strings in text that comes in pieces."""

from __future__ import annotations

import pytest
from support.budget import budget, seeded

from penstock_router.text.marks import TOKEN
from penstock_router.text.stop_strings import StopMatcher, beginning, compile_stops


def run(
    pieces: list[str], stops: list[str], *, include: bool = False
) -> tuple[list[str], str | None]:
    """Return what each piece showed (the flush last), and the stop that was found."""
    matcher = StopMatcher(stops, include_stop=include)
    shown = []
    for piece in pieces:
        shown.append(matcher.feed(piece))
        if matcher.stopped_by is not None:
            return shown, matcher.stopped_by
    return [*shown, matcher.flush()], None


def expected(text: str, stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """Return the text and the stop, by definition: the stop whose first occurrence ends earliest.
    Ties go by the list's order.
    """
    ends = [
        (text.find(stop) + len(stop), order) for order, stop in enumerate(stops) if stop in text
    ]
    if not ends:
        return text, None
    end, order = min(ends)
    return text[: end if include else end - len(stops[order])], stops[order]


def test_text_without_stops_passes_untouched() -> None:
    assert run(["a", "", "b"], []) == (["a", "", "b", ""], None)


def test_a_stop_over_three_pieces_cuts_exactly_before_it() -> None:
    assert run(["one E", "N", "D two"], ["END"]) == (["one ", "", ""], "END")


def test_text_is_held_back_only_while_it_could_still_become_a_stop() -> None:
    shown, stopped_by = run(["abc", "x", "ab"], ["abcd"])
    assert shown == ["", "abcx", "", "ab"]
    assert stopped_by is None


def test_only_the_longest_suffix_that_begins_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["\n\nHuman"])
    assert matcher.feed("answer\n") == "answer"
    assert matcher.feed("\n\n") == "\n"
    assert matcher.flush() == "\n\n"


def test_a_stop_that_overlaps_itself_is_found() -> None:
    assert run(["aab", "aaba", "ac"], ["aabaac"]) == (["", "aab", ""], "aabaac")


def test_the_stop_that_completes_first_wins() -> None:
    assert run(["xabc"], ["bc", "ab"]) == (["x"], "ab")


def test_stops_that_complete_together_go_by_the_order_of_the_list() -> None:
    assert run(["xabc"], ["bc", "abc"]) == (["xa"], "bc")
    assert run(["xabc"], ["abc", "bc"]) == (["x"], "abc")


def test_an_included_stop_is_shown_and_nothing_is_held_back() -> None:
    assert run(["one E", "N", "D two"], ["END"], include=True) == (["one E", "N", "D"], "END")


def test_a_stop_may_be_one_character_or_the_whole_text() -> None:
    assert run(["ab\nc"], ["\n"]) == (["ab"], "\n")
    assert run(["E", "N", "D"], ["END"]) == (["", "", ""], "END")


@pytest.mark.parametrize("include", [False, True])
def test_any_split_of_any_text_gives_what_the_whole_text_gives(include: bool) -> None:
    rng = seeded("stop")
    for _ in range(budget(3_000, 200_000)):
        # Two letters only, so that stops overlap one another and themselves.
        text = "".join(rng.choice("ab😀") for _ in range(rng.randrange(1, 25)))
        stops = [
            "".join(rng.choice("ab😀") for _ in range(rng.randrange(1, 6)))
            for _ in range(rng.randrange(1, 4))
        ]
        pieces, rest = [], text
        while rest:
            size = rng.randrange(1, 5)
            pieces.append(rest[:size])
            rest = rest[size:]
        shown, stopped_by = run(pieces, stops, include=include)
        assert ("".join(shown), stopped_by) == expected(text, stops, include=include), (
            pieces,
            stops,
        )


def test_text_that_must_not_stop_is_shown_and_still_begins_what_may() -> None:
    matcher = StopMatcher(["aba"])
    assert matcher.feed("xaba", may_stop=False) == "xab"
    assert matcher.stopped_by is None
    assert matcher.feed("ba.") == ""
    assert matcher.stopped_by == "aba"


def test_stops_count_from_a_place_on_as_if_the_text_before_had_been_searched_by_hand() -> None:
    rng = seeded("may stop")
    for _ in range(budget(2_000, 100_000)):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 25)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 5))) for _ in range(3)]
        start = rng.randrange(len(text) + 1)
        matcher, shown = StopMatcher(stops), ""
        for position, letter in enumerate(text):
            shown += matcher.feed(letter, may_stop=position >= start)
            if matcher.stopped_by is not None:
                break
        ends = [
            (end, order)
            for end in range(start + 1, len(text) + 1)
            for order, stop in enumerate(stops)
            if text[:end].endswith(stop)
        ]
        if ends:
            end, order = min(ends)
            assert shown == text[: end - len(stops[order])], (text, stops, start)
            assert matcher.stopped_by == stops[order], (text, stops, start)
        else:
            assert shown + matcher.flush() == text, (text, stops, start)
            assert matcher.stopped_by is None


def test_what_is_held_back_always_begins_a_stop() -> None:
    rng = seeded("held")
    for _ in range(budget(1_000, 50_000)):
        stop = "".join(rng.choice("ab") for _ in range(rng.randrange(2, 7)))
        matcher, fed, shown = StopMatcher([stop]), "", ""
        for _ in range(20):
            piece = rng.choice("ab")
            fed += piece
            shown += matcher.feed(piece)
            if matcher.stopped_by is not None:
                break
            held = fed[len(shown) :]
            longest = max(n for n in range(len(stop)) if n == 0 or fed.endswith(stop[:n]))
            assert held == fed[len(fed) - longest :]


def test_choices_with_the_same_stop_strings_share_what_finds_them() -> None:
    assert compile_stops(("abab", "b")) is compile_stops(("abab", "b"))


def test_of_many_stop_strings_the_first_to_complete_is_found_however_the_text_is_cut() -> None:
    rng = seeded("many stops")
    for _ in range(budget(300, 20_000)):
        stops = ["".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 9))]
        text = "".join(rng.choices("abcd", k=30))
        ends = {stop: text.find(stop) + len(stop) for stop in reversed(stops) if stop in text}
        first = min(ends.values(), default=None)
        wanted = next((stop for stop in stops if first and ends.get(stop) == first), None)
        matcher, shown, at = StopMatcher(stops), "", 0
        while at < len(text) and matcher.stopped_by is None:
            size = rng.randint(1, 5)
            shown += matcher.feed(text[at : at + size])
            at += size
        shown += matcher.flush()
        assert matcher.stopped_by == wanted, (stops, text)
        assert shown == (text if first is None else text[: first - len(wanted or "")])


def test_the_longest_end_that_may_become_a_mark_is_found() -> None:
    rng = seeded("beginning")
    for _ in range(budget(3_000, 100_000)):
        marks = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=rng.randint(0, 8)))
        if any(mark in text for mark in marks):
            continue
        start = rng.randint(0, len(text))
        ends = range(start, len(text) + 1)
        wanted = next(at for at in ends if any(mark.startswith(text[at:]) for mark in marks))
        assert beginning(text, marks, start) == wanted, (text, marks, start)


@pytest.mark.parametrize("stop", ["b\n<m>", "<m>", "<m> c", "\n<", "m", "b", "> c"])
@pytest.mark.parametrize("include", [False, True])
def test_what_tells_a_mark_apart_is_no_part_of_what_is_searched(stop: str, include: bool) -> None:
    text = f"a b\n{TOKEN}<m> c {TOKEN}<m>"
    wanted, _ = expected(text.replace(TOKEN, ""), [stop], include=include)
    for size in (1, 2, 3, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        shown, stopped_by = run(pieces, [stop], include=include)
        assert stopped_by == stop
        assert "".join(shown).replace(TOKEN, "") == wanted
        assert text.startswith("".join(shown).rstrip(TOKEN))


@pytest.mark.parametrize("stop", ["<m> d", "m> c.", "b<m>x", "zz"])
def test_what_tells_a_mark_apart_stays_before_it(stop: str) -> None:
    pieces = ["a ", f"{TOKEN}<m>", f"b{TOKEN}<m> c"]
    shown, stopped_by = run(pieces, [stop])
    assert stopped_by is None
    assert "".join(shown) == "".join(pieces)
