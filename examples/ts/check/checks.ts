// Checks of the whole client against servers that it starts, kills and starts again.
import { type Metadata, type requestCallback } from "@grpc/grpc-js";
import assert from "node:assert/strict";
import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { ClearRequest, EvictRequest, ListChunksRequest, type ListChunksResponse, StatusRequest } from "../gen/kvdock/v1/admin.js";
import { FreeLocksRequest, LockRange, LookupRequest } from "../gen/kvdock/v1/cache.js";
import { StreamKVEventsRequest, type StreamKVEventsResponse } from "../gen/kvdock/v1/events.js";
import { ChunkEventData, ChunkStatus, type ExtraKey, type ExtraValue, GroupKind, Namespace } from "../gen/kvdock/v1/types.js";
import { call, Engine, KVDock, read } from "../src/client.js";
import { KVDockError } from "../src/errors.js";
import { follow, Index } from "../src/index.js";
import { chunkKeys } from "../src/keys.js";

const CHUNK_TOKENS = 16;
const SHARD_BYTES = 300_001; // more than two messages, and no round number
const NAMESPACE = Namespace.create({
  name: "typescript-checks", chunkTokens: CHUNK_TOKENS, kvWorldSize: 1,
  groups: [{ kind: GroupKind.FULL_ATTENTION, shardBytes: [SHARD_BYTES] }],
});
const namespace = NAMESPACE.name;

async function startServer(address: string): Promise<ChildProcess> {
  const [program, ...options] = (process.env.KVDOCK_SERVER ?? "python -m kvdock_server").split(" ");
  options.push("--listen", address, "--memory", "64MiB", "--event-log", "1MiB", "--event-log-count", "16");
  const child = spawn(program!, [...options, "--log-level", "warning"], { stdio: ["ignore", "ignore", "inherit"] });
  const dies = () => child.kill("SIGKILL");
  process.once("exit", dies);
  child.once("exit", () => process.off("exit", dies));
  return child;
}

async function kill(child: ChildProcess): Promise<void> {
  const gone = once(child, "exit");
  child.kill("SIGKILL");
  await gone;
}

/** A prompt of its own: keys, and bytes that differ in each chunk and at each place. */
function prompt(seed: number, chunks: number) {
  const tokens = Array.from({ length: chunks * CHUNK_TOKENS }, (_, i) => seed * 1_000_003 + i);
  const bytes = tokens.filter((_, i) => i % CHUNK_TOKENS === 0).map((token) => {
    const chunk = Buffer.alloc(SHARD_BYTES);
    for (let i = 0; i < SHARD_BYTES; i++) chunk[i] = (token + i * 31 + (i >> 8) * 7) & 0xff;
    return chunk;
  });
  return { namespace, keys: chunkKeys(tokens, CHUNK_TOKENS), bytes };
}

const reason = async (promise: Promise<unknown>): Promise<string> => {
  const error = await promise.then(() => new Error("no error"), (e: unknown) => e);
  return error instanceof KVDockError ? error.reason : String(error);
};

/** Reads updates until done, and returns their kinds without repetition. */
async function until(updates: AsyncGenerator<string>, done: (kinds: string[]) => boolean): Promise<string[]> {
  const kinds: string[] = [];
  const late = AbortSignal.timeout(60_000);
  while (!done(kinds)) {
    if (late.aborted) throw new Error(`not reached: heard ${kinds.join(", ")}`);
    const { value } = await updates.next();
    if (value && kinds.at(-1) !== value) kinds.push(value);
  }
  return kinds;
}

/** Calls a method with bytes that are no message. */
function sendNoMessage({ cache }: KVDock): Promise<unknown> {
  const { path } = cache.lookup as unknown as { path: string };
  const lookup = (request: Buffer, metadata: Metadata, options: object, answer: requestCallback<Buffer>) =>
    cache.makeUnaryRequest(path, (bytes: Buffer) => bytes, (bytes) => bytes, request, metadata, options, answer);
  return call(cache, lookup, Buffer.of(0xff));
}

/** Stores a chunk with all kinds of extra keys, and finds them in its event. */
async function checkExtraKeys(server: KVDock): Promise<void> {
  const values: ExtraValue[] = [
    { value: { $case: "text", value: "adapter" } },
    { value: { $case: "number", value: -7 } },
    { value: { $case: "raw", value: Buffer.of(0, 0xff) } },
  ];
  const keys: ExtraKey[] = values.map((value) => ({ key: { $case: "value", value } }));
  keys.push({ key: { $case: "tuple", value: { values } } });
  const told = ChunkEventData.create({ blockSize: CHUNK_TOKENS, blockHashes: [Buffer.of(1)], extraKeys: [{ keys }] });
  const chunk = prompt(5, 1);
  await server.put({ ...chunk, eventData: [told] });
  const request = StreamKVEventsRequest.create({ start: { $case: "snapshot", value: {} } });
  for await (const { message } of read<StreamKVEventsResponse>(server.events.streamKvEvents(request))) {
    assert.equal(message?.$case, "snapshot"); // in which the chunk must be
    const stored = message.value.stored.flatMap(({ event }) => (event?.$case === "stored" ? [event.value] : []));
    const found = stored.find(({ key }) => key.equals(chunk.keys[0]!));
    if (found) return assert.deepEqual(found.data, told);
  }
  assert.fail("no event");
}

export async function checkAll(address: string): Promise<void> {
  const row = (what: string, seen: string) => console.log(`${what.padEnd(28)} ${seen}`);
  let child = await startServer(address);
  const server = new KVDock(address);
  const engine = new Engine(server, "typescript", NAMESPACE);
  const session = await engine.current();
  const index = new Index();
  const locked = async () =>
    (await call(server.admin, server.admin.status, StatusRequest.create())).index!.lockedParts;
  const listed = async () => {
    const parents = new Map<string, string>(); // of each chunk's key
    const stream = server.admin.listChunks(ListChunksRequest.create({ namespace }));
    for await (const { parts } of read<ListChunksResponse>(stream)) {
      for (const { key, parentKey } of parts) parents.set(key.toString("hex"), parentKey.toString("hex"));
    }
    return parents;
  };
  const asListed = async () => assert.deepEqual(index.keys(namespace), [...(await listed()).keys()].sort());

  // Put and get.
  const first = prompt(1, 4);
  assert.deepEqual(await server.put(first), Array(4).fill(ChunkStatus.STORED));
  assert.deepEqual(await server.put({ ...first, bytes: [] }), Array(4).fill(ChunkStatus.EXISTS)); // asks for no bytes
  row("put", `4 chunks of ${SHARD_BYTES} bytes stored; again: all exist`);
  const orphan = prompt(2, 2);
  const statuses = await server.put({ ...orphan, keys: orphan.keys.slice(1), bytes: orphan.bytes.slice(1), parent: orphan.keys[0] });
  assert.deepEqual(statuses, [ChunkStatus.PARENT_MISSING]);
  row("put without parent", "PARENT_MISSING");
  const got = await server.get(namespace, [...first.keys, ...orphan.keys]);
  assert.equal(got.length, 4);
  got.forEach((bytes, i) => assert.ok(bytes.equals(first.bytes[i]!), `chunk ${i} differs`));
  row("get and compare", "4 chunks equal, the fifth is not there");

  // Lookup with lease, FreeLocks.
  const keys = [...first.keys, ...orphan.keys];
  const hit = await session.ask("lookup", LookupRequest.create({ namespace, keys, readers: 2 }));
  assert.equal(hit.hitChunks, 4);
  assert.deepEqual(hit.groups.map((g) => [g.groupIdx, g.firstChunk, g.endChunk]), [[undefined, 0, 4]]);
  assert.ok(Number.isSafeInteger(hit.leaseId) && hit.leaseId > 0);
  assert.equal(await locked(), 4);
  const free = async (range: Partial<LockRange>, by = session) =>
    (await by.ask("freeLocks", FreeLocksRequest.create({ locks: [LockRange.create({ leaseId: hit.leaseId, ...range })] }))).freed[0]!.released;
  row("lookup", "hit of 4 of 6 chunks, [0, 4) locked for 2 readers");
  const stranger = await new Engine(server, "stranger", NAMESPACE).current();
  assert.equal(await reason(free({}, stranger)), "FOREIGN_LEASE");
  assert.equal(await free({ firstChunk: 1, endChunk: 2, reader: 1 }), 1);
  assert.equal(await free({}), 7);
  assert.equal(await free({}), 0);
  assert.equal(await locked(), 0);
  row("free locks", "a stranger: FOREIGN_LEASE; ours: 1, the other 7, then 0");
  await stranger.ask("lookup", LookupRequest.create({ namespace, keys }));
  assert.equal(await locked(), 4);
  stranger.close();
  for (let i = 0; i < 600 && (await locked()); i++) await sleep(50);
  assert.equal(await locked(), 0);
  row("a session's end", "frees its 4 locks");

  // Errors with their reasons, from the trailing metadata.
  const unknown = LookupRequest.create({ namespace: "nobody", keys });
  assert.equal(await reason(call(server.cache, server.cache.lookup, unknown)), "UNKNOWN_NAMESPACE");
  assert.equal(await reason(session.ask("lookup", unknown)), "UNKNOWN_NAMESPACE");
  const tooLong = { ...orphan, bytes: orphan.bytes.map((b) => Buffer.concat([b, b])) };
  assert.equal(await reason(server.put(tooLong)), "WRONG_LENGTH");
  const tooLarge = LookupRequest.create({ namespace: "n".repeat(5_000_000), keys });
  assert.equal(await reason(session.ask("lookup", tooLarge)), "MESSAGE_TOO_LARGE");
  assert.equal(session.ended, false);
  row("errors", "UNKNOWN_NAMESPACE twice, WRONG_LENGTH, MESSAGE_TOO_LARGE");

  assert.equal(await reason(sendNoMessage(server)), "INVALID_ARGUMENT_VALUE");
  row("bytes that are no message", "INVALID_ARGUMENT_VALUE");

  // A session's id is for everybody to see; its token acts for it.
  const { leaseId } = await session.ask("lookup", LookupRequest.create({ namespace, keys }));
  const freeAs = (sessionToken: Buffer) => call(server.cache, server.cache.freeLocks,
    FreeLocksRequest.create({ locks: [LockRange.create({ leaseId })], sessionToken }));
  assert.equal(await reason(freeAs(Buffer.from(String(session.opened.sessionId)))), "UNKNOWN_SESSION");
  assert.deepEqual((await freeAs(session.opened.sessionToken)).freed, [{ released: 4 }]);
  row("a session's secret", "its id as token: UNKNOWN_SESSION; its token frees 4 locks");

  // Events with an index.
  let stop = new AbortController();
  let updates = follow(server, index, stop.signal, 200);
  const holds = (count: number) => () => index.cursor !== undefined && index.keys(namespace).length === count;
  assert.deepEqual(await until(updates, holds(4)), ["snapshot"]);
  assert.equal(index.prefix(namespace, keys), 4);
  await server.put(orphan);
  await until(updates, holds(6));
  await asListed();
  row("events: snapshot and tail", "4 chunks, then 2 more, as the server lists them");
  const reconnect = async () => {
    stop.abort();
    await updates.return(undefined);
    stop = new AbortController();
    updates = follow(server, index, stop.signal, 200);
  };
  await reconnect();
  const before = index.cursor!.sequence;
  await server.put(prompt(3, 3));
  assert.deepEqual((await until(updates, holds(9))).filter((kind) => kind !== "progress"), ["batch"]);
  assert.equal(index.cursor!.sequence, before + 3);
  row("events: resume", "3 chunks stored meanwhile, 3 numbers further");
  await call(server.admin, server.admin.evict, EvictRequest.create({ amount: { $case: "bytes", value: 1 } }));
  await until(updates, holds(8));
  await asListed();
  row("events: eviction", "1 chunk fewer, as the server lists them");
  await reconnect();
  const long = prompt(4, 30);
  const eventData = long.keys.map(() => ChunkEventData.create({ blockSize: CHUNK_TOKENS, blockHashes: [Buffer.alloc(200_000)] }));
  assert.deepEqual(await server.put({ ...long, eventData }), Array(30).fill(ChunkStatus.STORED));
  const parents = await listed();
  long.keys.forEach((key, i) => assert.equal(parents.get(key.toString("hex")), long.keys[i - 1]?.toString("hex") ?? ""));
  const kinds = (await until(updates, holds(38))).filter((kind) => kind !== "progress");
  assert.deepEqual(kinds, ["compacted", "snapshot"]);
  await asListed();
  row("events: compaction", "30 chunks in 3 Puts, a log of 16: compacted, snapshot");
  await call(server.admin, server.admin.clear, ClearRequest.create({ scope: { $case: "namespace", value: namespace } }));
  await until(updates, holds(0));
  row("events: clear", "0 chunks");

  // SIGKILL and another server.
  await server.put(first);
  await until(updates, holds(4));
  const lease = (await session.ask("lookup", LookupRequest.create({ namespace, keys }))).leaseId;
  const epoch = index.cursor!.epoch;
  child.kill("SIGSTOP"); // so that the lookup is under way when the server dies
  const miss = engine.ask("lookup", LookupRequest.create({ namespace, keys }));
  await kill(child);
  await until(updates, (kinds) => kinds.includes("lost"));
  assert.ok(holds(4)()); // as it was
  child = await startServer(address);
  assert.equal((await miss).hitChunks, 0);
  const next = await engine.current();
  assert.notEqual(next.opened.epoch, epoch);
  const gone = (await next.ask("freeLocks", FreeLocksRequest.create({ locks: [LockRange.create({ leaseId: lease })] }))).freed;
  assert.deepEqual(gone, [{ released: 0 }]);
  await server.put(first);
  const again = await until(updates, () => index.cursor?.epoch === next.opened.epoch && holds(4)());
  assert.ok(again.includes("compacted") && again.includes("snapshot"), again.join());
  assert.equal((await next.ask("lookup", LookupRequest.create({ namespace, keys }))).hitChunks, 4);
  row("SIGKILL and restart", "a lookup goes on with a new session: 0 hits; put, 4 hits");
  row("events: new epoch", "compacted, snapshot, 4 chunks");

  await checkExtraKeys(server);
  row("extra keys", "a text, a number, bytes and a tuple are equal in the event");

  stop.abort();
  await updates.return(undefined);
  next.close();
  server.close();
  await kill(child);
}
