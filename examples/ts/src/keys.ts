// Keys of chunks: docs/keys.md in TypeScript.
import { createHash } from "node:crypto";

/** What a key commits to beside the tokens; the fields are those of docs/key_vectors.json. */
export type Extra =
  | { kind: "lora"; name: string; source: string }
  | { kind: "cache_salt"; salt: string }
  | { kind: "multimodal_item"; identifier: string; offset: number; length: number }
  | { kind: "prompt_embeds"; digest: string; offset: number; length: number };

export const NO_PARENT = Buffer.alloc(32);

const u32 = (number: number): Buffer => {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32LE(number); // a RangeError for what is no u32
  return bytes;
};

const i64 = (number: number): Buffer => {
  const bytes = Buffer.alloc(8);
  bytes.writeBigInt64LE(BigInt(number));
  return bytes;
};

const text = (string: string): Buffer => {
  const bytes = Buffer.from(string, "utf8");
  // Half a surrogate pair has no UTF-8. Node would replace it, and two names would encode alike.
  if (bytes.toString("utf8") !== string) throw new RangeError(`no UTF-8 for ${JSON.stringify(string)}`);
  return Buffer.concat([u32(bytes.length), bytes]);
};

const record = (tag: number, ...payload: Buffer[]): Buffer => {
  const joined = Buffer.concat(payload);
  return Buffer.concat([Buffer.of(tag), u32(joined.length), joined]);
};

/** The record of an extra in the chunk of the tokens [start, end), or nothing. */
function recordInChunk(extra: Extra, start: number, end: number, first: boolean): Buffer | undefined {
  switch (extra.kind) {
    case "lora":
      return first ? record(1, text(extra.name), text(extra.source)) : undefined;
    case "cache_salt":
      return first ? record(2, text(extra.salt)) : undefined;
  }
  if (extra.offset >= end || extra.offset + extra.length <= start) return undefined;
  const place = Buffer.concat([i64(extra.offset - start), u32(extra.length)]);
  return extra.kind === "multimodal_item"
    ? record(3, place, text(extra.identifier))
    : record(4, place, Buffer.from(extra.digest, "hex"));
}

/** The keys of all full chunks of tokenIds, which follow the chunk with the key parent. */
export function chunkKeys(
  tokenIds: readonly number[],
  chunkTokens: number,
  extras: readonly Extra[] = [],
  parent: Buffer = NO_PARENT,
): Buffer[] {
  const keys: Buffer[] = [];
  for (let start = 0; start + chunkTokens <= tokenIds.length; start += chunkTokens) {
    const end = start + chunkTokens;
    const first = parent.equals(NO_PARENT);
    const records = extras
      .map((extra) => recordInChunk(extra, start, end, first))
      .filter((bytes) => bytes !== undefined)
      .sort(Buffer.compare)
      .filter((bytes, i, all) => i === 0 || !bytes.equals(all[i - 1]!));
    const hash = createHash("sha256").update(parent).update(u32(chunkTokens));
    for (const id of tokenIds.slice(start, end)) hash.update(u32(id));
    for (const bytes of records) hash.update(bytes);
    keys.push((parent = hash.digest()));
  }
  return keys;
}
