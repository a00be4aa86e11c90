import type { Backend } from "./backend.js";
import { systemClock } from "./clock.js";
import type { Clock } from "./clock.js";
import { Consent, WITHHELD } from "./consent.js";
import type { Admitted } from "./consent.js";
import {
  ArgumentError,
  askedS,
  Declining,
  FedOneError,
  isRefusal,
  isRetryable,
  kindOf,
  MessageError,
  ProblemError,
  PutOff,
  RefusedBetween,
  Stopped,
  TransportError,
  UnsupportedError,
  Withheld,
} from "./errors.js";
import type { ClientEvent, WorkFacts } from "./events.js";
import { KnownRuns } from "./known.js";
import { keepLease } from "./lease.js";
import { Link } from "./link.js";
import type { Assignment } from "./link.js";
import type { LossesAssignment } from "./messages.js";
import { check } from "./options.js";
import type { EdgeClientOptions } from "./options.js";
import { gatewayOracle, ownOracle } from "./oracle.js";
import type { Oracle } from "./oracle.js";
import { Backoff, MAX_WAIT_S, PATIENCE_S } from "./patience.js";
import { Account } from "./policy.js";
import { platformRandom } from "./random.js";
import type { Random } from "./random.js";
import { CurrentWork, Identity } from "./state.js";
import type { Unsent } from "./state.js";
import { mismatch } from "./step.js";
import type { Example, Run } from "./task.js";
import { Transport } from "./transport.js";
import { Ending, guarded, raced } from "./waits.js";
import type { Ask } from "./waits.js";
import { checkedPrompts, lossesUpdate } from "./work.js";

/**
 * The outcome of a turn. `worked`: an update was accepted. `declined`: the work was declined.
 * `refused`: the update was too late, or the run uses another model. `idle`: there was no work.
 * `paused`: the app's condition is false. `offline`: the server was not reached. `ended`: no more
 * work will come. `stopped`: the signal was aborted.
 */
export type Outcome =
  "worked" | "declined" | "refused" | "idle" | "paused" | "offline" | "ended" | "stopped";

/** The state of a client. */
export interface Status {
  /** The device's public name; undefined until it has enrolled. */
  readonly clientId?: string;
  /** Whether the last request reached the server. */
  readonly online: boolean;
  /** Whether a finished update is not sent yet. */
  readonly unsent: boolean;
  /** The current work, with the number of scored prompts and of all prompts. */
  readonly work?: WorkFacts & { readonly done: number; readonly total: number };
  /** The outcome of the last turn. */
  readonly outcome?: Outcome;
  /** The sum of epsilon so far; undefined unless `policy` requires privacy. */
  readonly epsilon?: number;
  /** The wait before the next turn, seconds. */
  readonly nextTurnS: number;
}

/** Interval between two checks of a condition that is false, seconds. */
const CONDITION_POLL_S = 10;

/** Maximum time that a request for work may stay open, seconds. */
const MAX_CLAIM_S = 60;

/** The same time in `run`, seconds. */
const CLAIM_S = 25;

/** Refusals after which nothing is declined: the work has ended, or is kept during a pause. */
const NOT_DECLINED = [
  "assignment_expired",
  "model_mismatch",
  "run_conflict",
  "unauthorized",
  "update_conflict",
];

/**
 * A device that takes part in prompt tuning with its own labelled texts.
 *
 * By default the texts of a mini-batch are sent to the gateway; `beforeSend` receives each text
 * first. Labels are not sent, but the server can compute them from exact losses. The client
 * declines a run that renders a column outside `fields`, or has another label column or other
 * labels. It supports only the exchange `losses`, and not `alpha`.
 *
 * @example
 * const client = new EdgeClient({ server, token, data: examples, storage });
 * await client.run({ signal });
 */
export class EdgeClient {
  readonly #options: EdgeClientOptions;
  readonly #clock: Clock;
  readonly #random: () => Random;
  readonly #link: Link;
  readonly #current: CurrentWork;
  readonly #account: Account;
  readonly #consent: Consent;
  /** Runs that do not fit the examples. */
  readonly #unfit = new Map<string, Run>();
  readonly #known: KnownRuns;
  readonly #backoff = new Backoff();
  /** Fingerprint of the model on the device, after its first answer. */
  #model: string | undefined;
  /** Whether more runs may fit the device than at its last request for work. */
  #changed = true;
  #held = true;
  #work: Status["work"];
  #outcome: Outcome | undefined;
  #nextTurnS = 0;
  #turns: Promise<unknown> = Promise.resolve();
  /** The signal of the current turn. */
  #signal: AbortSignal | undefined;
  /** Calls a function of the app; the call ends with the turn. */
  readonly #ask: Ask;

  /** @throws ArgumentError An argument cannot be used. */
  constructor(options: EdgeClientOptions) {
    check(options);
    const { timeoutS = 30 } = options;
    const server = `${options.server}`.replace(/\/+$/, "");
    this.#options = options;
    this.#ask = (what, call) => raced(what, call, { signal: this.#signal, seconds: timeoutS });
    const storage = guarded(options.storage, this.#ask);
    const clock = options.clock ?? systemClock;
    this.#clock = {
      now: () => clock.now(),
      sleep: (seconds, signal) => raced("sleep", () => clock.sleep(seconds, signal), { signal }),
    };
    this.#random = () => options.random ?? platformRandom();
    const fetch = options.fetch ?? ((url, init) => globalThis.fetch(url, init));
    const tell = (event: ClientEvent): void => void this.#tell(event);
    this.#link = new Link(
      new Transport(server, fetch, timeoutS),
      new Identity(storage, server, this.#random),
      options.token?.trim(),
      options.name,
      this.#clock,
      tell,
    );
    this.#current = new CurrentWork(storage, server);
    const { policy = {}, backend } = options;
    this.#account = new Account(storage, policy, backend !== undefined);
    this.#consent = new Consent(options, policy.labels, policy.privacy !== undefined);
    this.#known = new KnownRuns(this.#link);
  }

  /**
   * Works until the server's runs have ended, or the signal is aborted. Meanwhile the server may
   * restart or be unreachable.
   *
   * @param options.signal Stops the client at once; its current work continues at the next start.
   * @throws ProblemError The server rejects this device, or this version of the client.
   * @throws ArgumentError There is neither an identity nor a token.
   * @throws UnsupportedError The run of `runId` needs a feature that this client does not have.
   */
  async run({ signal }: { signal?: AbortSignal } = {}): Promise<void> {
    for (;;) {
      const outcome = await this.runOnce({ waitS: CLAIM_S, ...(signal && { signal }) });
      if (outcome === "ended" || outcome === "stopped") return;
      try {
        await this.#clock.sleep(this.#nextTurnS, signal);
      } catch (error) {
        if (error instanceof Stopped) return;
        throw error;
      }
    }
  }

  /**
   * Sends an unsent update, requests work once, and does it: for apps that the system wakes.
   *
   * @param options.waitS How long the request for work may stay open, seconds, from 0 to 60.
   * @param options.signal Stops the turn at once; finished parts are kept.
   * @returns The outcome; `status().nextTurnS` is the wait before the next turn.
   * @throws Error As `run`.
   */
  async runOnce({ waitS = 0, signal }: RunOnceOptions = {}): Promise<Outcome> {
    if (!(waitS >= 0 && waitS <= MAX_CLAIM_S)) {
      throw new ArgumentError(`waitS: must be from 0 to ${MAX_CLAIM_S} seconds (got ${waitS})`);
    }
    const before = this.#turns;
    const turn = raced("a turn", () => before, { signal }).then(
      () => this.#counted(waitS, signal),
      () => "stopped" as const,
    );
    this.#turns = Promise.allSettled([before, turn]);
    return turn;
  }

  /** The state of the client. */
  status(): Status {
    const { clientId } = this.#link.identity;
    const { epsilon } = this.#account;
    return {
      online: this.#link.online,
      unsent: this.#current.unsent !== undefined,
      nextTurnS: this.#nextTurnS,
      ...(clientId !== undefined && { clientId }),
      ...(this.#work && { work: this.#work }),
      ...(this.#outcome && { outcome: this.#outcome }),
      ...(epsilon !== undefined && { epsilon }),
    };
  }

  // Turns

  async #counted(waitS: number, signal: AbortSignal | undefined): Promise<Outcome> {
    this.#nextTurnS = 0;
    this.#signal = signal;
    let outcome: Outcome;
    try {
      outcome = await this.#turn(waitS, signal).catch((error) => this.#refusedDevice(error));
    } catch (error) {
      outcome = this.#brokenOff(error);
    } finally {
      this.#work = undefined;
    }
    if (outcome === "declined" || outcome === "refused") this.#nextTurnS = this.#backoff.nextS();
    if (outcome === "paused") this.#nextTurnS = CONDITION_POLL_S;
    if (outcome === "ended") this.#tell({ kind: "ended" });
    this.#outcome = outcome;
    return outcome;
  }

  /** Enrols as a new device if the server has lost its clients, or has revoked this device. */
  async #refusedDevice(error: unknown): Promise<Outcome> {
    const isUnknown = error instanceof ProblemError && error.code === "unauthorized";
    if (!isUnknown || !this.#link.mayEnrolAgain) throw error;
    await this.#link.identity.forget();
    await this.#current.clear();
    this.#known.forget();
    this.#nextTurnS = this.#backoff.nextS();
    return "idle";
  }

  /** Returns the outcome for an error that ends a turn; throws an error that ends the client. */
  #brokenOff(error: unknown): Outcome {
    if (error instanceof Stopped) return "stopped";
    if (error instanceof PutOff) return "paused";
    const passes =
      (error instanceof ProblemError && isRetryable(error)) ||
      error instanceof TransportError ||
      error instanceof MessageError;
    if (!passes) throw error;
    // For example, the response is the login page of a hotel's network: offline.
    this.#link.isDown(error);
    this.#nextTurnS = this.#backoff.nextS(askedS(error));
    return "offline";
  }

  async #turn(waitS: number, signal: AbortSignal | undefined): Promise<Outcome> {
    if (!(await this.#holds())) return "paused";
    await this.#account.load();
    await this.#link.enrol(signal);
    await this.#handInWaiting(signal);
    const { data, runId, backend } = this.#options;
    const held = typeof data === "function" ? await this.#ask("data", data) : data;
    if (!Array.isArray(held)) throw new ArgumentError("data: is not an array");
    if (held.length === 0) {
      this.#nextTurnS = CLAIM_S;
      return "idle";
    }
    for (const [unfit, run] of this.#unfit) {
      if (this.#admit(run, held).refusal !== undefined) continue;
      this.#unfit.delete(unfit);
      this.#changed = true;
    }
    const claim = async (wait_s: number) => {
      if (this.#link.online) this.#tell({ kind: "waiting" });
      const own = { ...(backend && { own_model: true }), ...(this.#changed && { changed: true }) };
      const numExamples = this.#consent.isPrivate ? 1 : held.length;
      const message = { num_examples: numExamples, wait_s, run_id: runId ?? null, ...own };
      const found = await this.#link.claim(message, signal);
      this.#changed = false;
      return found;
    };
    let claimed;
    try {
      // After an outage the first request does not wait, so that its response comes immediately.
      const isBack = waitS > 0 && !this.#link.online;
      claimed = await claim(isBack ? 0 : waitS);
      if (isBack && "retryAfterS" in claimed) claimed = await claim(waitS);
    } catch (error) {
      if (error instanceof ProblemError && error.code === "run_ended") return "ended";
      throw error;
    }
    if ("retryAfterS" in claimed) {
      this.#backoff.reset();
      this.#nextTurnS = Math.min(claimed.retryAfterS, MAX_WAIT_S);
      this.#tell({ kind: "waiting", retryAfterS: this.#nextTurnS });
      return "idle";
    }
    return this.#do(claimed, held, signal);
  }

  // Work

  async #do(
    assignment: Assignment,
    held: readonly Example[],
    signal: AbortSignal | undefined,
  ): Promise<Outcome> {
    const { assignment_id: assignmentId, run_id: runId, round } = assignment;
    const facts: WorkFacts = { runId, assignmentId, round };
    this.#tell({ kind: "assigned", ...facts });
    if (assignment.exchange !== "losses") return this.#unsupported(facts, signal);
    const renew = (ended: AbortSignal) => this.#link.renew(assignmentId, ended);
    // Ends all waits of the work when the turn ends, or at the deadline of the seat.
    const work = new Ending(signal);
    const endLease = keepLease(assignment.deadline_s, renew, this.#clock, work.stop);
    try {
      let unsent: Unsent;
      try {
        unsent = await this.#done(assignment, held, facts, work.signal);
      } catch (error) {
        const failure = this.#late(error);
        if (isNotDeclined(failure)) throw failure;
        return await this.#declined(facts, failure, signal);
      }
      // Stored before it is sent.
      if (unsent !== this.#current.unsent) await this.#current.put(unsent);
      const outcome = await this.#handIn(unsent, signal);
      if (outcome === "worked") this.#backoff.reset();
      return outcome;
    } catch (error) {
      if (!isRefusal(error) || error.code === "unauthorized") throw error;
      if (error.code === "model_mismatch") this.#known.forget();
      if (error.code !== "run_conflict") await this.#current.drop(assignmentId);
      this.#tell({ kind: "refused", reason: error.message, ...facts });
      return "refused";
    } finally {
      work.release();
      endLease();
    }
  }

  /** Scores the prompts of the assignment, and returns the update. */
  async #done(
    assignment: LossesAssignment,
    held: readonly Example[],
    facts: WorkFacts,
    signal: AbortSignal | undefined,
  ): Promise<Unsent> {
    const kept = this.#current.unsent;
    if (kept?.assignmentId === facts.assignmentId) return kept;
    await this.#current.begin(facts.assignmentId);
    const version = assignment.vocabulary_version ?? 0;
    let run: Run;
    try {
      run = await this.#known.run(assignment.run_id, version, signal);
    } catch (error) {
      // The message may be of a newer version. Without a decline, the seat would stay occupied.
      if (error instanceof MessageError) throw new Declining(error.message);
      throw error;
    }
    const total = assignment.prompts.shape[0] ?? 0;
    let done = 0;
    const onScored = (count: number): void => {
      done += count;
      this.#work = { ...facts, done, total };
      if (count > 0) this.#tell({ kind: "scored", done, total, ...facts });
    };
    const { beforeSend, score, backend, policy } = this.#options;
    const ask: Ask = (what, call) => raced(what, call, { signal });
    const work = {
      ...{ run, assignment, onScored, held, signal },
      ...{ reflect: policy?.reflect, known: this.#known, link: this.#link },
      beforeSend: beforeSend && ((text: string) => ask("beforeSend", () => beforeSend(text))),
      score:
        score &&
        ((text: string, row: Example) => ask("the score function", () => score(text, row))),
      journal: this.#current,
      account: this.#account,
      ownModel: backend !== undefined,
      random: this.#random,
    };
    const prompts = checkedPrompts(work);
    const oracle = await this.#oracle(run, assignment, signal);
    try {
      const admitted = this.#admit(run, held);
      if (admitted.refusal !== undefined) {
        this.#unfit.set(facts.runId, run);
        throw new Declining(admitted.refusal, true);
      }
      const update = await lossesUpdate({ ...work, prompts, examples: admitted.rows }, oracle);
      return { ...facts, body: JSON.stringify(update) };
    } catch (error) {
      const failure = this.#late(error);
      throw run.privacy == null || isNotDeclined(failure) ? failure : new Withheld(failure);
    }
  }

  /** If the deadline, and not the app, ended a wait, returns an error that declines the work. */
  #late(error: unknown): unknown {
    const isLate = error instanceof Stopped && !this.#signal?.aborted;
    return isLate ? new Declining(`no time is left for ${error.message}`) : error;
  }

  #admit(run: Run, held: readonly Example[]): Admitted {
    return this.#consent.admit(run, held, this.#options.backend === undefined);
  }

  async #oracle(
    run: Run,
    assignment: LossesAssignment,
    signal: AbortSignal | undefined,
  ): Promise<Oracle> {
    const ready = async (): Promise<void> => {
      if (signal?.aborted) throw new Stopped("the model");
      if (!(await this.#holds())) throw new PutOff("the device may not work now");
    };
    const { assignment_id: assignmentId, run_id: runId } = assignment;
    const { backend } = this.#options;
    if (backend === undefined) {
      if (!run.gateway) {
        throw new Declining("this server has no gateway, and the client has no backend");
      }
      return gatewayOracle(assignmentId, (message) => this.#link.score(message, signal), ready);
    }
    if (run.model != null && this.#model !== undefined && this.#model !== run.model) {
      throw new Declining(mismatch(run.model, this.#model), true);
    }
    const version = assignment.vocabulary_version ?? 0;
    const vocabulary = await this.#known.vocabulary(runId, version, signal);
    const named: Backend = async (query, stopped) => {
      const answer = await backend(query, stopped);
      this.#model = answer.fingerprint;
      return answer;
    };
    return ownOracle(named, vocabulary, ready, signal);
  }

  async #unsupported(facts: WorkFacts, signal: AbortSignal | undefined): Promise<Outcome> {
    const reason = "this client does not do the alpha exchange (participation: {exchange: losses})";
    const outcome = await this.#declined(facts, new Declining(reason), signal);
    // The client works only for this run.
    if (this.#options.runId !== undefined) throw new UnsupportedError(reason);
    return outcome;
  }

  async #declined(
    facts: WorkFacts,
    error: unknown,
    signal: AbortSignal | undefined,
  ): Promise<Outcome> {
    const isPrivate = error instanceof Withheld;
    const failure = isPrivate ? error.cause : error;
    // Of an unknown error only the type, because its message may quote private text.
    const known = failure instanceof FedOneError;
    const reason = known ? failure.message : `the client failed with ${kindOf(failure)}`;
    const unfit = failure instanceof Declining && failure.unfit;
    const message = {
      reason: isPrivate ? WITHHELD : reason.slice(0, 500),
      usage: this.#account.shown(this.#current.usageOf(facts.assignmentId)),
      ...(unfit && { unfit }),
    };
    await this.#link.decline(facts.assignmentId, message, signal);
    await this.#current.drop(facts.assignmentId);
    this.#tell({ kind: "declined", reason, ...facts });
    return "declined";
  }

  // Sending updates

  /** Sends an update that was finished before the device stopped or went offline. */
  async #handInWaiting(signal: AbortSignal | undefined): Promise<void> {
    await this.#current.load();
    const { unsent } = this.#current;
    if (unsent === undefined) return;
    try {
      await this.#handIn(unsent, signal);
    } catch (error) {
      if (!isRefusal(error) || error.code === "unauthorized") throw error;
      const { body: _, ...facts } = unsent;
      await this.#current.drop(unsent.assignmentId);
      this.#tell({ kind: "refused", reason: error.message, ...facts });
    }
  }

  /**
   * Sends an update. If the same update is sent again, it gets the same receipt.
   *
   * If the server refuses the update of an open assignment, the client declines the assignment. The
   * next request for work would otherwise return it again.
   */
  async #handIn(unsent: Unsent, signal: AbortSignal | undefined): Promise<Outcome> {
    const { body: _, ...facts } = unsent;
    try {
      await this.#link.update(unsent, signal);
    } catch (error) {
      const isKept = !isRefusal(error) || NOT_DECLINED.includes(error.code);
      if (isKept && !(error instanceof RefusedBetween)) throw error;
      return this.#declined(facts, error, signal);
    }
    await this.#current.drop(unsent.assignmentId);
    this.#tell({ kind: "updated", ...facts });
    return "worked";
  }

  // The app's functions

  /** Whether the device may work now; false if the app's function fails. */
  async #holds(): Promise<boolean> {
    const { onlyWhen } = this.#options;
    let held = onlyWhen === undefined;
    try {
      if (onlyWhen) held = await this.#ask("onlyWhen", onlyWhen);
    } catch (error) {
      if (error instanceof Stopped) throw error; // other errors count as false
    }
    if (held !== this.#held) this.#tell({ kind: held ? "resumed" : "paused" });
    this.#held = held;
    return held;
  }

  async #tell(event: ClientEvent): Promise<void> {
    try {
      // The function may be async: an unhandled rejection would end a Node process.
      await this.#options.onEvent?.(event);
    } catch {
      // An error in the app's display must not end the work.
    }
  }
}

/** Options of `runOnce`. */
export interface RunOnceOptions {
  readonly waitS?: number;
  readonly signal?: AbortSignal;
}

/** Whether the work need not be declined after an error, because it is lost or continues later. */
function isNotDeclined(error: unknown): boolean {
  if (error instanceof RefusedBetween) return false; // A repetition would be refused too.
  if (error instanceof MessageError || error instanceof TransportError) return true;
  if (error instanceof PutOff || error instanceof Stopped) return true;
  if (!(error instanceof ProblemError)) return false;
  // A model that was unavailable in all attempts may be so for long, unless it names a delay.
  const staysAway = error.code === "backend_unavailable" && askedS(error) <= PATIENCE_S;
  return (isRetryable(error) && !staysAway) || NOT_DECLINED.includes(error.code);
}
