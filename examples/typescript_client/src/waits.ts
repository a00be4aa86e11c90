import { FedOneError, Stopped } from "./errors.js";
import type { EdgeStorage } from "./state.js";

/** The end of a wait: a signal, or a maximum duration in seconds. */
export interface Limits {
  readonly signal?: AbortSignal | undefined;
  readonly seconds?: number;
}

/** A controller that is also aborted together with another signal. */
export class Ending extends AbortController {
  readonly stop = (): void => this.abort();

  constructor(readonly outer: AbortSignal | undefined) {
    super();
    outer?.addEventListener("abort", this.stop);
    if (outer?.aborted) this.abort();
  }

  /** Stops listening to the other signal. */
  release(): void {
    this.outer?.removeEventListener("abort", this.stop);
  }
}

/**
 * Returns the result of a function that may never return. All waits of the client use it.
 *
 * @param what Name of the function.
 * @throws Stopped The signal was aborted first.
 * @throws FedOneError The time limit was exceeded.
 */
export async function raced<T>(
  what: string,
  call: () => T | PromiseLike<T>,
  { signal, seconds }: Limits,
): Promise<T> {
  let end = (): void => undefined;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const ended = new Promise<never>((_, reject) => {
    end = () => reject(new Stopped(what));
    const late = (): void => reject(new FedOneError(`${what}: no answer in ${seconds} s`));
    if (seconds !== undefined) timer = setTimeout(late, 1000 * seconds);
  });
  signal?.addEventListener("abort", end);
  try {
    const answer = call();
    if (signal?.aborted) end();
    return await Promise.race([answer, ended]);
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", end);
  }
}

/** Calls a function of the app under the current limits. */
export type Ask = <T>(what: string, call: () => T | PromiseLike<T>) => Promise<T>;

/** A storage with time limits, whose writes keep their order even after a timeout. */
export function guarded(storage: EdgeStorage, ask: Ask): EdgeStorage {
  let last: Promise<void> = Promise.resolve();
  const write = (act: () => void | Promise<void>): Promise<void> => {
    last = last.catch(() => undefined).then(act);
    return ask("storage", () => last);
  };
  return {
    get: (key) => ask("storage", () => storage.get(key)),
    set: (key, value) => write(() => storage.set(key, value)),
    remove: (key) => write(() => storage.remove(key)),
  };
}
