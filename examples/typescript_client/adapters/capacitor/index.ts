import type { EdgeClient, EdgeStorage } from "../../src/index.js";

/** What is used of `@capacitor/preferences`. */
export interface Preferences {
  get(options: { key: string }): Promise<{ value: string | null }>;
  set(options: { key: string; value: string }): Promise<void>;
  remove(options: { key: string }): Promise<void>;
}

/** Keeps the client's state in UserDefaults or SharedPreferences, which are the app's alone. */
export function preferencesStorage(preferences: Preferences): EdgeStorage {
  return {
    get: async (key) => (await preferences.get({ key })).value,
    set: (key, value) => preferences.set({ key, value }),
    remove: (key) => preferences.remove({ key }),
  };
}

/** What is used of `@capacitor/app`. */
export interface App {
  getState(): Promise<{ isActive: boolean }>;
  addListener(
    event: "appStateChange",
    listener: (state: { isActive: boolean }) => void,
  ): Promise<{ remove(): Promise<void> }>;
}

/**
 * Works while the app is in the foreground. In the background the system stops the WebView, and
 * with it every JavaScript, within seconds.
 *
 * @returns Ends it, and resolves once the client has stopped.
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
