import { readFileSync } from "node:fs";

/** A file of golden vectors, which all clients share. */
export function vectors<T>(name: string): T {
  const file = new URL(`../../../../tests/vectors/${name}.json`, import.meta.url);
  return JSON.parse(readFileSync(file, "utf8")) as T;
}
