// Compiled only: the adapters fit what the libraries' own types say.
import type { App } from "@capacitor/app";
import type { Preferences } from "@capacitor/preferences";
import type * as BackgroundTask from "expo-background-task";
import type * as SecureStore from "expo-secure-store";
import type * as TaskManager from "expo-task-manager";
import type { MMKV } from "react-native-mmkv";
import { preferencesStorage, whileActive } from "../adapters/capacitor/index.js";
import { edgeTask, secureStorage } from "../adapters/react-native/index.js";
import type { EdgeClient } from "../src/index.js";

declare const client: EdgeClient;
declare const mmkv: MMKV;
declare const secureStore: typeof SecureStore;
declare const backgroundTask: typeof BackgroundTask;
declare const taskManager: typeof TaskManager;
declare const preferences: typeof Preferences;
declare const app: typeof App;

export const compiled = (): unknown[] => [
  secureStorage(mmkv, secureStore),
  taskManager.defineTask(
    "fedone",
    edgeTask(() => client, backgroundTask),
  ),
  preferencesStorage(preferences),
  whileActive(client, app, () => undefined),
];
