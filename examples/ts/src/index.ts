// What a router keeps of a server: an index of its chunks, and the stream of events that feeds it.
import { status } from "@grpc/grpc-js";
import { setTimeout as sleep } from "node:timers/promises";
import { type Cursor, type Event, StreamKVEventsRequest, type StreamKVEventsResponse } from "../gen/kvdock/v1/events.js";
import { GroupKind } from "../gen/kvdock/v1/types.js";
import { type KVDock, read } from "./client.js";
import { KVDockError } from "./errors.js";

/** Namespace, then key in hexadecimal, then the groups and media on which that chunk is. */
type Parts = Map<string, Map<string, Set<string>>>;

/** A message does not follow what the index has: only a snapshot helps. */
export class Gap extends Error {}

export class Index {
  /** Up to where the index is true. Absent: it needs a snapshot. */
  cursor?: Cursor;
  private parts: Parts = new Map();
  private incoming?: { cursor: Cursor; parts: Parts };

  /** Where a stream for this index begins. */
  get start(): StreamKVEventsRequest["start"] {
    return this.cursor ? { $case: "after", value: this.cursor } : { $case: "snapshot", value: {} };
  }

  /** How many of the prompt's chunks are there from the first on, in any group, on any medium. */
  prefix(namespace: string, keys: readonly Buffer[]): number {
    const missing = keys.findIndex((key) => !this.parts.get(namespace)?.has(key.toString("hex")));
    return missing < 0 ? keys.length : missing;
  }

  keys(namespace: string): string[] {
    return [...(this.parts.get(namespace)?.keys() ?? [])].sort();
  }

  /** Takes in a message of a stream that began at start, and says which kind it was. */
  feed({ cursor, message }: StreamKVEventsResponse): string {
    if (!cursor) throw new Gap("a message without cursor");
    if (message?.$case === "compacted") {
      this.cursor = this.incoming = undefined;
      return "compacted";
    }
    if (message?.$case === "snapshot") {
      this.incoming ??= { cursor, parts: new Map() }; // all pieces are true for one cursor
      if (!same(cursor, this.incoming.cursor)) throw new Gap("pieces of two snapshots");
      for (const event of message.value.stored) apply(this.incoming.parts, event);
      if (message.value.last) {
        ({ cursor: this.cursor, parts: this.parts } = this.incoming);
        this.incoming = undefined;
      }
      return "snapshot";
    }
    if (!this.cursor || this.cursor.epoch !== cursor.epoch) throw new Gap("events of another epoch");
    if (message?.$case === "batch") {
      for (const event of message.value.events) {
        // Numbers grow, not always by one: parts on other hosts are told only to those who ask for them.
        if (event.sequence <= this.cursor.sequence) throw new Gap(`${event.sequence} after ${this.cursor.sequence}`);
        apply(this.parts, event);
        this.cursor = { epoch: cursor.epoch, sequence: event.sequence };
      }
    }
    if (cursor.sequence < this.cursor.sequence) throw new Gap(`at ${this.cursor.sequence}, told ${cursor.sequence}`);
    this.cursor = cursor;
    return message?.$case ?? "unknown";
  }

  /** A stream ended: a snapshot that is not complete is worth nothing. */
  cut(error?: unknown): void {
    this.incoming = undefined;
    if (error instanceof Gap) this.cursor = undefined;
  }
}

const same = (a: Cursor, b: Cursor): boolean => a.epoch === b.epoch && a.sequence === b.sequence;

function apply(parts: Parts, { namespace, event }: Event): void {
  if (event?.$case === "cleared") parts.delete(namespace);
  if (event?.$case !== "stored" && event?.$case !== "removed") return; // of an unknown event only its number counts
  const { key, groupIdx, medium } = event.value;
  const [chunk, place] = [key.toString("hex"), `${groupIdx}/${medium}`];
  const chunks = parts.get(namespace) ?? new Map<string, Set<string>>();
  const places = chunks.get(chunk) ?? new Set<string>();
  if (event.$case === "stored") {
    const parent = event.value.parentKey.toString("hex");
    if (parent && event.value.kind === GroupKind.FULL_ATTENTION && !chunks.get(parent)?.has(place)) throw new Gap(`${chunk} before its parent`);
    parts.set(namespace, chunks.set(chunk, places.add(place)));
  } else {
    if (!places.delete(place)) throw new Gap(`${chunk} removed and never stored`);
    if (!places.size) chunks.delete(chunk);
  }
}

/**
 * Follows a server's events until signal: snapshot, resume, compaction, a new epoch. Yields the kind of
 * each message that the index took in, and "lost" when there is no stream; it goes on trying.
 */
export async function* follow(
  server: KVDock, index: Index, signal: AbortSignal, quietMs = 1000,
): AsyncGenerator<string> {
  while (!signal.aborted) {
    const request = StreamKVEventsRequest.create({ start: index.start, progressIntervalMs: quietMs });
    const stream = server.events.streamKvEvents(request);
    const cancel = () => stream.cancel();
    signal.addEventListener("abort", cancel);
    let dead = setTimeout(cancel, 3 * quietMs); // a server that says nothing for so long is lost
    try {
      for await (const message of read<StreamKVEventsResponse>(stream)) {
        clearTimeout(dead);
        yield index.feed(message);
        dead = setTimeout(cancel, 3 * quietMs);
      }
      index.cut();
    } catch (error) {
      index.cut(error);
      const final = [status.INVALID_ARGUMENT, status.UNIMPLEMENTED, status.PERMISSION_DENIED];
      if (error instanceof KVDockError ? final.includes(error.code) : !(error instanceof Gap)) throw error;
      if (signal.aborted) return;
      yield "lost";
      await sleep(100);
    } finally {
      clearTimeout(dead);
      signal.removeEventListener("abort", cancel);
    }
  }
}
