// Numbers as people read them. Pure.

const COUNT = new Intl.NumberFormat("en");

export function count(value) {
  return value === null || value === undefined ? "–" : COUNT.format(value);
}

/** A number of seconds: 0.4 ms, 41 ms, 1.24 s, 12.4 s, 3 min 05 s. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  const ms = seconds * 1000;
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value < 99.95 ? value.toFixed(1) : COUNT.format(Math.round(value));
}

/** A share of one, in per cent; small ones keep their digits. */
export function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.01) return "<0.01 %";
  return `${value < 1 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : "100"} %`;
}

export function bytes(value) {
  if (value < 1000) return `${value} B`;
  return value < 1e6 ? `${(value / 1e3).toFixed(1)} kB` : `${(value / 1e6).toFixed(1)} MB`;
}

/** A token with its blanks made visible; one that is part of a character as its bytes. */
export function visible(token, bytes) {
  if (token === "") return "(empty)";
  if (token.includes("\uFFFD") && bytes?.length) {
    return bytes.map((byte) => `<${byte.toString(16).toUpperCase().padStart(2, "0")}>`).join("");
  }
  return token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

/** Names of causes, as the router counts them, in words. */
export const words = (name) => name.replaceAll("_", " ");

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour12: false });
}
