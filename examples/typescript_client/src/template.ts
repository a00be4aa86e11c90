import { MessageError } from "./errors.js";

/** A part of a template: a text and the field after it, of which `most` characters are used. */
export interface Piece {
  readonly text: string;
  readonly field?: string;
  readonly most?: number;
}

const TOKEN = /\{\{|\}\}|\{([^{}]*)\}|[{}]/g;

/**
 * Parses a template: `{name}` is a field, `{name:.400}` its first 400 characters, `{{` and `}}`
 * are braces.
 *
 * @throws MessageError It is not a template.
 */
export function parseTemplate(template: string): Piece[] {
  const pieces: Piece[] = [];
  let text = "";
  let end = 0;
  for (const match of template.matchAll(TOKEN)) {
    text += template.slice(end, match.index);
    end = match.index + match[0].length;
    const field = match[1];
    if (match[0] === "{{" || match[0] === "}}") {
      pieces.push({ text: text + match[0].charAt(0) }); // ends a part here, as Python does
      text = "";
      continue;
    }
    const found = /^([\p{L}_][\p{L}\p{N}_]*)(?::\.([1-9]\d{0,6}))?$/u.exec(field ?? "");
    if (found) {
      const [, name = "", most] = found;
      pieces.push({ text, field: name, ...(most && { most: Number(most) }) });
      text = "";
    } else throw new MessageError(`the run's template is malformed at ${match.index}`);
  }
  text += template.slice(end);
  return text ? [...pieces, { text }] : pieces;
}
