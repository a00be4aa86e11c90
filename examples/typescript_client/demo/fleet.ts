// Many devices in one process, for measurements: node dist/demo/fleet.js URL TOKEN rows.jsonl COUNT
// Prints a line when it is loaded, starts after a line of input, and prints a line at the end.
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { EdgeClient, MemoryStorage } from "../src/index.js";
import type { Example } from "../src/index.js";

const [server = "", token = "", file = "", count = "1"] = process.argv.slice(2);
const lines = readFileSync(file, "utf8").split("\n").filter(Boolean);
const data = lines.map((line) => JSON.parse(line) as Example);

console.log("loaded");
await once(process.stdin, "data");
const clients = Array.from({ length: Number(count) }, () => {
  return new EdgeClient({ server, token, data, storage: new MemoryStorage() });
});
await Promise.all(clients.map((client) => client.run()));
console.log("ended");
process.exit();
