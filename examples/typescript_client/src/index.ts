export type { Backend, Input, ModelAnswer, ModelQuery, Part } from "./backend.js";
export type { BeforeSend } from "./batch.js";
export { EdgeClient } from "./client.js";
export type { Outcome, RunOnceOptions, Status } from "./client.js";
export { systemClock } from "./clock.js";
export type { Clock } from "./clock.js";
export {
  ArgumentError,
  FedOneError,
  MessageError,
  ProblemError,
  TransportError,
  UnsupportedError,
} from "./errors.js";
export type { ClientEvent, OnEvent, WorkFacts } from "./events.js";
export type { EdgeClientOptions } from "./options.js";
export type { Score, ScoreFunction } from "./loss.js";
export type * as messages from "./messages.js";
export type { RequiredPrivacy, WorkPolicy } from "./policy.js";
export type { Random } from "./random.js";
export { MemoryStorage } from "./state.js";
export type { EdgeStorage } from "./state.js";
export type { Example } from "./task.js";
export type { Fetch } from "./transport.js";
