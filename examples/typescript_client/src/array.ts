import { MessageError } from "./errors.js";
import type { Tensor } from "./messages.js";

type DType = Tensor["dtype"];

const SIZES: Record<DType, number> = { float32: 4, uint8: 1, uint16: 2 };

const READ: Record<DType, (view: DataView, at: number) => number> = {
  float32: (view, at) => view.getFloat32(at, true),
  uint8: (view, at) => view.getUint8(at),
  uint16: (view, at) => view.getUint16(at, true),
};

const WRITE: Record<DType, (view: DataView, at: number, value: number) => void> = {
  float32: (view, at, value) => view.setFloat32(at, value, true),
  uint8: (view, at, value) => view.setUint8(at, value),
  uint16: (view, at, value) => view.setUint16(at, value, true),
};

/**
 * The elements of an array of a message, flat, in C order.
 *
 * @throws MessageError It is no array, or its bytes do not fit its type and shape.
 */
export function unpack(array: Tensor): number[] {
  const size = SIZES[array?.dtype];
  if (size === undefined || !Array.isArray(array.shape)) throw malformed("is none");
  let raw: string;
  try {
    raw = atob(array.data);
  } catch {
    throw malformed("its data is no base64");
  }
  const count = array.shape.reduce((product, length) => product * length, 1);
  if (raw.length !== count * size) throw malformed("its data does not fit its shape");
  const view = new DataView(Uint8Array.from(raw, (character) => character.charCodeAt(0)).buffer);
  const values = Array.from({ length: count }, (_, at) => READ[array.dtype](view, at * size));
  if (!values.every(Number.isFinite)) throw malformed("it holds NaN or infinity");
  return values;
}

/** An array for a message, of numbers in C order; `float32` rounds to the nearest. */
export function pack(values: readonly number[], shape: number[], dtype: DType): Tensor {
  const size = SIZES[dtype];
  const bytes = new Uint8Array(values.length * size);
  const view = new DataView(bytes.buffer);
  values.forEach((value, at) => WRITE[dtype](view, at * size, value));
  return { dtype, shape, data: toBase64(bytes) };
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
