import { epsilonOf } from "./accountant.js";
import { ArgumentError, Declining, FedOneError } from "./errors.js";
import type { PrivacySpec, Usage } from "./messages.js";
import type { EdgeStorage } from "./state.js";
import type { Run } from "./task.js";
import type { Reflect } from "./work.js";

/** The work that a device accepts. */
export interface WorkPolicy {
  /** Declines work with too little noise; `storage` keeps the sum of epsilon. */
  readonly privacy?: RequiredPrivacy;
  /** Cap on queries over all runs and servers; `storage` keeps the sum. */
  readonly budget?: { readonly queries: number };
  /**
   * Possible values of the label column. A run must include all of them. Rows with other values are
   * not used. By default the values in the rows; the server may then infer them.
   */
  readonly labels?: readonly string[];
  /**
   * Writes candidates from rows that were answered wrongly: `reflection` of `@fedone/edge/reflect`.
   * By default the device proposes no candidates.
   */
  readonly reflect?: Reflect;
}

/** What a device requires of the runs that it works for (docs/explanation/privacy.md). */
export interface RequiredPrivacy {
  /** Maximum total epsilon of the device. Work that would exceed it is declined. */
  readonly maxEpsilon: number;
  /** The delta of (epsilon, delta)-differential privacy; 1e-5 by default. */
  readonly delta?: number;
  /** Work with a smaller noise multiplier is declined. */
  readonly minNoiseMultiplier?: number;
  /** `label`: the server may see texts; `example`, the default, needs a `backend`. */
  readonly unit?: "label" | "example";
}

interface Spent {
  /** The sum of 1 / multiplier^2 over all updates. */
  readonly precision: number;
  readonly queries: number;
}

const KEY = "fedone.device.spent";

/** What a device has spent in epsilon and queries, over all runs and servers, and its limits. */
export class Account {
  readonly #required: RequiredPrivacy | undefined;
  readonly #delta: number;
  readonly #mostQueries: number;
  #spent: Spent = { precision: 0, queries: 0 };

  /** @throws ArgumentError The policy cannot be used. */
  constructor(
    readonly storage: EdgeStorage,
    { privacy, budget }: WorkPolicy,
    readonly ownModel: boolean,
  ) {
    this.#required = privacy;
    this.#delta = privacy?.delta ?? 1e-5;
    this.#mostQueries = budget?.queries ?? Infinity;
    if (!(this.#mostQueries >= 0)) {
      throw new ArgumentError("policy.budget.queries: must be at least 0");
    }
    if (privacy === undefined) return;
    const { maxEpsilon, minNoiseMultiplier = 1, unit = "example" } = privacy;
    if (!(maxEpsilon > 0 && minNoiseMultiplier > 0 && this.#delta > 0 && this.#delta < 1)) {
      throw new ArgumentError(
        "policy.privacy: maxEpsilon and minNoiseMultiplier must be above 0, delta from 0 to 1",
      );
    }
    if (!["label", "example"].includes(unit)) {
      throw new ArgumentError("policy.privacy.unit: must be 'label' or 'example'");
    }
    if (unit !== "label" && !ownModel) {
      throw new ArgumentError(
        `policy.privacy: unit '${unit}' needs a backend, because the gateway sees the texts; ` +
          "unit 'label' protects labels only",
      );
    }
  }

  /** The spent epsilon that was read from `storage`; undefined unless noise is required. */
  get epsilon(): number | undefined {
    return this.#required && epsilonOf(this.#spent.precision, this.#delta);
  }

  /**
   * Reads the stored sums.
   *
   * @throws FedOneError They are damaged, so the spent epsilon is unknown.
   */
  async load(): Promise<void> {
    const text = (await this.storage.get(KEY)) ?? '{"precision":0,"queries":0}';
    try {
      const found = JSON.parse(text) as Spent;
      if (found.precision >= 0 && found.queries >= 0) {
        this.#spent = found;
        return;
      }
    } catch {
      // Damaged.
    }
    throw new FedOneError(`storage: ${KEY} is damaged: the spent epsilon is unknown`);
  }

  /**
   * Checks that work meets the requirements.
   *
   * @param released Whether the noise of the work was already drawn and counted.
   * @throws Declining The work does not meet the requirements.
   */
  check({ privacy, task }: Run, released: boolean): void {
    if (this.#required === undefined) return;
    const { minNoiseMultiplier: least = 0 } = this.#required;
    if (privacy == null) {
      throw new Declining("the client requires noise, and the run asks for none", true);
    }
    if (!(privacy.noise_multiplier >= least)) {
      throw new Declining(
        `the client requires a noise multiplier of at least ${least}, and the run's is ` +
          `${privacy.noise_multiplier}`,
        true,
      );
    }
    if (!this.ownModel && task.loss === "nll") {
      throw new Declining("the client's labels are private, and loss nll sends them", true);
    }
    if (!released) this.#afford(privacy);
  }

  /** Counts an update before it is stored. After a crash it may count twice, never 0 times. */
  async release(privacy: PrivacySpec): Promise<void> {
    if (this.#required === undefined) return;
    await this.load();
    await this.#save({ ...this.#spent, precision: this.#afford(privacy) });
  }

  /**
   * Counts queries before they are sent.
   *
   * @throws Declining They exceed the budget.
   */
  async pay(count: number): Promise<void> {
    if (this.#mostQueries === Infinity) return;
    await this.load();
    const queries = this.#spent.queries + count;
    if (queries > this.#mostQueries) {
      throw new Declining("the client's budget has nothing left for this", true);
    }
    await this.#save({ ...this.#spent, queries });
  }

  /** The usage that the server may see, without tokens and requests, which would reveal texts. */
  shown(usage: Required<Usage>): Required<Usage> {
    if (this.#required === undefined || !this.ownModel) return usage;
    return { ...usage, requests: usage.queries, prompt_tokens: 0, completion_tokens: 0, usd: 0 };
  }

  /** The precision after one more update. */
  #afford({ noise_multiplier: multiplier }: PrivacySpec): number {
    const { maxEpsilon } = this.#required!;
    const precision = this.#spent.precision + multiplier ** -2;
    const epsilon = epsilonOf(precision, this.#delta);
    if (!(epsilon <= maxEpsilon)) {
      // No numbers: they would tell the server about runs of other servers.
      throw new Declining("this work would exceed the client's maximal epsilon", true);
    }
    return precision;
  }

  async #save(spent: Spent): Promise<void> {
    await this.storage.set(KEY, JSON.stringify(spent));
    this.#spent = spent;
  }
}
