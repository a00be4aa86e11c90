import { MessageError } from "./errors.js";
import type { Tensor } from "./messages.js";

type DType = Tensor["dtype"];

/** Messages and the platforms of devices are little-endian. */
const ARRAYS = { float32: Float32Array, uint8: Uint8Array, uint16: Uint16Array };

/**
 * The elements of a message's array, flat, in C order.
 *
 * @throws MessageError The value is not an array, or its bytes do not fit its type and shape.
 */
export function unpack(array: Tensor): number[] {
  const kind = ARRAYS[array?.dtype];
  if (kind === undefined || !Array.isArray(array.shape)) throw malformed("is none");
  let raw: string;
  try {
    raw = atob(array.data);
  } catch {
    throw malformed("its data is no base64");
  }
  const count = array.shape.reduce((product, length) => product * length, 1);
  if (raw.length !== count * kind.BYTES_PER_ELEMENT)
    throw malformed("its data does not fit its shape");
  const bytes = Uint8Array.from(raw, (character) => character.charCodeAt(0));
  const values = [...new kind(bytes.buffer)];
  if (!values.every(Number.isFinite)) throw malformed("it holds NaN or infinity");
  return values;
}

/** An array for a message, from numbers in C order; `float32` rounds to the nearest number. */
export function pack(values: readonly number[], shape: number[], dtype: DType): Tensor {
  return { dtype, shape, data: toBase64(new Uint8Array(ARRAYS[dtype].from(values).buffer)) };
}

/** The rows of a 2-dimensional array. */
export function rowsOf(array: Tensor): number[][] {
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
