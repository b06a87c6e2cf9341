// Numbers as a person reads them: three digits, the unit's own scale, and a dash for what is not there.
export const DASH = "–";

export function number(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  if (unit === "bytes") return bytes(value);
  if (unit === "s") return seconds(value);
  if (unit === "share") return `${(100 * value).toFixed(Math.abs(value) < 0.1 && value !== 0 ? 1 : 0)} %`;
  return plain(value);
}

export function plain(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e5 && (Number.isInteger(value) || size >= 1e3)) return Math.round(value).toLocaleString("en");
  if (size >= 1e12 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  for (const [scale, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) if (size >= scale) return `${three(value / (letter === "k" ? 1e3 : scale))}${letter}`;
  return three(value);
}

const three = value => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : Math.abs(value) >= 1 ? value.toFixed(2) : Math.abs(value) >= 0.1 ? value.toFixed(3) : String(Number(value.toPrecision(3))));

export function bytes(value) {
  for (const [scale, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (Math.abs(value) >= scale) return `${three(value / scale)} ${name}`;
  return `${value.toFixed(0)} B`;
}

export function seconds(value) {
  if (value >= 86400) return `${(value / 86400).toFixed(1)} d`;
  if (value >= 3600) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 120) return `${(value / 60).toFixed(1)} min`;
  if (value >= 1) return `${three(value)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toFixed(0)} ms`;
  return value === 0 ? "0 s" : `${(value * 1e6).toFixed(0)} µs`;
}

export const percent = value => `${(100 * value).toFixed(1)} %`;
export const share = value => number(value, "share");
// Of a run: one of six colours, hollow from the seventh on.
export const dot = run => `dot bg-${run % 6}${run > 5 ? " again" : ""}`;
export const clock = t => (t ? new Date(t * 1000).toLocaleTimeString("en-GB") : DASH);
// A path of the run's metrics for eyes: "score/reward_mean" -> "reward mean".
export const title = name => name.replace(/^[a-z]+\//, "").replaceAll("_", " ").replaceAll("/", " · ");
