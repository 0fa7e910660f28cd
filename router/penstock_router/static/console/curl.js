// A request as a command line. Pure.

/** `headers` are [name, value]; a key is left for the shell's environment to fill in. */
export function curlOf({ url, method, headers, body, hasKey }) {
  const words = ["curl", quoted(url)];
  if (method !== (body === null ? "GET" : "POST")) words.push("-X", method);
  if (hasKey) words.push("-H", '"Authorization: Bearer $PENSTOCK_API_KEY"');
  for (const [name, value] of headers) words.push("-H", quoted(`${name}: ${value}`));
  if (body !== null) words.push("-N", "-d", quoted(body));
  return words.join(" ");
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
