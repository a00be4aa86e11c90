import { mkdir, open, readFile, rename, rm } from "node:fs/promises";
import { join } from "node:path";
import type { EdgeStorage } from "../../src/index.js";

/** Stores the client's state in a folder that only its owner can read, one file per key. */
export class FileStorage implements EdgeStorage {
  /** @param folder Created if it is missing. */
  constructor(readonly folder: string) {}

  async get(key: string): Promise<string | undefined> {
    try {
      return await readFile(this.#file(key), "utf8");
    } catch (error) {
      if (isMissing(error)) return undefined;
      throw error;
    }
  }

  /** Returns when the content and the name of the file are on the disk. */
  async set(key: string, value: string): Promise<void> {
    await mkdir(this.folder, { recursive: true, mode: 0o700 });
    const part = `${this.#file(key)}.part`;
    const file = await open(part, "w", 0o600);
    try {
      await file.writeFile(value);
      await file.sync();
    } finally {
      await file.close();
    }
    await rename(part, this.#file(key));
    await this.#syncFolder();
  }

  async remove(key: string): Promise<void> {
    await rm(this.#file(key), { force: true });
  }

  #file(key: string): string {
    return join(this.folder, `${key}.json`);
  }

  async #syncFolder(): Promise<void> {
    if (process.platform === "win32") return; // has no such thing
    const folder = await open(this.folder, "r");
    await folder.sync().finally(() => folder.close());
  }
}

function isMissing(error: unknown): boolean {
  return error instanceof Error && "code" in error && error.code === "ENOENT";
}
