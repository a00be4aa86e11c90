import { epsilonOf } from "./accountant.js";
import { ArgumentError, Declining, FedOneError } from "./errors.js";
import type { PrivacySpec, Usage } from "./messages.js";
import type { EdgeStorage } from "./state.js";
import type { Run } from "./task.js";
import type { Reflect } from "./work.js";

/** Which work a device accepts. */
export interface WorkPolicy {
  /** Declines work with less noise than this; `storage` keeps the count of epsilon. */
  readonly privacy?: RequiredPrivacy;
  /** Caps of all work of the device, of all runs and servers; `storage` keeps the count. */
  readonly budget?: { readonly queries: number };
  /**
   * Values of the label column, which a run has to cover; rows with another one take part in no
   * run. By default those of the rows: whether a run fits then shows which occur.
   */
  readonly labels?: readonly string[];
  /**
   * Writes candidates from rows that a prompt got wrong: `reflection` of `@fedone/edge/reflect`. By
   * default the device proposes nothing.
   */
  readonly reflect?: Reflect;
}

/** A device's requirements of the runs that it works for (docs/explanation/privacy.md). */
export interface RequiredPrivacy {
  /** Maximum total epsilon of all work of the device. Work that would exceed it is declined. */
  readonly maxEpsilon: number;
  /** The delta of (epsilon, delta)-differential privacy; 1e-5 by default. */
  readonly delta?: number;
  /** Work with less noise is declined, independent of `maxEpsilon`. */
  readonly minNoiseMultiplier?: number;
  /** `label`: the server may see texts; `example`, the default, needs a `backend`. */
  readonly unit?: "label" | "example";
}

interface Spent {
  /** The sum of 1 / multiplier^2 of all releases. */
  readonly precision: number;
  readonly queries: number;
}

const KEY = "fedone.device.spent";

/** What a device has given away and spent, over all runs and servers, and its limits. */
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

  /** The epsilon spent, as far as it has been read; undefined unless noise is required. */
  get epsilon(): number | undefined {
    return this.#required && epsilonOf(this.#spent.precision, this.#delta);
  }

  /**
   * Reads the count.
   *
   * @throws FedOneError It is damaged; without it, what was given away is not known.
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
   * @param released Whether its noise was drawn and counted before.
   * @throws Declining It does not.
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

  /** Counts a release before it is kept: a crash in between counts it twice, never not at all. */
  async release(privacy: PrivacySpec): Promise<void> {
    if (this.#required === undefined) return;
    await this.load();
    await this.#save({ ...this.#spent, precision: this.#afford(privacy) });
  }

  /**
   * Counts queries before they are asked.
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

  /** The usage that the server may see: tokens and further requests reveal texts. */
  shown(usage: Required<Usage>): Required<Usage> {
    if (this.#required === undefined || !this.ownModel) return usage;
    return { ...usage, requests: usage.queries, prompt_tokens: 0, completion_tokens: 0, usd: 0 };
  }

  /** The precision after one more release. */
  #afford({ noise_multiplier: multiplier }: PrivacySpec): number {
    const { maxEpsilon } = this.#required!;
    const precision = this.#spent.precision + multiplier ** -2;
    const epsilon = epsilonOf(precision, this.#delta);
    if (!(epsilon <= maxEpsilon)) {
      // The figures, which `status` has, would tell of other servers' runs.
      throw new Declining("this work would exceed the client's maximal epsilon", true);
    }
    return precision;
  }

  async #save(spent: Spent): Promise<void> {
    await this.storage.set(KEY, JSON.stringify(spent));
    this.#spent = spent;
  }
}
