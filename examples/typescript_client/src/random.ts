import { toBase64 } from "./array.js";
import { ArgumentError } from "./errors.js";

/** Fills an array with secure random bytes and returns it. */
export type Random = (bytes: Uint8Array<ArrayBuffer>) => Uint8Array<ArrayBuffer>;

/**
 * The platform's secure random numbers.
 *
 * @throws ArgumentError There are none, as in React Native without a polyfill.
 */
export function platformRandom(): Random {
  const { crypto } = globalThis;
  if (typeof crypto?.getRandomValues !== "function") {
    throw new ArgumentError(
      "random: this platform has no crypto.getRandomValues; give a function that fills bytes",
    );
  }
  return (bytes) => crypto.getRandomValues(bytes);
}

/** A secret of 32 random bytes, base64url without padding. */
export function secret(random: Random): string {
  const text = toBase64(random(new Uint8Array(32)));
  return text.replace(/\+/g, "-").replace(/\//g, "_").replace(/=/g, "");
}
