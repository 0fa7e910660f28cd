// Which colour a shard has: the same in its card, in bars and in chats.

const COUNT = 6;
const given = new Map();

/** The name of a shard's colour. Addresses get theirs in the order in which they turn up. */
export function colourOf(address) {
  if (!given.has(address)) given.set(address, given.size % COUNT);
  return `shard-${given.get(address)}`;
}
