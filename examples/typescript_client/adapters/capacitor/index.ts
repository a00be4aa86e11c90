import type { EdgeClient, EdgeStorage } from "../../src/index.js";

/** The used part of `@capacitor/preferences`. */
export interface Preferences {
  get(options: { key: string }): Promise<{ value: string | null }>;
  set(options: { key: string; value: string }): Promise<void>;
  remove(options: { key: string }): Promise<void>;
}

/** Stores the client's state in UserDefaults or SharedPreferences, which only the app can read. */
export function preferencesStorage(preferences: Preferences): EdgeStorage {
  return {
    get: async (key) => (await preferences.get({ key })).value,
    set: (key, value) => preferences.set({ key, value }),
    remove: (key) => preferences.remove({ key }),
  };
}

/** The used part of `@capacitor/app`. */
export interface App {
  getState(): Promise<{ isActive: boolean }>;
  addListener(
    event: "appStateChange",
    listener: (state: { isActive: boolean }) => void,
  ): Promise<{ remove(): Promise<void> }>;
}

/**
 * Works while the app is in the foreground. In the background the system stops the WebView and its
 * JavaScript within seconds.
 *
 * @returns A function that stops the client, and resolves when it has stopped.
 */
export async function whileActive(
  client: EdgeClient,
  app: App,
  failed: (error: unknown) => void,
): Promise<() => Promise<void>> {
  let active: AbortController | undefined;
  let running = Promise.resolve();
  const turn = ({ isActive }: { isActive: boolean }): void => {
    if (isActive === (active !== undefined)) return;
    active?.abort();
    active = isActive ? new AbortController() : undefined;
    if (active) running = client.run({ signal: active.signal }).catch(failed);
  };
  const listening = await app.addListener("appStateChange", turn);
  turn(await app.getState());
  return async () => {
    turn({ isActive: false });
    await listening.remove();
    await running;
  };
}
