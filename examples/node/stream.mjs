// node stream.mjs HOST:PORT --prompt 1,2,3 [--max-tokens 16] [--temperature 0.7] [--deadline-ms 5000]
//
// Prints a line for each token id as it comes, and how the request ended. Ctrl-C cancels it.
import { randomUUID } from 'node:crypto';
import { parseArgs } from 'node:util';

import { status } from '@grpc/grpc-js';

import { connect, metadataOf } from './shard.mjs';
import { Finish_Reason } from './shard_pb.js';

const text = { type: 'string' };
const { values: flags, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    prompt: { ...text, default: '1,2,3' },
    'max-tokens': { ...text, default: '16' },
    temperature: { ...text, default: '0' },
    'deadline-ms': text,
    'api-key': { ...text, default: process.env.PENSTOCK_API_KEY },
    'ca-file': text,
    'cert-file': text,
    'key-file': text,
    'server-name': text,
  },
});

const client = connect(positionals[0] ?? '127.0.0.1:20051', {
  caFile: flags['ca-file'],
  certFile: flags['cert-file'],
  keyFile: flags['key-file'],
  serverName: flags['server-name'],
});
const deadlineMs = flags['deadline-ms'];
const deadline = deadlineMs && Date.now() + Number(deadlineMs);
const call = client.Generate(metadataOf(flags['api-key']), deadline ? { deadline } : {});

// One request, half-close, read to the end. Ending the call aborts what is unfinished of it.
call.end({
  requestId: randomUUID(),
  promptTokenIds: flags.prompt.split(',').map(Number),
  sampling: { temperature: Number(flags.temperature) },
  stop: { maxTokens: Number(flags['max-tokens']) },
});
process.on('SIGINT', () => call.cancel());

call.on('data', ({ outputs }) => {
  for (const { tokenIds, end } of outputs) {
    for (const id of tokenIds) console.log(id);
    if (end.case === 'finish') console.error(`finished: ${Finish_Reason[end.value.reason]}`);
    // Which field was wrong, for a request that was: the call's status follows.
    if (end.value?.field) console.error(`field: ${end.value.field}, bound: ${end.value.bound}`);
  }
});
call.on('error', (error) => {
  console.error(`${status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on('status', () => client.close());
