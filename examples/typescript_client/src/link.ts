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

/** There is no work now; repeat the request later. */
export interface Idle {
  readonly retryAfterS: number;
}

export type Assignment = AlphaAssignment | LossesAssignment;

/** Required keys of a response, with the types of their values. */
type Keys = Record<string, "string" | "number">;

type Options = Omit<Request, "method" | "path" | "token" | "clientId">;

/** Time limit of the gateway, seconds; the assignment's deadline is usually earlier. */
const SCORE_S = 600;

/** The requests of one device. Requests with temporary failures are repeated. */
export class Link {
  #down = false;

  /**
   * @param transport Sends requests to the server.
   * @param identity The client's identity.
   * @param token Enrolment token; not needed if the device has an identity.
   * @param name The device's name for people.
   * @param clock Measures the waits between attempts.
   * @param tell Called after the enrolment, and when the server becomes unreachable or reachable.
   */
  constructor(
    readonly transport: Transport,
    readonly identity: Identity,
    readonly token: string | undefined,
    readonly name: string | undefined,
    readonly clock: Clock,
    readonly tell: OnEvent,
  ) {}

  /** Whether the last request got a response. */
  get online(): boolean {
    return !this.#down;
  }

  /** Whether a device with a rejected identity can enrol again. */
  get mayEnrolAgain(): boolean {
    return this.token !== undefined && this.identity.credential !== undefined;
  }

  /**
   * Enrols the device if it has no identity.
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

  /** Requests work. */
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

  /** Fetches a run's task and settings. */
  async task(runId: string, signal?: AbortSignal): Promise<Run> {
    return readRun((await this.#call("GET", `/v1/runs/${runId}/task`, { signal })).text);
  }

  /** Fetches a run's candidates, or only those that were added after the version `after`. */
  async vocabulary(runId: string, after: number, signal?: AbortSignal): Promise<VocabularyList> {
    const path = `/v1/runs/${runId}/vocabulary${after > 0 ? `?after=${after}` : ""}`;
    return read<VocabularyList>(await this.#call("GET", path, { signal }), {});
  }

  /** Requests scores from the gateway. */
  score(message: Score, signal?: AbortSignal): Promise<Scores> {
    return this.gateway("score", message, { model: "string" }, signal);
  }

  /** Sends a request to the gateway's model. */
  async gateway<T>(name: string, message: object, keys: Keys, signal?: AbortSignal): Promise<T> {
    const body = JSON.stringify(message);
    const reply = await this.#call("POST", `/v1/${name}`, { body, patienceS: SCORE_S, signal });
    return read<T>(reply, keys);
  }

  /** Sends a finished update. */
  async update({ assignmentId, body }: Unsent, signal?: AbortSignal): Promise<void> {
    const path = `/v1/assignments/${assignmentId}/update`;
    read(await this.#call("POST", path, { body, signal }), { body_sha256: "string" });
  }

  /** Requests another deadline. */
  async renew(assignmentId: string, signal?: AbortSignal): Promise<Renewal> {
    const reply = await this.#call("POST", `/v1/assignments/${assignmentId}/renew`, { signal });
    return read<Renewal>(reply, { deadline_s: "number" });
  }

  /** Declines work. */
  async decline(assignmentId: string, message: Decline, signal?: AbortSignal): Promise<void> {
    const body = JSON.stringify(message);
    await this.#call("POST", `/v1/assignments/${assignmentId}/decline`, { body, signal });
  }

  /** Reports once that the server cannot be reached. */
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
 * Returns the message in a response.
 *
 * @param keys Required keys, with the types of their values.
 * @throws MessageError The response is not such a message.
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
