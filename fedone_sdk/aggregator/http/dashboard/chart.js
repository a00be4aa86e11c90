// Line charts by uPlot, in the page's colours, with a legend, and a table for screen readers.

import { h } from "./dom.js";

/* global uPlot */

const HEIGHT = 240;
const ROWS = 100; // Maximum in the table for screen readers.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const schemes = matchMedia("(prefers-color-scheme: dark)");

// A chart of series over numbers.
//
// `x` is {label, format}, `y` is the title of the values, and `format` formats them. A series is {label, tone, faint, dash, dots,
// mark}: `tone` is the number of a colour, and a series with `mark` is not in the table.
export function lineChart({ title, x, y, format, series, signal }) {
  const keys = series.map((each) => h("b", {}));
  const legend = h(
    "ul",
    { class: "legend" },
    series.map((each, at) =>
      h(
        "li",
        {},
        h("i", { class: `swatch tone${each.tone}${each.dash ? " dashed" : ""}${each.faint ? " faint" : ""}`, "aria-hidden": "true" }),
        `${each.label} `,
        keys[at],
      ),
    ),
  );
  const canvas = h("div", { class: "canvas", "aria-hidden": "true" });
  const summary = h("p", { class: "unseen" });
  const body = h("tbody");
  const curves = series.map((each, at) => at).filter((at) => !series[at].mark);
  const values = h(
    "details",
    { class: "values" },
    h("summary", {}, "Values"),
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}: values` },
      h(
        "table",
        {},
        h("caption", { class: "unseen" }, `${title}, newest first`),
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            [x.label, ...curves.map((at) => series[at].label)].map((text) =>
              h("th", { scope: "col", class: "number" }, text),
            ),
          ),
        ),
        body,
      ),
    ),
  );
  const node = h("figure", { class: "chart", "aria-label": title }, legend, canvas, summary, values);
  let data = [[], ...series.map(() => [])];
  let plot = null;

  function draw() {
    const width = Math.floor(canvas.clientWidth);
    if (width < 50 || !data[0].length) return;
    if (plot === null) plot = new uPlot(options(width), data, canvas);
    else if (plot.width !== width) plot.setSize({ width, height: HEIGHT });
  }

  function options(width) {
    const axis = {
      stroke: () => colour("--muted"),
      grid: { stroke: () => colour("--grid"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif",
      labelSize: 18,
    };
    return {
      width,
      height: HEIGHT,
      padding: [10, 14, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
      scales: { x: { time: false } },
      axes: [
        { ...axis, label: x.label, size: 30, values: (_, splits) => splits.map(x.format) },
        { ...axis, label: y, size: 58, values: (_, splits) => splits.map(format) },
      ],
      series: [
        {},
        ...series.map((each) => ({
          stroke: () => colour(`--tone${each.tone}${each.faint ? "-faint" : ""}`),
          width: each.faint ? 1 : 2,
          dash: each.dash ? [6, 5] : undefined,
          spanGaps: true,
          points: { show: Boolean(each.dots), size: 6, fill: () => colour(`--tone${each.tone}`) },
        })),
      ],
      hooks: { setCursor: [(u) => tell(u.cursor.idx)] },
    };
  }

  // Shows the values at the cursor, or the newest values.
  function tell(at) {
    series.forEach((_, index) => {
      const row = data[index + 1];
      const value = at === null || at === undefined ? row.findLast(isNumber) : row[at];
      keys[index].textContent = isNumber(value) ? format(value) : "";
    });
  }

  function list() {
    if (!values.open) return;
    const rows = [];
    for (let at = data[0].length - 1; at >= 0 && rows.length < ROWS; at -= 1) {
      const found = curves.map((index) => data[index + 1][at]);
      if (!found.some(isNumber)) continue;
      rows.push(
        h(
          "tr",
          {},
          h("th", { scope: "row", class: "number" }, x.format(data[0][at])),
          found.map((value) => h("td", { class: "number" }, isNumber(value) ? format(value) : "–")),
        ),
      );
    }
    body.replaceChildren(...rows);
  }

  values.addEventListener("toggle", list);
  const resized = new ResizeObserver(draw);
  resized.observe(canvas);
  schemes.addEventListener("change", () => plot?.redraw(false, true), { signal });
  signal.addEventListener(
    "abort",
    () => {
      resized.disconnect();
      plot?.destroy();
    },
    { once: true },
  );

  return {
    node,
    // `rows` are the values of x and of each series, `text` is the description.
    update(rows, text) {
      data = rows;
      summary.textContent = text;
      if (plot === null) draw();
      else plot.setData(data);
      tell(plot?.cursor.idx);
      list();
    },
  };
}

const isNumber = (value) => typeof value === "number";
