import { ArgumentError } from "./errors.js";
import { isSendable, labelKey } from "./task.js";
import type { Example, Run, Task } from "./task.js";

/** The columns that an app lets a run use. */
export interface Columns {
  /** The label column, `label` by default. Its values are compared with answers on the device. */
  readonly label?: string;
  /**
   * Columns that a run may render; by default all columns except the label column. If the label
   * column is included, the gateway gets it as the reference text of the loss `nll`. Rows that lack
   * one of the columns are not used.
   */
  readonly fields?: readonly string[];
}

/** The rows that take part in a run, or why no row does, without any value of a row. */
export type Admitted =
  | { readonly rows: readonly Example[]; readonly refusal?: undefined }
  | { readonly refusal: string };

/** The only reason that the server gets if rows are private. */
export const WITHHELD = "the run does not fit this device";

const UNCOVERED = "the run's labels do not include all labels of the device";

/**
 * Decides which rows and columns a run may use.
 *
 * The rows depend only on the columns that the app names. A task can neither select nor count rows.
 * A run that cannot use all of these rows does not fit the device.
 */
export class Consent {
  readonly #label: string;
  readonly #fields: ReadonlySet<string> | undefined;
  readonly #labels: ReadonlySet<string> | undefined;

  /**
   * @param labels Values of the label column; rows with another value are not used.
   * @param isPrivate Whether the device requires privacy.
   * @throws ArgumentError A column is missing or cannot be used.
   */
  constructor(
    { label, fields }: Columns,
    labels: readonly string[] | undefined,
    readonly isPrivate: boolean,
  ) {
    if (isPrivate && (label === undefined || fields === undefined)) {
      throw new ArgumentError("label, fields: policy.privacy needs both");
    }
    if (fields !== undefined && (!Array.isArray(fields) || fields.length === 0)) {
      throw new ArgumentError("fields: must be a list of names");
    }
    this.#label = label ?? "label";
    this.#fields = fields && new Set(fields);
    this.#labels = labels && new Set(labels.map(labelKey));
  }

  /**
   * The rows that take part in a run.
   *
   * @param gateway Whether the gateway scores the prompts, instead of a model on the device.
   */
  admit({ task }: Run, held: readonly Example[], gateway: boolean): Admitted {
    const refusal = this.#refusal(task, gateway);
    if (refusal !== undefined) return { refusal };
    const named = this.#fields ? [...this.#fields] : task.fields;
    const texts = named.filter((name) => name !== this.#label);
    const rows = held.filter(
      (row) => texts.every((name) => isSendable(row[name])) && this.#isLabelled(task, row),
    );
    if (rows.length === 0) return { refusal: "no row is complete" };
    return rows.every((row) => task.usable(row)) ? { rows } : { refusal: UNCOVERED };
  }

  #refusal(task: Task, gateway: boolean): string | undefined {
    if (task.loss !== "score" && task.labelField !== this.#label) {
      return `the run's label column is '${task.labelField}', not the device's: set label`;
    }
    const kept = (name: string) => name === this.#label || this.#fields?.has(name) === false;
    const column = task.fields.find(kept);
    if (column !== undefined) {
      return `the run renders column '${column}', which the device does not share`;
    }
    if (task.loss === "nll" && gateway && !this.#fields?.has(this.#label)) {
      return "loss nll sends the label column, which the device does not share";
    }
    const missing = [...(this.#labels ?? [])].some((label) => task.indexOf(label) < 0);
    return task.labels.length > 0 && missing ? UNCOVERED : undefined;
  }

  #isLabelled(task: Task, row: Example): boolean {
    if (!this.isPrivate && ["nll", "score"].includes(task.loss)) return task.usable(row);
    const key = labelKey(row[this.#label] ?? "");
    return key !== "" && this.#labels?.has(key) !== false;
  }
}
