// A client whose bytes travel inline, since Node cannot map the pool, and an engine's session.
//
// 64-bit numbers are JavaScript numbers: the server makes its ids below 2^53, and what is larger is
// an error when it is decoded, never a wrong number.
import {
  type CallOptions, type Client, type ClientDuplexStream, type ClientReadableStream, credentials,
  Metadata, type ServiceError, status,
} from "@grpc/grpc-js";
import { once } from "node:events";
import { lstatSync } from "node:fs";
import { AdminServiceClient } from "../gen/kvdock/v1/admin.js";
import {
  CacheServiceClient, GetRequest, type GetResponse, PutOpen, PutRequest, type PutResponse,
  RegisterNamespaceRequest,
} from "../gen/kvdock/v1/cache.js";
import { EventServiceClient } from "../gen/kvdock/v1/events.js";
import {
  OpenRequest, type OpenResponse, SessionRequest, type SessionResponse, SessionRole,
  SessionServiceClient,
} from "../gen/kvdock/v1/session.js";
import { ChunkEventData, ChunkStatus, type Namespace } from "../gen/kvdock/v1/types.js";
import { fromCall, fromSession, KVDockError } from "./errors.js";

const MESSAGE_BYTES = 128 * 1024; // of PutData
const OPEN_BYTES = 2 * 1024 * 1024; // of PutOpen: a message has at most 4 MiB, one chunk's data 1 MiB
const CALL_MS = 30_000;

type Unary<Q, R> = (
  request: Q, metadata: Metadata, options: Partial<CallOptions>,
  callback: (error: ServiceError | null, response: R) => void,
) => unknown;

/** A unary call as a promise. */
export function call<Q, R>(client: Client, method: Unary<Q, R>, request: Q): Promise<R> {
  return new Promise((resolve, reject) => {
    const options = { deadline: Date.now() + CALL_MS };
    method.call(client, request, new Metadata(), options, (error, response) =>
      error ? reject(fromCall(error)) : resolve(response));
  });
}

/** The messages of a stream, which is cancelled when the caller has read enough. */
export async function* read<R>(stream: ClientReadableStream<R> | ClientDuplexStream<never, R>): AsyncGenerator<R> {
  stream.on("error", () => {}); // told by the iterator, and by nobody once that was left
  try {
    for await (const message of stream) yield message as R;
  } catch (error) {
    throw fromCall(error as ServiceError);
  } finally {
    stream.cancel();
  }
}

/** Consecutive chunks of one prompt. */
export interface Chunks {
  namespace: string;
  keys: Buffer[];
  bytes: Buffer[];
  /** Key of the chunk before the first. */
  parent?: Buffer;
  eventData?: ChunkEventData[];
}

export class KVDock {
  readonly admin: AdminServiceClient;
  readonly cache: CacheServiceClient;
  readonly events: EventServiceClient;
  readonly sessions: SessionServiceClient;

  constructor(readonly address: string) {
    // Channels of equal address and options share one connection.
    const options = { "grpc.initial_reconnect_backoff_ms": 100, "grpc.max_reconnect_backoff_ms": 1000 };
    this.admin = new AdminServiceClient(address, credentials.createInsecure(), options);
    this.cache = new CacheServiceClient(address, credentials.createInsecure(), options);
    this.events = new EventServiceClient(address, credentials.createInsecure(), options);
    this.sessions = new SessionServiceClient(address, credentials.createInsecure(), options);
  }

  /** Waits for a server. A Unix socket must be of this user, or of root: another could lie there. */
  async ready(timeoutMs = CALL_MS): Promise<void> {
    await new Promise<void>((resolve, reject) =>
      this.cache.waitForReady(Date.now() + timeoutMs, (error) => (error ? reject(error) : resolve())));
    if (!this.address.startsWith("unix:")) return;
    const owner = lstatSync(this.address.replace(/^unix:(\/\/)?/, "")).uid;
    if (owner !== process.getuid?.() && owner !== 0) throw new Error(`${this.address} is of user ${owner}`);
  }

  close(): void {
    for (const client of [this.admin, this.cache, this.events, this.sessions]) client.close();
  }

  /** Stores the chunks that the server lacks, and tells what became of each. */
  async put(chunks: Chunks): Promise<ChunkStatus[]> {
    const statuses: ChunkStatus[] = [];
    const { keys } = chunks;
    for (let first = 0, end; first < keys.length; first = end) {
      let size = 0; // of the PutOpen: a long prompt is put in several calls, each after the one before
      for (end = first; end < keys.length && (end === first || size < OPEN_BYTES); end++) {
        const data = chunks.eventData?.[end];
        size += 64 + (data ? ChunkEventData.encode(data).finish().length : 0);
      }
      statuses.push(...(await this.putOnce({
        ...chunks,
        parent: first ? keys[first - 1] : chunks.parent,
        keys: keys.slice(first, end),
        bytes: chunks.bytes.slice(first, end),
        eventData: chunks.eventData?.slice(first, end),
      })));
    }
    return statuses;
  }

  private async putOnce({ namespace, keys, bytes, parent, eventData }: Chunks): Promise<ChunkStatus[]> {
    const stream = this.cache.put();
    const send = (message: NonNullable<PutRequest["message"]>) => {
      if (!stream.write(PutRequest.create({ message }))) return once(stream, "drain").catch(() => {});
    };
    const sendBytes = async (admitted: ChunkStatus[]) => {
      for (const [chunk, state] of admitted.entries()) {
        if (state !== ChunkStatus.RESERVED) continue;
        for (let at = 0; at < bytes[chunk]!.length; at += MESSAGE_BYTES) {
          const data = bytes[chunk]!.subarray(at, at + MESSAGE_BYTES);
          await send({ $case: "data", value: { chunk, data } });
        }
      }
      stream.end();
    };
    void send({ $case: "open", value: PutOpen.create({ namespace, keys, parentKey: parent, eventData }) });
    const statuses: ChunkStatus[] = keys.map(() => ChunkStatus.FAILED);
    for await (const { message } of read<PutResponse>(stream as ClientDuplexStream<never, PutResponse>)) {
      if (message?.$case === "admission") void sendBytes(message.value.chunks.map((c) => c.status));
      if (message?.$case === "result") statuses[message.value.chunk] = message.value.status;
    }
    return statuses;
  }

  /** The bytes of the chunks, up to the first that is not there. */
  async get(namespace: string, keys: Buffer[]): Promise<Buffer[]> {
    const pieces: Buffer[][] = [];
    const lengths: number[] = [];
    for await (const m of read<GetResponse>(this.cache.get(GetRequest.create({ namespace, keys })))) {
      if (m.status !== ChunkStatus.RETRIEVED) break;
      (pieces[m.chunk] ??= []).push(m.data);
      lengths[m.chunk] = m.shardBytes;
    }
    const chunks = pieces.map((parts) => Buffer.concat(parts));
    const short = chunks.findIndex((chunk, i) => chunk.length !== lengths[i]);
    if (short >= 0) throw new Error(`chunk ${short}: ${chunks[short]!.length} of ${lengths[short]} bytes`);
    return chunks;
  }
}

type Ask = NonNullable<SessionRequest["request"]>;
type Answer = NonNullable<SessionResponse["response"]>;
type AskOf<K> = Extract<Ask, { $case: K }>["value"];
type AnswerOf<K> = Extract<Answer, { $case: K }>["value"];

/** The session of one process of an engine: what it holds ends with it. */
export class Session {
  opened!: OpenResponse;
  ended = false;
  private readonly waiting = new Map<number, (answer: Answer | KVDockError) => void>();
  private heartbeat?: NodeJS.Timeout;
  private lastId = 0;

  private constructor(private readonly stream: ClientDuplexStream<SessionRequest, SessionResponse>) {
    stream.on("data", ({ id, response }: SessionResponse) => response && this.settle(id, response));
    const end = (error: KVDockError) => {
      this.ended = true;
      clearInterval(this.heartbeat);
      for (const id of [...this.waiting.keys()]) this.settle(id, error);
    };
    stream.on("error", (error) => end(fromCall(error as ServiceError)));
    stream.on("end", () => end(new KVDockError(status.CANCELLED, "", "the session's stream ended")));
  }

  static async open(server: KVDock, who: Partial<OpenRequest>): Promise<Session> {
    const session = new Session(server.sessions.session());
    session.opened = await session.ask("open", OpenRequest.create(who));
    session.heartbeat = setInterval(
      () => void session.ask("heartbeat", {}).catch(() => session.close()), session.opened.ttlMs / 3);
    return session;
  }

  /** Sends one request and waits for its answer. */
  async ask<K extends Ask["$case"]>(kind: K, value: AskOf<K>): Promise<AnswerOf<K>> {
    const id = ++this.lastId;
    const answer = await new Promise<Answer | KVDockError>((resolve) => {
      const late = setTimeout(
        () => this.settle(id, new KVDockError(status.DEADLINE_EXCEEDED, "", `no answer to ${kind}`)), CALL_MS);
      this.waiting.set(id, (outcome) => (clearTimeout(late), resolve(outcome)));
      if (this.ended) this.settle(id, new KVDockError(status.UNAVAILABLE, "", "the session has ended"));
      else this.stream.write(SessionRequest.create({ id, request: { $case: kind, value } as Ask }));
    });
    if (answer instanceof KVDockError) throw answer;
    if (answer.$case === "error") throw fromSession(answer.value);
    return answer.value as AnswerOf<K>;
  }

  close(): void {
    this.stream.end();
  }

  private settle(id: number, answer: Answer | KVDockError): void {
    const settle = this.waiting.get(id);
    this.waiting.delete(id);
    settle?.(answer);
  }
}

/** A scheduler's session that is opened anew, and its namespace with it, when the server is another. */
export class Engine {
  private session?: Promise<Session>;
  constructor(readonly server: KVDock, readonly id: string, readonly namespace: Namespace) {}

  /** An open session, with the namespace registered. */
  async current(): Promise<Session> {
    const known = await this.session?.catch(() => undefined);
    if (!known || known.ended) this.session = this.open();
    return this.session!;
  }

  /** Asks once more after the session was lost, or the namespace: for what may be repeated. */
  async ask<K extends "lookup" | "freeLocks">(kind: K, value: AskOf<K>): Promise<AnswerOf<K>> {
    const session = await this.current();
    try {
      return await session.ask(kind, value);
    } catch (error) {
      const lost = ["UNKNOWN_NAMESPACE", "SESSION_EXPIRED"].includes((error as KVDockError).reason);
      if (!lost && !session.ended) throw error;
      session.close();
      this.session = this.open();
      return (await this.session).ask(kind, value);
    }
  }

  private async open(): Promise<Session> {
    await this.server.ready();
    const who = { engineId: this.id, role: SessionRole.SCHEDULER, client: "kvdock-typescript" };
    const session = await Session.open(this.server, who);
    await session.ask("registerNamespace", RegisterNamespaceRequest.create({ namespace: this.namespace }));
    return session;
  }
}
