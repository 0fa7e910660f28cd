// A client of a shard: grpc-js on what protoc-gen-es made of shard.proto.
import { readFileSync } from 'node:fs';

import { create, fromBinary, toBinary } from '@bufbuild/protobuf';
import { credentials, makeClientConstructor, Metadata } from '@grpc/grpc-js';

import { Shard } from './shard_pb.js';

// Messages go in as plain objects: fields in camelCase, those left out are absent.
const methods = Object.fromEntries(
  Shard.methods.map((method) => [
    method.name,
    {
      path: `/${Shard.typeName}/${method.name}`,
      requestStream: ['client_streaming', 'bidi_streaming'].includes(method.methodKind),
      responseStream: ['server_streaming', 'bidi_streaming'].includes(method.methodKind),
      requestSerialize: (message) =>
        Buffer.from(toBinary(method.input, create(method.input, message))),
      responseDeserialize: (bytes) => fromBinary(method.output, bytes),
    },
  ]),
);

export const ShardClient = makeClientConstructor(methods, Shard.typeName);

// caFile: the shard has TLS. certFile and keyFile: it wants to know its callers by a certificate.
// serverName: the shard's certificate names this, and not the host of the address.
export function connect(address, { caFile, certFile, keyFile, serverName } = {}) {
  const file = (path) => (path ? readFileSync(path) : null);
  const security = caFile
    ? credentials.createSsl(file(caFile), file(keyFile), file(certFile))
    : credentials.createInsecure();
  return new ShardClient(address, security, {
    ...(serverName && { 'grpc.ssl_target_name_override': serverName }),
  });
}

export function metadataOf(apiKey) {
  const metadata = new Metadata();
  if (apiKey) metadata.set('authorization', `Bearer ${apiKey}`);
  return metadata;
}
