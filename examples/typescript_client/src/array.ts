import { MessageError } from "./errors.js";
import type { PackedArray } from "./messages.js";

type DType = PackedArray["dtype"];

/** Of each type its name in `DataView`, and its bytes. */
const TYPES = { float32: ["Float32", 4], uint8: ["Uint8", 1], uint16: ["Uint16", 2] } as const;

/**
 * The elements of an array of a message, flat, in C order.
 *
 * @throws MessageError It is no array, or its bytes do not fit its type and shape.
 */
export function unpack(array: PackedArray): number[] {
  const [name, size] = TYPES[array?.dtype] ?? [];
  if (name === undefined || !Array.isArray(array.shape)) throw malformed("is none");
  let raw: string;
  try {
    raw = atob(array.data);
  } catch {
    throw malformed("its data is no base64");
  }
  const count = array.shape.reduce((product, length) => product * length, 1);
  if (raw.length !== count * size) throw malformed("its data does not fit its shape");
  const view = new DataView(Uint8Array.from(raw, (character) => character.charCodeAt(0)).buffer);
  const get = `get${name}` as const;
  const values = Array.from({ length: count }, (_, at) => view[get](at * size, true));
  if (!values.every(Number.isFinite)) throw malformed("it holds NaN or infinity");
  return values;
}

/** An array for a message, of numbers in C order; `float32` rounds to the nearest. */
export function pack(values: readonly number[], shape: number[], dtype: DType): PackedArray {
  const [name, size] = TYPES[dtype];
  const set = `set${name}` as const;
  const bytes = new Uint8Array(values.length * size);
  const view = new DataView(bytes.buffer);
  values.forEach((value, at) => view[set](at * size, value, true));
  return { dtype, shape, data: toBase64(bytes) };
}

/** The rows of a 2-dimensional array. */
export function rowsOf(array: PackedArray): number[][] {
  const [height = 0, width = 0] = array.shape;
  const flat = unpack(array);
  return Array.from({ length: height }, (_, row) => flat.slice(row * width, (row + 1) * width));
}

/** Standard base64, with padding. */
export function toBase64(bytes: Uint8Array): string {
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return btoa(binary);
}

function malformed(why: string): MessageError {
  return new MessageError(`the aggregator's answer is malformed: an array: ${why}`);
}
