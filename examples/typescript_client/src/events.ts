/** What a client tells its app; neither texts nor secrets are in it. */
export type ClientEvent =
  /** The device has an identity. */
  | { readonly kind: "enrolled" }
  /** The device waits for work, and the server is there; `retryAfterS` is the delay it asked for. */
  | { readonly kind: "waiting"; readonly retryAfterS?: number }
  /** It has work. */
  | ({ readonly kind: "assigned" } & WorkFacts)
  /** So many of the work's prompts have their losses. */
  | ({ readonly kind: "scored"; readonly done: number; readonly total: number } & WorkFacts)
  /** The server has taken the work. */
  | ({ readonly kind: "updated" } & WorkFacts)
  /** The device gave the work back. */
  | ({ readonly kind: "declined"; readonly reason: string } & WorkFacts)
  /** The server did not take the work: too late, or of another model. */
  | ({ readonly kind: "refused"; readonly reason: string } & Partial<WorkFacts>)
  /** The app's condition stopped or began to hold. */
  | { readonly kind: "paused" | "resumed" }
  /** The server cannot be reached, or can again. */
  | { readonly kind: "offline"; readonly reason: string }
  | { readonly kind: "online" }
  /** There will be no more work. */
  | { readonly kind: "ended" };

/** Which work it is. */
export interface WorkFacts {
  readonly runId: string;
  readonly assignmentId: string;
  readonly round: number;
}

/** Gets each event; an exception in it changes nothing. */
export type OnEvent = (event: ClientEvent) => void;
