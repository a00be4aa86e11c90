/** Events for the app; they contain neither texts nor secrets. */
export type ClientEvent =
  /** The device has enrolled. */
  | { readonly kind: "enrolled" }
  /** There is no work at the moment; `retryAfterS` is the delay that the server requests. */
  | { readonly kind: "waiting"; readonly retryAfterS?: number }
  /** The device has received work. */
  | ({ readonly kind: "assigned" } & WorkFacts)
  /** `done` of the work's `total` prompts are scored. */
  | ({ readonly kind: "scored"; readonly done: number; readonly total: number } & WorkFacts)
  /** The server has accepted the update. */
  | ({ readonly kind: "updated" } & WorkFacts)
  /** The device has declined the work. */
  | ({ readonly kind: "declined"; readonly reason: string } & WorkFacts)
  /** The server has refused the update: it was too late, or from another model. */
  | ({ readonly kind: "refused"; readonly reason: string } & Partial<WorkFacts>)
  /** The app's condition became false or true. */
  | { readonly kind: "paused" | "resumed" }
  /** The server cannot be reached, or can be reached again. */
  | { readonly kind: "offline"; readonly reason: string }
  | { readonly kind: "online" }
  /** There will be no more work. */
  | { readonly kind: "ended" };

/** The work of an event. */
export interface WorkFacts {
  readonly runId: string;
  readonly assignmentId: string;
  readonly round: number;
}

/** Called with each event; an exception in it has no effect. */
export type OnEvent = (event: ClientEvent) => void;
