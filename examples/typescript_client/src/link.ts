import type { Clock } from "./clock.js";
import { ArgumentError, MessageError, ProblemError, TransportError } from "./errors.js";
import type { OnEvent } from "./events.js";
import type {
  AlphaAssignment,
  Claim,
  Decline,
  Enrol,
  Enrolled,
  LossesAssignment,
  Renewal,
  Score,
  Scores,
  VocabularyList,
} from "./messages.js";
import type { Identity, Unsent } from "./state.js";
import { persist } from "./patience.js";
import { readRun } from "./task.js";
import type { Run } from "./task.js";
import type { Reply, Request, Transport } from "./transport.js";

/** There is no work now; ask again later. */
export interface Idle {
  readonly retryAfterS: number;
}

export type Assignment = AlphaAssignment | LossesAssignment;

/** Keys that an answer must have, and the types of their values. */
type Keys = Record<string, "string" | "number">;

type Options = Omit<Request, "method" | "path" | "token" | "clientId">;

/** The gateway's model takes its time; the assignment's own deadline bounds it. */
const SCORE_S = 600;

/** The calls of one device, repeated while they fail for reasons that pass. */
export class Link {
  #down = false;

  /**
   * @param transport Reaches the server.
   * @param identity The client's identity.
   * @param token Enrols the device; undefined where it has an identity.
   * @param name What people may call the device.
   * @param clock Measures the waits between attempts.
   * @param tell Told of the enrolment, and when the line goes down or comes up.
   */
  constructor(
    readonly transport: Transport,
    readonly identity: Identity,
    readonly token: string | undefined,
    readonly name: string | undefined,
    readonly clock: Clock,
    readonly tell: OnEvent,
  ) {}

  /** Whether the last call was answered. */
  get online(): boolean {
    return !this.#down;
  }

  /** Whether a device whose identity is refused can get another. */
  get mayEnrolAgain(): boolean {
    return this.token !== undefined && this.identity.credential !== undefined;
  }

  /**
   * Makes sure that the device has an identity.
   *
   * @throws ArgumentError There is neither an identity nor a token, or the URL has no enrolment.
   * @throws ProblemError The token is not valid.
   */
  async enrol(signal?: AbortSignal): Promise<void> {
    await this.identity.load();
    if (this.identity.credential !== undefined) return;
    const token = this.token;
    if (token === undefined) {
      throw new ArgumentError("token: is required until the device has enrolled");
    }
    const message: Enrol = {
      name: this.name ?? null,
      nonce: await this.identity.nonce(),
    };
    const body = JSON.stringify(message);
    const request: Request = { method: "POST", path: "/v1/clients", token, body, signal };
    const reply = await this.#persist(request).catch((error) => {
      if (!(error instanceof ProblemError) || error.code !== "not_found") throw error;
      throw new ArgumentError(
        `server: ${this.identity.server} is not an aggregator's base URL: ${error.detail}`,
      );
    });
    const enrolled = read<Enrolled>(reply, { client_id: "string", credential: "string" });
    await this.identity.enrolled(enrolled);
    this.tell({ kind: "enrolled" });
  }

  /** Asks for work. */
  async claim(message: Claim, signal?: AbortSignal): Promise<Assignment | Idle> {
    const body = JSON.stringify(message);
    const patienceS = message.wait_s ?? 0;
    const options = { body, patienceS, signal };
    const reply = await this.#call("POST", "/v1/assignments/claim", options);
    if (reply.status === 204) return { retryAfterS: reply.retryAfterS ?? 1 };
    const found = read<Assignment>(reply, {
      assignment_id: "string",
      run_id: "string",
      round: "number",
      deadline_s: "number",
    });
    return found;
  }

  /** Fetches what must be known of a run. */
  async task(runId: string, signal?: AbortSignal): Promise<Run> {
    return readRun((await this.#call("GET", `/v1/runs/${runId}/task`, { signal })).text);
  }

  /** Fetches a run's candidates; with a version of them, those that were added since. */
  async vocabulary(runId: string, after: number, signal?: AbortSignal): Promise<VocabularyList> {
    const path = `/v1/runs/${runId}/vocabulary${after > 0 ? `?after=${after}` : ""}`;
    return read<VocabularyList>(await this.#call("GET", path, { signal }), {});
  }

  /** Asks the gateway for scores. */
  score(message: Score, signal?: AbortSignal): Promise<Scores> {
    return this.gateway("score", message, { model: "string" }, signal);
  }

  /** Asks the gateway's model. */
  async gateway<T>(name: string, message: object, keys: Keys, signal?: AbortSignal): Promise<T> {
    const body = JSON.stringify(message);
    const reply = await this.#call("POST", `/v1/${name}`, { body, patienceS: SCORE_S, signal });
    return read<T>(reply, keys);
  }

  /** Returns finished work. */
  async update({ assignmentId, body }: Unsent, signal?: AbortSignal): Promise<void> {
    const path = `/v1/assignments/${assignmentId}/update`;
    read(await this.#call("POST", path, { body, signal }), { body_sha256: "string" });
  }

  /** Asks for another deadline. */
  async renew(assignmentId: string, signal?: AbortSignal): Promise<Renewal> {
    const reply = await this.#call("POST", `/v1/assignments/${assignmentId}/renew`, { signal });
    return read<Renewal>(reply, { deadline_s: "number" });
  }

  /** Gives work back. */
  async decline(assignmentId: string, message: Decline, signal?: AbortSignal): Promise<void> {
    const body = JSON.stringify(message);
    await this.#call("POST", `/v1/assignments/${assignmentId}/decline`, { body, signal });
  }

  /** Says that the server cannot be reached, if it was not said yet. */
  isDown(error: unknown): void {
    if (this.#down) return;
    this.#down = true;
    this.tell({ kind: "offline", reason: String(error) });
  }

  #call(method: "GET" | "POST", path: string, options: Options): Promise<Reply> {
    return this.#persist({ method, path, token: this.identity.credential ?? "", ...options });
  }

  async #persist(request: Request): Promise<Reply> {
    const failed = (error: unknown): void => {
      if (error instanceof TransportError || error instanceof MessageError) this.isDown(error);
    };
    const send = (): Promise<Reply> => this.transport.send(request);
    const reply = await persist(send, this.clock, request.signal, failed);
    if (this.#down) {
      this.#down = false;
      this.tell({ kind: "online" });
    }
    return reply;
  }
}

/**
 * The message of an answer.
 *
 * @param keys Keys that it must have, and the types of their values.
 * @throws MessageError It is none.
 */
function read<T>({ text }: Reply, keys: Keys): T {
  let found: Record<string, unknown> | null;
  try {
    found = JSON.parse(text);
  } catch {
    found = null;
  }
  if (found === null || typeof found !== "object") {
    throw new MessageError("the aggregator's answer is malformed: it is no JSON object");
  }
  for (const [key, type] of Object.entries(keys)) {
    if (typeof found[key] !== type) {
      throw new MessageError(`the aggregator's answer is malformed: ${key}: must be a ${type}`);
    }
  }
  return found as T;
}
