// Prints the size of the client in the bundle of an app, minified and compressed by gzip.
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const MOST = 16_000;

const { outputFiles } = await build({
  entryPoints: [new URL("../src/index.ts", import.meta.url).pathname],
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  write: false,
});
const { contents } = outputFiles[0];
const size = gzipSync(contents, { level: 9 }).length;
console.log(
  `@fedone/edge: ${contents.length} bytes minified, ${size} bytes with gzip (${MOST} at most)`,
);
if (size >= MOST) process.exitCode = 1;
