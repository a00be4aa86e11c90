// Makes elements without parsing markup, so that names are always shown as text.

export function h(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    } else {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, options = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(options)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

let ids = 0;

// A section with a title.
export function panel(title, ...children) {
  const id = `part-${++ids}`;
  return h("section", { class: "panel", "aria-labelledby": id }, h("h2", { id }, title), ...children);
}

// A table that can be scrolled, also by keyboard. `columns` are {text, number}.
export function table(caption, columns) {
  const body = h("tbody");
  const heads = columns.map((column) =>
    h("th", { scope: "col", class: column.number && "number" }, column.text),
  );
  const node = h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, heads)),
      body,
    ),
  );
  return { node, body };
}

// Announces a text to screen readers.
export function say(text) {
  document.getElementById("news").textContent = text;
}
