import { toBase64 } from "./array.js";
import { ArgumentError } from "./errors.js";
import { platformRandom, secret } from "./random.js";
import { Kept } from "./storage.js";
import type { EdgeStorage } from "./storage.js";

/** Signs a device's requests (docs/operations/security.md#signed-requests). */
export interface Signer {
  /** The raw Ed25519 public key, base64. */
  publicKey(): Promise<string>;

  /** What one attempt at a request is sent with; a signature holds once. */
  headers(request: Signed): Promise<Record<string, string>>;
}

/** What of a request is signed. */
export interface Signed {
  readonly method: string;
  /** Path and query as they go over the wire. */
  readonly target: string;
  readonly body: Uint8Array<ArrayBuffer>;
  readonly clientId: string;
  /** When, whole seconds since the epoch. */
  readonly createdS: number;
  /** 16 to 64 letters, digits, dashes and underscores; random by default. */
  readonly nonce?: string;
}

/** The front of a PKCS #8 document with an Ed25519 key; the 32 bytes of the key follow. */
const PKCS8 = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];

/**
 * A signer with the platform's WebCrypto, which needs Ed25519: Node 20, Chrome 137, Firefox 129,
 * Safari 17, and pages on https or localhost only. An app with a keystore of its own writes its own
 * `Signer` on top of `signatureHeaders`.
 *
 * @param storage Keeps the key.
 * @param server Base URL of the aggregator.
 * @throws ArgumentError The platform has no WebCrypto.
 */
export async function webCryptoSigner(storage: EdgeStorage, server: string): Promise<Signer> {
  const subtle = globalThis.crypto?.subtle;
  if (subtle === undefined) throw new ArgumentError("signer: this platform has no WebCrypto here");
  const kept = new Kept<{ seed: number[] }>(storage, server, "signing-key", ({ seed }) =>
    Array.isArray(seed) && seed.length === 32 ? { seed } : undefined,
  );
  let seed = (await kept.load())?.seed;
  if (seed === undefined) {
    seed = [...platformRandom()(new Uint8Array(32))];
    await kept.save({ seed });
  }
  const pkcs8 = Uint8Array.from([...PKCS8, ...seed]);
  const key = await subtle.importKey("pkcs8", pkcs8, "Ed25519", true, ["sign"]);
  const { x = "" } = await subtle.exportKey("jwk", key);
  const publicKey = `${x.replace(/-/g, "+").replace(/_/g, "/")}=`;
  return {
    publicKey: async () => publicKey,
    headers: (request) =>
      signatureHeaders(
        request,
        async (bytes) => new Uint8Array(await subtle.digest("SHA-256", bytes)),
        async (bytes) => new Uint8Array(await subtle.sign("Ed25519", key, bytes)),
      ),
  };
}

type Bytes = Uint8Array<ArrayBuffer>;

/**
 * The headers of a signed request.
 *
 * @param request What is signed.
 * @param sha256 Digest of bytes.
 * @param sign Ed25519 signature of bytes.
 */
export async function signatureHeaders(
  { method, target, body, clientId, createdS, nonce = secret(platformRandom()) }: Signed,
  sha256: (bytes: Bytes) => Promise<Uint8Array>,
  sign: (bytes: Bytes) => Promise<Uint8Array>,
): Promise<Record<string, string>> {
  const digest = `sha-256=:${toBase64(await sha256(body))}:`;
  const [path, query = ""] = target.split(/\?(.*)/s);
  const params =
    `("@method" "@path" "@query" "content-digest");created=${createdS};` +
    `keyid="${clientId}";nonce="${nonce}";alg="ed25519"`;
  const base = [
    `"@method": ${method}`,
    `"@path": ${path}`,
    `"@query": ?${query}`,
    `"content-digest": ${digest}`,
    `"@signature-params": ${params}`,
  ].join("\n");
  const signature = toBase64(await sign(new TextEncoder().encode(base)));
  return {
    "Content-Digest": digest,
    "Signature-Input": `fedone=${params}`,
    Signature: `fedone=:${signature}:`,
  };
}
