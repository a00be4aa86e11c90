// One device as a Node program: node dist/demo/device.js URL rows.jsonl [STATE]
// Prints each event as a line of JSON; SIGTERM and Ctrl-C stop it. Variables: FEDONE_TOKEN, the
// enrolment token. MODEL_URL, the URL of a model, or BACKEND, a module whose `backend` is the model
// (by default the aggregator's). POLICY, the `policy` as JSON. FIELDS, the columns for runs.
// REFLECT, the model that reflects: `gateway` or `model`.
import { readFileSync } from "node:fs";
import { FileStorage } from "../adapters/node/index.js";
import { EdgeClient, MemoryStorage } from "../src/index.js";
import { reflection } from "../src/reflect.js";
import type { Backend, Example } from "../src/index.js";

const [server, file, folder] = process.argv.slice(2);
const { FEDONE_TOKEN: token } = process.env;
if (!server || !token || !file) {
  console.error("usage: FEDONE_TOKEN=... device.js URL rows.jsonl [STATE]");
  process.exit(2);
}
const lines = readFileSync(file, "utf8").split("\n").filter(Boolean);
const stop = new AbortController();
for (const signal of ["SIGINT", "SIGTERM"] as const) process.once(signal, () => stop.abort());

const { BACKEND, FIELDS, MODEL_URL = "", POLICY = "{}", REFLECT } = process.env;
const remote: Backend = async (query, signal) => {
  const body = JSON.stringify(query);
  const response = await fetch(MODEL_URL, { method: "POST", body, signal: signal ?? null });
  if (!response.ok) throw new Error(`answered ${response.status}`);
  return response.json();
};

const backend: Backend = BACKEND ? (await import(BACKEND)).backend : remote;

const client = new EdgeClient({
  server,
  token,
  data: lines.map((line) => JSON.parse(line) as Example),
  storage: folder ? new FileStorage(folder) : new MemoryStorage(),
  label: "label",
  ...(FIELDS && { fields: FIELDS.split(",") }),
  policy: {
    ...JSON.parse(POLICY),
    ...(REFLECT && { reflect: reflection(REFLECT === "gateway" ? REFLECT : backend) }),
  },
  ...((MODEL_URL || BACKEND) && { backend }),
  onEvent: (event) => console.log(JSON.stringify(event)),
});
await client.run({ signal: stop.signal });
