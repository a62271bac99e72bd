// How numbers are written for people, as headrace's other views write them.

const NONE = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** "842", "3.1k", "12M", "0.0042": three digits and a magnitude. */
export function short(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  for (const [limit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= limit) {
      const scaled = value / limit;
      return `${scaled.toFixed(Math.abs(scaled) < 100 ? 1 : 0)}${letter}`;
    }
  }
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  if (size >= 0.001) return String(Number(value.toPrecision(3)));
  return value.toExponential(1);
}

/** "1,234,567". */
export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : NONE);

/** "81.3%" from 0.813. */
export const percent = (rate, digits = 1) =>
  known(rate) ? `${(100 * rate).toFixed(digits)}%` : NONE;

/** "+30.7" percentage points from 0.307. */
export const points = (rate) => (rate >= 0 ? "+" : "−") + Math.abs(100 * rate).toFixed(1);

/** "0.4 s", "42 s", "3:07", "1:02:03". */
export function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 9.95) return `${Math.max(seconds, 0).toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const pad = (n) => String(n).padStart(2, "0");
  const [hours, minutes, secs] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return hours ? `${hours}:${pad(minutes)}:${pad(secs)}` : `${minutes}:${pad(secs)}`;
}

/** Local date and time to the second from unix seconds. */
export const moment = (unix) => (unix ? new Date(unix * 1000).toLocaleString("sv") : NONE);

/** "n rollouts", "1 rollout". */
export const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
