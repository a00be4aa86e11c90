import { burst } from "../../src/burst.js";
import type { EdgeClient, EdgeStorage } from "../../src/index.js";

/** The used part of an instance of `react-native-mmkv` 4. */
export interface Mmkv {
  getString(key: string): string | undefined;
  set(key: string, value: string): void;
  remove(key: string): unknown;
}

/** The used part of `expo-secure-store`. */
export interface SecureStore {
  getItemAsync(key: string): Promise<string | null>;
  setItemAsync(key: string, value: string): Promise<void>;
  deleteItemAsync(key: string): Promise<void>;
}

/**
 * Stores the credential in the keychain or keystore, and everything else, which may be too long for
 * a keychain, in MMKV.
 */
export function secureStorage(mmkv: Mmkv, secure: SecureStore): EdgeStorage {
  const isSecret = (key: string): boolean => /\.identity$/.test(key);
  return {
    get: (key) => (isSecret(key) ? secure.getItemAsync(key) : mmkv.getString(key)),
    set: (key, value) => (isSecret(key) ? secure.setItemAsync(key, value) : mmkv.set(key, value)),
    remove: (key) => (isSecret(key) ? secure.deleteItemAsync(key) : void mmkv.remove(key)),
  };
}

/** The used part of `expo-background-task`. */
export interface BackgroundTask {
  addExpirationListener(listener: () => void): { remove(): void };
  readonly BackgroundTaskResult: { readonly Success: number; readonly Failed: number };
}

/**
 * A task for `TaskManager.defineTask` of `expo-task-manager`; works as long as the system allows.
 */
export function edgeTask(client: () => EdgeClient, system: BackgroundTask, seconds = 25) {
  return async (): Promise<number> => {
    const over = new AbortController();
    const expiry = system.addExpirationListener(() => over.abort());
    try {
      await burst(client(), { seconds, signal: over.signal });
      return system.BackgroundTaskResult.Success;
    } catch {
      return system.BackgroundTaskResult.Failed;
    } finally {
      expiry.remove();
    }
  };
}
