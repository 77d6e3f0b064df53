// Numbers, times and names as people read them.

export const FINAL = new Set(["succeeded", "failed", "cancelled"]);

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (Number.isInteger(value)) return String(value);
  return size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}

export const reward = (value) => value === null || value === undefined ? "–" : value.toFixed(2);
export const loss = (value) => value === null || value === undefined ? "–" : value.toPrecision(3);
export const share = (value) => value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;

export function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
}

export const ago = (seconds) => `${duration(Date.now() / 1000 - seconds)} ago`;
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();
export const moment = (seconds) => new Date(seconds * 1000).toLocaleString();
export const bytes = (count) => count < 1024 ? `${count} B` : count < 1 << 20 ? `${(count / 1024).toFixed(0)} KiB` : count < 2 ** 30 ? `${(count / (1 << 20)).toFixed(1)} MiB` : `${(count / 2 ** 30).toFixed(1)} GiB`;

/** Does a job learn its file's own answers? Then it has losses, and no rewards. */
export const isSupervised = (job) => job.method.type === "supervised";
const WORTH_A_BADGE = 0.05;
/** Share of the trajectories that failed, over all steps; 0 if it is not worth a word. */
export function failedShare(curves) {
  const shares = (curves?.metrics.failed_share ?? []).filter((value) => value !== null);
  const mean = shares.reduce((sum, value) => sum + value, 0) / Math.max(1, shares.length);
  return mean < WORTH_A_BADGE ? 0 : mean;
}
/** The event that says best how a job stands: the newest warning or error, but none of a standstill that is over; else the newest. */
export const standing = (newest) => newest.find((event, i) => event.level !== "info" && !(i && event.message.startsWith("Nothing has come back"))) ?? newest[0];

export const evaluated = (job) => isSupervised(job) ? (job.last_eval_loss === null ? "" : loss(job.last_eval_loss))
  : job.first_eval_reward === null ? "" : `${reward(job.first_eval_reward)} → ${reward(job.last_eval_reward)}`;

/** A job's name for people: its suffix, or the end of its id. */
export const name = (job) => job.user_provided_suffix || job.id;
