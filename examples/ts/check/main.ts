// The command line that tests/clients/interop.py calls.
import { readFileSync, writeFileSync } from "node:fs";
import { checkAll } from "./checks.js";
import { ChunkStatus } from "../gen/kvdock/v1/types.js";
import { KVDock } from "../src/client.js";
import { follow, Index } from "../src/index.js";
import { chunkKeys, type Extra } from "../src/keys.js";

interface Vector {
  name: string; chunk_tokens: number; parent: string; extras: Extra[]; token_ids: number[]; keys: string[];
}

/** Derives the keys of every vector of a file; returns how many there are. */
export function checkKeys(file: string): number {
  const { vectors } = JSON.parse(readFileSync(file, "utf8")) as { vectors: Vector[] };
  for (const v of vectors) {
    const keys = chunkKeys(v.token_ids, v.chunk_tokens, v.extras, Buffer.from(v.parent, "hex"));
    const got = keys.map((key) => key.toString("hex")).join();
    if (got !== v.keys.join()) throw new Error(`vector "${v.name}": ${got}, not ${v.keys.join()}`);
  }
  if (!vectors.length) throw new Error(`${file} has no vector`);
  return vectors.length;
}

/** The lines of a list: key in hexadecimal, a space, the file of the bytes. */
const readList = (file: string) =>
  readFileSync(file, "utf8").split("\n").filter(Boolean).map((line) => {
    const cut = line.indexOf(" ");
    return { key: Buffer.from(line.slice(0, cut), "hex"), path: line.slice(cut + 1) };
  });

async function put(server: KVDock, namespace: string, list: string): Promise<void> {
  const chunks = readList(list);
  const statuses = await server.put({
    namespace, keys: chunks.map(({ key }) => key), bytes: chunks.map(({ path }) => readFileSync(path)),
  });
  const wrong = statuses.findIndex((s) => s !== ChunkStatus.STORED && s !== ChunkStatus.EXISTS);
  if (wrong >= 0) throw new Error(`chunk ${wrong}: ${ChunkStatus[statuses[wrong]!]}`);
}

async function get(server: KVDock, namespace: string, list: string): Promise<void> {
  const chunks = readList(list);
  const bytes = await server.get(namespace, chunks.map(({ key }) => key));
  if (bytes.length < chunks.length) throw new Error(`chunk ${bytes.length} is not there`);
  chunks.forEach(({ path }, i) => writeFileSync(path, bytes[i]!));
}

async function printKeys(server: KVDock, namespace: string, count: number): Promise<void> {
  const index = new Index();
  for await (const _ of follow(server, index, AbortSignal.timeout(60_000))) {
    if (index.cursor && index.keys(namespace).length >= count) break;
  }
  if (index.keys(namespace).length !== count) throw new Error(`${index.keys(namespace).length} chunks`);
  console.log(index.keys(namespace).join("\n"));
}

const [address = "", verb = "", ...rest] = process.argv.slice(2);
if (verb === "check-keys") {
  console.log(`${checkKeys(rest[0]!)} vectors`);
} else if (verb === "all") {
  await checkAll(address);
} else {
  const server = new KVDock(address);
  await server.ready();
  if (verb === "put") await put(server, rest[0]!, rest[1]!);
  else if (verb === "get") await get(server, rest[0]!, rest[1]!);
  else if (verb === "follow") await printKeys(server, rest[0]!, Number(rest[1]));
  else throw new Error(`no verb ${verb}: check-keys, put, get, follow or all`);
  server.close();
}
