"""The goals for figures, and the table of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

# The batch size for which the goals of exactness and of fp8 are stated.
_COMPARED_BATCH = 32
# (model, batch, context) -> least milliseconds of a decode step on an H200, by the goals. These
# count all weights, even the embedding, which a step does not read.
_STATED_ON = "H200"
_STATED_FLOORS = {
    ("llama-3.1-8b", 1, 512): 4.2,
    ("llama-3.1-8b", 32, 512): 4.7,
    ("llama-3.1-8b", 256, 512): 8.6,
}
_MOST_OVER_FLOOR = 1.3
# Sampling with top_p is compared with this model's decode step, at this batch size.
_SAMPLED = ("llama-3.1-8b", 256)
_MOST_OF_STEP = 0.15
# Output tokens a second by TensorRT-LLM's documentation, with the 8B in fp8, 1,000 tokens in and
# out; and the share that is the goal.
_PUBLISHED_TOKENS_PER_S = {"H100": 15_220, "H200": 17_744}
_LEAST_OF_PUBLISHED = 0.7
_KERNELS_SHOWN = 5
# The starts of lines of a loading shard that are not shown.
_PROGRESS = ("loading ", "checking ")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table. `met` is None without a goal."""

    what: str
    figure: str
    goal: str
    met: bool | None


def lines(rows: Sequence[Row]) -> Iterator[Line]:
    """Yield the lines of the table, in the order of parts."""
    device = next((row["device"] for row in rows if "device" in row), "")
    for row in rows:
        if "failed" in row:
            name = f": {row['name']}" if "name" in row else ""
            yield Line(f"{row['part']}{name}", row["failed"], "", False)
        elif row["what"] == "decode":
            yield _decode(row, is_stated=_STATED_ON in device)
        elif row["what"] == "throughput":
            yield _throughput(row, device)
        elif make := _LINES.get(row["what"]):
            yield from make(row)
    yield from _across(rows)


def _decode(row: Row, *, is_stated: bool) -> Line:
    """Compare a decode step's time with its floor: that of the goal, else that of the bytes
    read.
    """
    what = f"{row['model']}: decode, batch {row['batch']}, context {row['context']}"
    figure = f"{row['period_ms']:.2f} ms, {row['of_floor']:.2f} x floor {row['floor_ms']:.2f}"
    stated = _STATED_FLOORS.get((row["model"], row["batch"], row["context"]))
    if stated is None or not is_stated:
        return Line(what, figure, "<= 1.30 x", row["of_floor"] <= _MOST_OVER_FLOOR)
    met = row["period_ms"] <= _MOST_OVER_FLOOR * stated
    return Line(what, figure, f"<= 1.30 x {stated}", met)


def _throughput(row: Row, device: str) -> Line:
    """Compare output tokens a second with those that were published for the device, if any."""
    what = f"{row['model']}: {row['requests']} completions, {row['tokens']} tokens in and out"
    figure = f"{row['tokens_per_s']:,.0f} tokens/s; TPOT p50 {row['tpot_p50_ms']:.1f} ms"
    known = (rate for name, rate in _PUBLISHED_TOKENS_PER_S.items() if name in device)
    published = next(known, None)
    if published is None:
        return Line(what, figure, "", None)
    met = row["tokens_per_s"] >= _LEAST_OF_PUBLISHED * published
    return Line(what, figure, f">= 70 % of {published:,}", met)


def _machine(row: Row) -> Iterator[Line]:
    figure = f"{row['copy_gb_per_s']:,.0f} GB/s, {row['matmul_tflops']:,.0f} TFLOP/s"
    yield Line("a copy, read and written; a product in bfloat16", figure, "", None)


def _prefill(row: Row) -> Iterator[Line]:
    figure = f"{row['tokens_per_s']:,.0f} tokens/s, {row['of_matmul']:.0%} of a matmul"
    yield Line(f"{row['model']}: prefill of {row['tokens']}", figure, ">= 55 %",
               row["of_matmul"] >= 0.55)  # fmt: skip


def _attention(row: Row) -> Iterator[Line]:
    what = f"{row['backend']} attention, batch {row['batch']}, context {row['context']}"
    figure = f"{row['us']:.0f} us, {row['of_copy']:.0%} of a copy"
    yield Line(what, figure, ">= 75 %", row["of_copy"] >= 0.75)


def _requests(row: Row) -> Iterator[Line]:
    figure = (
        f"{row['requests_per_s']:.0f} requests/s, {row['tokens_per_s']:,.0f} tokens/s; TTFT p50 "
        f"{row['ttft_p50_ms']:.0f} ms, TPOT p50 {row['tpot_p50_ms']:.1f}, p99 "
        f"{row['tpot_p99_ms']:.1f} ms"
    )
    yield Line(f"{row['model']}: {row['requests']} {row['api']} at once", figure,
               ">= 200 requests/s", row["requests_per_s"] >= 200)  # fmt: skip


def _attempt(row: Row) -> Iterator[Line]:
    known = ("part", "what", "name", "seconds")
    said = [f"{name} {value}" for name, value in row.items() if name not in known]
    time = f" ({row['seconds']} s)" if "seconds" in row else ""
    figure = ", ".join(said).removeprefix("found ")
    yield Line(f"{row['part']}: {row['name']}", f"{figure}{time}", "", None)


def _sampling(row: Row) -> Iterator[Line]:
    what = f"sampling {row['batch']} rows of {row['logits']} logits, {row['parameters']}"
    figure = f"{row['ms']:.2f} ms, of it the host's {row['host_ms']:.2f}; logits read once: "
    yield Line(what, f"{figure}{row['floor_ms']:.3f} ms", "", None)


def _transformers(row: Row) -> Iterator[Line]:
    figure = f"{row['requests_per_s']:.0f} requests/s, {row['tokens_per_s']:,.0f} tokens/s"
    what = f"{row['model']}: {row['requests']} in transformers' continuous batching"
    yield Line(what, figure, "", None)


def _exact(row: Row) -> Iterator[Line]:
    proven = row["batch_invariant"] and not row["differing"]
    figure = "equal bits" if proven else f"differs: {', '.join(row['differing']) or 'at load'}"
    yield Line(f"{row['model']}: alone, batch of {row['batch']}, chunks, again", figure,
               "equal bits", proven)  # fmt: skip


def _served(row: Row) -> Iterator[Line]:
    ratio = row["period_ms"] / row["device_ms"]
    what = f"{row['model']}: steps with {row['batch']} streams over gRPC"
    yield Line(what, f"{row['period_ms']:.2f} ms, {ratio:.3f} x the device's", "<= 1.02 x",
               ratio <= 1.02)  # fmt: skip


def _loaded(row: Row) -> Iterator[Line]:
    """Yield the loading time, and lines that name the model's kernels and graphs."""
    said = [line for line in row["said"] if not line.startswith(_PROGRESS)]
    yield Line(f"{row['model']}: loaded", f"{row['seconds']:.0f} s; {'; '.join(said)}", "", None)


def _kernels(row: Row) -> Iterator[Line]:
    """Yield the longest kernels; the JSON file has more."""
    found = row["kernels"][:_KERNELS_SHOWN]
    figure = ", ".join(f"{_short(one['name'])} {one['us']:,.0f} us" for one in found)
    yield Line(f"{row['model']}: kernels, {row['step']}", figure or "none were seen", "", None)


def _short(name: str) -> str:
    """Shorten a kernel's name, which may be a C++ declaration."""
    return name.partition("<")[0].partition("(")[0].split(" ")[-1].split("::")[-1][:32]


_LINES: dict[str, Callable[[Row], Iterator[Line]]] = {
    "machine": _machine,
    "prefill": _prefill,
    "attention": _attention,
    "served steps": _served,
    "requests": _requests,
    "transformers": _transformers,
    "exact": _exact,
    "attempt": _attempt,
    "sampling": _sampling,
    "kernels": _kernels,
    "loaded": _loaded,
}


def _across(rows: Sequence[Row]) -> Iterator[Line]:
    """Compare figures of two parts."""
    decodes = {(row["model"], row["batch"]): row for row in rows if row.get("what") == "decode"}
    for (model, batch), row in decodes.items():
        for how, most, least in (("exact", 1.2, 0.0), ("fp8", 1e9, 1.4)):
            plain = decodes.get((model.removesuffix(" " + how), batch))
            if not model.endswith(" " + how) or plain is None or batch != _COMPARED_BATCH:
                continue
            slower = row["period_ms"] / plain["period_ms"]
            if how == "exact":
                yield Line(f"{model}, batch {batch}", f"{slower:.2f} x the time without",
                           "<= 1.20 x", slower <= most)  # fmt: skip
            else:
                yield Line(f"{model}, batch {batch}", f"{1 / slower:.2f} x as fast",
                           ">= 1.40 x", 1 / slower >= least)  # fmt: skip
    yield from _sampling_in_step(rows, decodes.get(_SAMPLED))
    ours = [row for row in rows if row.get("what") == "requests" and row["api"] == "completions"]
    theirs = [row for row in rows if row.get("what") == "transformers"]
    if ours and theirs:
        ratio = ours[0]["requests_per_s"] / theirs[0]["requests_per_s"]
        yield Line("requests/s over transformers'", f"{ratio:.1f} x", ">= 3 x", ratio >= 3)


def _sampling_in_step(rows: Sequence[Row], step: Row | None) -> Iterator[Line]:
    """Compare sampling with top_p with a decode step."""
    for row in rows:
        with_top_p = row.get("what") == "sampling" and row["parameters"] == "top_p"
        if step is not None and with_top_p and row["batch"] == step["batch"]:
            share = row["ms"] / step["period_ms"]
            what = f"top_p of {row['logits']} logits over the step of {step['model']}"
            yield Line(f"{what}, batch {step['batch']}", f"{share:.2f} x", "<= 0.15 x",
                       share <= _MOST_OF_STEP)  # fmt: skip


def table(found: Sequence[Line]) -> str:
    """Make a Markdown table of the lines."""
    verdicts = {True: "yes", False: "no", None: ""}
    body = [f"| {x.what} | {x.figure} | {x.goal} | {verdicts[x.met]} |" for x in found]
    return "\n".join(["| what | figure | goal | met |", "|---|---|---|---|", *body])
