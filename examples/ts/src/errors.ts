// Errors of calls and of session requests, with the reason that a program may act upon.
import { type ServiceError, status } from "@grpc/grpc-js";
import { ErrorInfo } from "../gen/google/rpc/error_details.js";
import { Status } from "../gen/google/rpc/status.js";
import { type Error as SessionError } from "../gen/kvdock/v1/types.js";

export class KVDockError extends Error {
  override name = "KVDockError";
  constructor(
    readonly code: status,
    /** A name of ErrorReason in types.proto, or "" if the server said none. */
    readonly reason: string,
    message: string,
  ) {
    super(`${status[code]}${reason && ` (${reason})`}: ${message}`);
  }
}

/** The reason in the google.rpc.Status that a failed call has among its trailers. */
function reasonOf(error: ServiceError): string {
  const raw = error.metadata?.get("grpc-status-details-bin")[0];
  if (!Buffer.isBuffer(raw)) return "";
  const infos = Status.decode(raw).details
    .filter((any) => any.typeUrl === "type.googleapis.com/google.rpc.ErrorInfo")
    .map((any) => ErrorInfo.decode(any.value));
  return infos.find((info) => info.domain === "kvdock")?.reason ?? "";
}

export const fromCall = (error: ServiceError): KVDockError =>
  new KVDockError(error.code ?? status.UNKNOWN, reasonOf(error), error.details ?? error.message);

export const fromSession = (error: SessionError): KVDockError =>
  new KVDockError(error.code, error.reason, error.message);
