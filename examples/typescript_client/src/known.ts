import { Declining } from "./errors.js";
import type { Link } from "./link.js";
import type { Run } from "./task.js";
import { Vocabulary } from "./vocabulary.js";

/** Maximum number of runs in the cache, which is then cleared. */
const MOST = 8;

/** The tasks and candidates of the device's runs; each is fetched once. */
export class KnownRuns {
  readonly #runs = new Map<string, Run>();
  readonly #vocabularies = new Map<string, Vocabulary>();

  constructor(readonly link: Link) {}

  /** Returns a run with at least this version of its candidates. */
  async run(runId: string, version: number, signal?: AbortSignal): Promise<Run> {
    const known = this.#runs.get(runId);
    if (known && (known.vocabulary_version ?? 0) >= version) return known;
    const run = await this.link.task(runId, signal);
    if (this.#runs.size >= MOST) this.forget();
    this.#runs.set(runId, run);
    return run;
  }

  /**
   * Returns a run's candidates, in at least this version.
   *
   * @throws Declining The candidates do not belong to the run.
   */
  async vocabulary(runId: string, version: number, signal?: AbortSignal): Promise<Vocabulary> {
    const known = this.#vocabularies.get(runId);
    if (known && known.version >= version) return known;
    const run = await this.run(runId, version, signal);
    const after = known?.version ?? 0;
    const listed = await this.link.vocabulary(runId, after, signal);
    const found = Vocabulary.of(listed, after > 0 ? known : undefined);
    if (found.version !== (run.vocabulary_version ?? 0)) {
      this.forget(); // Candidates may have been added between the two responses.
      throw new Declining("the vocabulary does not fit its run");
    }
    this.#vocabularies.set(runId, found);
    return found;
  }

  /** Removes all runs, because another server may have other runs with these names. */
  forget(): void {
    this.#runs.clear();
    this.#vocabularies.clear();
  }
}
