import { Declining } from "./errors.js";
import type { Link } from "./link.js";
import type { Run } from "./task.js";
import { Vocabulary } from "./vocabulary.js";

/** Runs in the cache, which is cleared when it is full. */
const MOST = 8;

/** Tasks and candidates of the runs that a device works for, each fetched once. */
export class KnownRuns {
  readonly #runs = new Map<string, Run>();
  readonly #vocabularies = new Map<string, Vocabulary>();

  constructor(readonly link: Link) {}

  /** What must be known of a run, with at least this version of its candidates. */
  async run(runId: string, version: number, signal?: AbortSignal): Promise<Run> {
    const known = this.#runs.get(runId);
    if (known && (known.vocabulary_version ?? 0) >= version) return known;
    const run = await this.link.task(runId, signal);
    if (this.#runs.size >= MOST) this.forget();
    this.#runs.set(runId, run);
    return run;
  }

  /**
   * A run's candidates, in at least this version.
   *
   * @throws Declining They are not those of the run.
   */
  async vocabulary(runId: string, version: number, signal?: AbortSignal): Promise<Vocabulary> {
    const known = this.#vocabularies.get(runId);
    if (known && known.version >= version) return known;
    const run = await this.run(runId, version, signal);
    const after = known?.version ?? 0;
    const listed = await this.link.vocabulary(runId, after, signal);
    const found = Vocabulary.of(listed, after > 0 ? known : undefined);
    if (found.version !== (run.vocabulary_version ?? 0)) {
      this.forget(); // Candidates may have come in between the two answers.
      throw new Declining("the vocabulary does not fit its run");
    }
    this.#vocabularies.set(runId, found);
    return found;
  }

  /** Removes all: another server may have other runs of the same names. */
  forget(): void {
    this.#runs.clear();
    this.#vocabularies.clear();
  }
}
