import assert from "node:assert/strict";
import { mkdtemp, readdir, stat } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setImmediate } from "node:timers/promises";
import { test } from "node:test";
import "fake-indexeddb/auto";
import { IndexedDbStorage } from "../adapters/browser/index.js";
import { preferencesStorage, whileActive } from "../adapters/capacitor/index.js";
import { FileStorage } from "../adapters/node/index.js";
import { edgeTask, secureStorage } from "../adapters/react-native/index.js";
import { burst } from "../src/burst.js";
import { EdgeClient, MemoryStorage } from "../src/index.js";
import type { EdgeStorage } from "../src/index.js";
import { assignment, json, never, problem, ScriptedServer } from "./server.js";

const KEY = "fedone.https___fedone.example.work";

/** A double of `@capacitor/preferences`. */
function preferences() {
  const kept = new Map<string, string>();
  return {
    get: async ({ key }: { key: string }) => ({ value: kept.get(key) ?? null }),
    set: async ({ key, value }: { key: string; value: string }) => void kept.set(key, value),
    remove: async ({ key }: { key: string }) => void kept.delete(key),
  };
}

/** Doubles of `react-native-mmkv` and `expo-secure-store`, and what they hold. */
function phone() {
  const [file, keychain] = [new Map<string, string>(), new Map<string, string>()];
  const mmkv = {
    getString: (key: string) => file.get(key),
    set: (key: string, value: string) => void file.set(key, value),
    remove: (key: string) => file.delete(key),
  };
  const secure = {
    getItemAsync: async (key: string) => keychain.get(key) ?? null,
    setItemAsync: async (key: string, value: string) => void keychain.set(key, value),
    deleteItemAsync: async (key: string) => void keychain.delete(key),
  };
  return { file, keychain, storage: secureStorage(mmkv, secure) };
}

const STORAGES: Record<string, () => EdgeStorage | Promise<EdgeStorage>> = {
  memory: () => new MemoryStorage(),
  files: async () => new FileStorage(join(await mkdtemp(join(tmpdir(), "edge-")), "state")),
  IndexedDB: () => new IndexedDbStorage(`test-${Math.random()}`),
  "React Native": () => phone().storage,
  Capacitor: () => preferencesStorage(preferences()),
};

for (const [name, make] of Object.entries(STORAGES)) {
  test(`storage: ${name}`, async () => {
    const storage = await make();
    assert.equal((await storage.get(KEY)) ?? undefined, undefined);
    await storage.remove(KEY);
    await storage.set(KEY, "one");
    await storage.set(KEY, "naïve 日本 🎬");
    await storage.set(`${KEY}.other`, "x".repeat(100_000));
    assert.equal(await storage.get(KEY), "naïve 日本 🎬");
    await storage.remove(KEY);
    assert.equal((await storage.get(KEY)) ?? undefined, undefined);
    assert.equal((await storage.get(`${KEY}.other`))?.length, 100_000);
  });
}

test("IndexedDB keeps no connection, which could go stale and block a deletion", async () => {
  const storage = new IndexedDbStorage("test-deletion");
  await storage.set(KEY, "one");
  const deletion = indexedDB.deleteDatabase("test-deletion");
  await new Promise<void>((resolve, reject) => {
    deletion.onsuccess = () => resolve();
    deletion.onblocked = () => reject(new Error("blocked"));
  });
  assert.equal(await storage.get(KEY), undefined);
  await storage.set(KEY, "two");
  assert.equal(await storage.get(KEY), "two");
});

test("files are for their owner alone, and none is left half written", async () => {
  const folder = join(await mkdtemp(join(tmpdir(), "edge-")), "state");
  await new FileStorage(folder).set(KEY, "secret");
  assert.deepEqual(await readdir(folder), [`${KEY}.json`]);
  assert.equal((await stat(folder)).mode & 0o777, 0o700);
  assert.equal((await stat(join(folder, `${KEY}.json`))).mode & 0o777, 0o600);
  assert.equal(await new FileStorage(folder).get(KEY), "secret");
});

test("a phone's keychain holds the secrets, and nothing that is long", async () => {
  const { file, keychain, storage } = phone();
  const server = new ScriptedServer();
  await clientOf(server, storage).run();
  assert.deepEqual([...keychain.keys()], ["fedone.https___fedone.example.identity"]);
  assert.ok(![...file.values()].join().includes("fedone_secret"));
});

function clientOf(server: ScriptedServer, storage: EdgeStorage = new MemoryStorage()): EdgeClient {
  const data = [{ text: "x", label: 0 }];
  const options = { server: "https://fedone.example", token: "t", data, storage };
  return new EdgeClient({ ...options, fetch: server.fetch });
}

test("a burst works while there is work, and ends when its time is over", async () => {
  const server = new ScriptedServer()
    .next(
      "claim",
      () => json(assignment()),
      () => json(assignment({ assignment_id: "a2" })),
    )
    .next("claim", () => new Response(null, { status: 204, headers: { "Retry-After": "9" } }));
  assert.equal(await burst(clientOf(server), { seconds: 30, waitS: 1 }), "idle");
  assert.equal(server.bodies("update").length, 2);
  const busy = new ScriptedServer();
  assert.equal(await burst(clientOf(busy), { seconds: 1, waitS: 2 }), "worked");
});

test("a background task ends when the system says so, and tells how it went", async () => {
  const listeners: (() => void)[] = [];
  const system = {
    addExpirationListener: (listener: () => void) => {
      listeners.push(listener);
      return { remove: () => void listeners.splice(listeners.indexOf(listener), 1) };
    },
    BackgroundTaskResult: { Success: 1, Failed: 2 },
  };
  const slow = new ScriptedServer().next("score", never);
  const client = clientOf(slow);
  const ending = edgeTask(() => client, system)();
  while (slow.bodies("score").length === 0) await setImmediate();
  listeners.forEach((expire) => expire());
  assert.equal(await ending, 1);
  assert.equal(client.status().outcome, "stopped");
  assert.equal(listeners.length, 0);
  const refusing = new ScriptedServer().next("clients", () => problem("unauthorized", 401));
  assert.equal(await edgeTask(() => clientOf(refusing), system)(), 2);
});

test("an app in the background stops, and continues in the foreground", async () => {
  let listener: (state: { isActive: boolean }) => void = () => undefined;
  const app = {
    getState: async () => ({ isActive: true }),
    addListener: async (_: string, added: typeof listener) => {
      listener = added;
      return { remove: async () => undefined };
    },
  };
  const server = new ScriptedServer().next("score", never);
  server.next(
    "claim",
    () => json(assignment()),
    () => json(assignment()),
  );
  const client = clientOf(server);
  const stop = await whileActive(client, app, (error) => assert.fail(String(error)));
  while (server.bodies("score").length === 0) await setImmediate();
  listener({ isActive: false });
  while (client.status().outcome !== "stopped") await setImmediate();
  listener({ isActive: true });
  while (server.bodies("update").length === 0) await setImmediate();
  await stop();
});
