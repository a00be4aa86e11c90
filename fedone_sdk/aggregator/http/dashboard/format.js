// Formatting of numbers, times and names.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const money = new Intl.NumberFormat("en", { style: "currency", currency: "USD", maximumFractionDigits: 4 });

export const count = (value) => whole.format(value);
export const loss = (value) => value.toFixed(3);
export const metric = (value) => value.toFixed(3);
export const percent = (value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;

export function amount(unit, value) {
  return unit === "usd" ? money.format(value) : count(value);
}

export const UNITS = {
  queries: "queries",
  requests: "requests",
  tokens: "tokens",
  prompt_tokens: "prompt tokens",
  completion_tokens: "completion tokens",
  usd: "US dollars",
};

export function bytes(value) {
  const names = ["bytes", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < names.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${names[at]}`;
}

export function duration(seconds) {
  if (seconds < 1) return "under 1 s";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = seconds / 3600;
  return hours < 48 ? `${hours.toFixed(1)} h` : `${(hours / 24).toFixed(1)} days`;
}

// A local time, with its date if that is not today's.
export function moment(seconds) {
  const at = new Date(1000 * seconds);
  const today = at.toDateString() === new Date().toDateString();
  return at.toLocaleString([], { ...(today ? {} : { month: "short", day: "numeric" }), hour: "2-digit", minute: "2-digit" });
}

export function ago(seconds) {
  const past = Math.max(Date.now() / 1000 - seconds, 0);
  return past < 90 ? "just now" : `${duration(past)} ago`;
}

// Shortens client ids, whose ends differ.
export function shortName(id) {
  return id.length <= 15 ? id : `${id.slice(0, 9)}…${id.slice(-4)}`;
}

// A token with visible outer spaces.
export function token(text) {
  if (text === "") return "∅";
  const short = text.length > 80 ? `${text.slice(0, 79)}…` : text;
  return short.replace(/\n/g, "↵").replace(/^ | $/g, "␣");
}

const STATUS = {
  running: ["Running", "accent"],
  completed: ["Completed", "good"],
  budget_exhausted: ["Budget used up", "warn"],
  stopped: ["Stopped", "plain"],
  failed: ["Failed", "bad"],
};

export function status(name) {
  return STATUS[name] ?? [name, "plain"];
}

export function plural(number, one, many) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
